"""Batches that grow during a run, by a schedule or by the measured noise scale: equal to steps written by hand, resumed
anywhere."""

from itertools import islice, pairwise

import jax
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
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
def test_phases_are_steps_of_their_batches_on_one_state_and_resume_bitwise(config_file, tmp_path, layout):
    keys = LAYOUTS[layout]
    state, losses, val_loss = by_hand(config_file, keys)
    for count in (2, 5, 9):  # in the first phase, in the second
        run(config_file, tmp_path / "cut", *keys, SCHEDULE, f"train.steps={count}", "train.eval_every=3")
    found = records(tmp_path / "cut")
    assert np.array_equal(np.float32([record["loss"] for record in found]), np.float32(losses))
    assert [record["tokens"] for record in found] == [32 * n for n in (2, 4, 6, 10, 14, 18, 26, 34, 42)]
    assert found[2]["val_loss"] == val_loss
    number, (saved, _) = saved_state(tmp_path / "cut")
    assert number == 9
    moments = saved["opt"]["moments"][0]
    same((saved["params"], moments["mu"], moments["nu"]), (state.params, state.opt.moments[0].mu, state.opt.moments[0].nu))


GROWTH = (
    "train.noise_scale=true",
    "train.batch_growth={batch_size: 2, every: 3}",
    "data.batch_size=16",
    "parallel.microbatches=8",
    "data.seq_len=8",
    "optimizer.lr=1e-2",
)


def sizes(found):
    """Return the sequences of each step."""
    tokens = [0, *(record["tokens"] for record in found)]
    return [(b - a) // 8 for a, b in pairwise(tokens)]


def test_the_batch_doubles_at_the_first_check_with_a_noise_scale_above_it(config_file, tmp_path):
    run(config_file, tmp_path / "whole", *GROWTH, "train.steps=20")
    found = records(tmp_path / "whole")
    print([(r["step"], r["noise_scale"], n) for r, n in zip(found, sizes(found), strict=True)])
    expected, size, grows = [], 2, []
    for record in found:
        expected.append(size)
        if record["step"] % 3 == 0 and size < 16:
            noise = record["noise_scale"]
            grows.append(noise is None or noise > 8 * size)
            size *= 1 + grows[-1]
    assert sizes(found) == expected
    assert grows.count(True) == 2
    assert False in grows
    for count in (3, 4, 9, 13, 20):
        run(config_file, tmp_path / "cut", *GROWTH, f"train.steps={count}")
    again = records(tmp_path / "cut")
    assert [(r["loss"], r["lr"], r["noise_scale"], r["tokens"]) for r in again] == [
        (r["loss"], r["lr"], r["noise_scale"], r["tokens"]) for r in found
    ]
    same(saved_state(tmp_path / "cut"), saved_state(tmp_path / "whole"))
