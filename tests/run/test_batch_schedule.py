"""Batches that grow during a run, by a schedule or by the measured noise scale: equal to steps written by hand, resumed
anywhere."""

import shutil
from itertools import islice, pairwise

import jax
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records, without_times
from launching import finished, launched

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.training_stages import Span, of_phase, phases
from nanotrain_jax.data import batches as data
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture
KEYS = (
    "parallel.data=2",
    "parallel.microbatches=4",
    "train.eval_every=0",
    "checkpoint.every=2",
    "checkpoint.async=false",
)
SCHEDULE = "train.batch_schedule=[{steps: 3, batch_size: 2}, {steps: 3, batch_size: 4}]"
BY_HAND = (3, 2, 1), (3, 4, 2), (3, 8, 4)  # steps, sequences, microbatches
LAYOUTS = {
    "zero 2": ["parallel.zero=2", "parallel.persist_below=64"],
    "zero 3, 16 bit": ["parallel.zero=3", "precision.compute=float16", "precision.loss_scale=dynamic"],
    "pipe": ["parallel.pipe=2", "model.num_layers=4", "parallel.schedule=zero_bubble", "parallel.zero=1"],
    "tensor, host": ["parallel.tensor=2", "memory.offload_optimizer=host", "optimizer.lr_by_batch=linear"],
    "apart": ["parallel.replica=2", "parallel.data=1", "parallel.sync_every=2", "optimizer.lr_by_batch=none"],
    "compressed": ["parallel.replica=2", "parallel.data=1", "parallel.compress=topk:0.1"],
    "noise scale": ["train.noise_scale=true", "optimizer.name=muon"],
}
POWER = {"optimizer.lr_by_batch=linear": 1, "optimizer.lr_by_batch=none": 0}


def run(config_file, folder, *overrides):
    assert main(config_file, f"logging.dir={folder}", *KEYS, *overrides) == 0


def built(config_file, *overrides):
    """Return the step of a config and its data, as the command makes them."""
    config = load.load(config_file, [*KEYS, *overrides])
    mesh = meshes.make(**config.parallel.axes)
    dataset = data.load(config.data)
    return steps.build(resolve(config, mesh.shape, dataset.vocab_size), mesh), dataset


def by_hand(config_file, keys):
    """Take the steps of BY_HAND -> the state as in checkpoints, losses, the validation loss after the first phase."""
    power = next((POWER[key] for key in keys if key in POWER), 0.5)
    whole, dataset = built(config_file, *keys)
    state, position, losses = whole.init(), 0, []
    for count, size, microbatches in BY_HAND:
        lr = f"optimizer.lr={1e-3 * (size / 8) ** power}"
        step, _ = built(config_file, *keys, f"data.batch_size={size}", f"parallel.microbatches={microbatches}", lr)
        for batch in islice(data.batches(dataset.train, step.batch, 0, position), count):
            state, metrics, _ = step.train(state, batch)
            losses.append(float(metrics["loss"].mean()))
            if step.synchronize and int(state.step) % 2 == 0:
                state = step.synchronize(state)
        position += count * size
        if size == 2:
            params = whole.average(state.params)
            sums = [whole.evaluate(params, batch) for batch in data.evaluation(dataset.val, whole.batch, 2)]
            val_loss = sum(float(loss) for loss, _ in sums) / sum(int(targets) for _, targets in sums)
    return jax.device_get(whole.in_layer_order(state)), losses, val_loss


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("layout", cover(["zero 2"], [name for name in LAYOUTS if name != "zero 2"]))
def test_phases_are_steps_of_their_batches_on_one_state(config_file, tmp_path, layout):
    keys = LAYOUTS[layout]
    state, losses, val_loss = by_hand(config_file, keys)
    run(config_file, tmp_path / "run", *keys, SCHEDULE, "train.steps=9", "train.eval_every=3")
    found = records(tmp_path / "run")
    assert np.array_equal(np.float32([record["loss"] for record in found]), np.float32(losses))
    assert [record["tokens"] for record in found] == [32 * n for n in (2, 4, 6, 10, 14, 18, 26, 34, 42)]
    assert found[2]["val_loss"] == val_loss
    number, (saved, _) = saved_state(tmp_path / "run")
    assert number == 9
    moments = saved["opt"]["moments"][0]
    same(
        (saved["params"], moments["mu"], moments["nu"]),
        (state.params, state.opt.moments[0].mu, state.opt.moments[0].nu),
    )


STAGES = "train.stages=[{name: ends, steps: 8, freeze: [^layers/]}, {name: all, steps: 4, lr: 2e-3}]"
GROWTH = (
    "train.steps=14",
    "train.noise_scale=true",
    "train.batch_growth={batch_size: 2, every: 3}",
    "data.batch_size=16",
    "parallel.microbatches=8",
    "data.seq_len=8",
    "optimizer.lr=1e-2",
)


def sizes(found, seq_len):
    """Return the sequences of each step."""
    tokens = [0, *(record["tokens"] for record in found)]
    return [(b - a) // seq_len for a, b in pairwise(tokens)]


@pytest.mark.long
def test_the_batch_doubles_at_each_check_with_a_noise_scale_above_it(config_file, tmp_path):
    run(config_file, tmp_path / "run", *GROWTH, "train.steps=6")  # a check, before it decides
    run(config_file, tmp_path / "run", *GROWTH)
    found = records(tmp_path / "run")
    expected, size, grows = [], 2, []
    for record in found:
        expected.append(size)
        if record["step"] % 3 == 0 and size < 16:
            noise = record["noise_scale"]
            grows.append(noise is None or noise > 8 * size)
            size *= 1 + grows[-1]
    assert sizes(found, 8) == expected
    assert grows[:2] == [True, True]
    assert False in grows


@pytest.mark.long
@pytest.mark.parametrize("keys", [GROWTH, (SCHEDULE, STAGES, "train.steps=12")], ids=["growth", "stages"])
def test_a_run_resumes_bitwise_from_every_step(config_file, tmp_path, keys):
    run(config_file, tmp_path / "whole", *keys, "checkpoint.every=1", "checkpoint.keep=99")
    expected, found = saved_state(tmp_path / "whole"), without_times(records(tmp_path / "whole"))
    for number in range(1, expected[0]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        for later in range(number + 1, expected[0] + 1):
            shutil.rmtree(folder / "checkpoints" / str(later))
        run(config_file, folder, *keys)
        assert without_times(records(folder)[len(found) :]) == found[number:]
        same(saved_state(folder), expected)


@pytest.mark.long
def test_several_processes_grow_as_one(config_file, tmp_path):
    run(config_file, tmp_path / "one", *GROWTH)
    finished(launched(2, config_file, f"logging.dir={tmp_path}/two", *KEYS, *GROWTH, "runtime.simulate=2"))
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert sizes(two, 8) == sizes(one, 8)
    np.testing.assert_allclose([r["loss"] for r in two], [r["loss"] for r in one], rtol=1e-6)


@pytest.mark.long
def test_each_stage_of_training_has_the_phases(config_file, tmp_path):
    run(config_file, tmp_path / "run", SCHEDULE, STAGES, "optimizer.warmup_steps=0", "optimizer.schedule=constant")
    found = records(tmp_path / "run")
    assert sizes(found, 32) == [2, 2, 2, 4, 4, 4, 8, 8, 2, 2, 2, 4]
    rates = [5e-4] * 3 + [5e-4 * 2**0.5] * 3 + [1e-3] * 2 + [1e-3] * 3 + [1e-3 * 2**0.5]
    assert [record["lr"] for record in found] == pytest.approx(rates)


def config_of(*overrides):
    return load.parse(load.nested(overrides))


def test_phases_are_of_growing_batches_and_the_rate_follows():
    whole = Span("", 0, 100)
    schedule = "train.batch_schedule=[{steps: 30, batch_size: 4}, {steps: 40, batch_size: 16}]"
    config = config_of(schedule, "parallel.microbatches=8", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3")
    first, second = Span("", 0, 30, 4), Span("", 30, 70, 16)
    assert phases(config, whole) == [first, second, Span("", 70, 100)]
    assert phases(config, Span("a", 10, 20)) == [Span("a", 10, 20, 4), Span("a", 20, 20)]
    growth = config_of("train.batch_growth={batch_size: 6, every: 5}", "train.noise_scale=true")
    assert phases(growth, whole) == [Span("", 0, 100, 6), Span("", 0, 100, 12), Span("", 0, 100, 24), whole]

    def rates(rule):
        o = of_phase(config.replace("optimizer", lr_by_batch=rule), first).optimizer
        return o.lr, o.min_lr

    assert rates("sqrt") == pytest.approx((1e-2 / 8**0.5, 1e-3 / 8**0.5))
    assert rates("linear") == (1e-2 / 8, 1e-3 / 8)
    assert rates("none") == (1e-2, 1e-3)
    plain = of_phase(config, second)
    assert (plain.data.batch_size, plain.parallel.microbatches, plain.train.batch_schedule) == (16, 4, ())
    last = of_phase(config, whole)
    assert (last.data.batch_size, last.parallel.microbatches, last.optimizer) == (32, 8, config.optimizer)


NOISE = "train.noise_scale=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.batch_schedule=[{steps: 3, batch_size: 3}]"],
            "batch_size=3 is not a part of data.batch_size=8 in parallel.microbatches=4 of 2 sequences; use a multiple "
            "of 2 below 8, or more parallel.microbatches",
        ),
        (["train.batch_growth={batch_size: 8, every: 1}", NOISE], "train.batch_growth: batch_size=8 is not a part of"),
        (
            [SCHEDULE, "parallel.microbatches=1"],
            "parallel.microbatches=1 of 8 sequences; use more parallel.microbatches",
        ),
        (["train.batch_growth={batch_size: 2, every: 1}"], "which decides; use train.noise_scale=true"),
        (["train.batch_growth={batch_size: 2, every: 1}", NOISE, SCHEDULE], "both choose the batch; leave one out"),
        (["train.batch_growth={batch_size: 2}", NOISE], "train.batch_growth.every"),
        (["train.batch_schedule=[{steps: 3, microbatches: 2}]"], "train.batch_schedule.0"),
        ([SCHEDULE, "memory.offload_optimizer=nvme", "memory.nvme_dir=x"], "each phase would begin with new files"),
        (
            [SCHEDULE, "parallel.pipe=4", "model.num_layers=4", "parallel.schedule=zb_h1"],
            "train.batch_schedule: with a batch of 2: parallel.schedule=zb_h1: 1 microbatches are too few",
        ),
        ([SCHEDULE, NOISE, "parallel.data=1"], "train.noise_scale=true with one microbatch on one device"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(config_file, capsys, overrides, message):
    assert main(config_file, *KEYS, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
