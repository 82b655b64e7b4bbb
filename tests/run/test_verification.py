"""Silent errors of hardware: a flipped bit is found, its device named, and the run ends as if it had not been."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import built, cover, records, small, without_times
from jax import lax
from jax.sharding import PartitionSpec as P
from launching import finished, free_port, one

from nanotrain_jax.distributed.exit_codes import ENDED
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.collectives import position
from nanotrain_jax.parallel.mesh import AXES
from nanotrain_jax.run import goodput, loop, verification
from nanotrain_jax.step import build as steps
from nanotrain_jax.step import digest

__all__ = ["config_file"]  # a fixture
KEYS = "runtime.verify_every=8", "checkpoint.every=5", "train.eval_every=0"
# Keys of a layout; a device of its four (of two with pipe 2), and where it is.
LAYOUTS = {
    "data": ([], 2, "data 2"),
    "zero 1": (["parallel.zero=1"], 2, "data 2"),
    "zero 3": (["parallel.zero=3", "parallel.persist_below=0"], 2, "data 2"),
    "pipe": (
        ["parallel.pipe=2", "model.num_layers=2", "parallel.data=3", "parallel.microbatches=2", "data.batch_size=12"],
        4,
        "pipe 1, data 1",
    ),
    "tensor": (["parallel.tensor=2", "parallel.data=2"], 3, "data 1, tensor 1"),
    "host": (["memory.offload_optimizer=host"], 2, "data 2"),
    "nvme": (["memory.offload_optimizer=nvme", "memory.nvme_dir={run}_nvme", "parallel.persist_below=64"], 2, "data 2"),
    "replicas": (["parallel.replica=2", "parallel.data=2", "parallel.sync_every=5"], 3, "replica 1, data 1"),
    "phases": (
        ["train.batch_schedule=[{steps: 4, batch_size: 8}]", "data.batch_size=16", "parallel.microbatches=2"],
        2,
        "data 2",
    ),
}
COPIES_APART = "zero 3", "replicas"  # without copies of weights


def run(config_file, folder, *overrides, code=0):
    overrides = [key.replace("{run}", str(folder)) for key in overrides]
    assert main(config_file, f"logging.dir={folder}", *KEYS, *overrides) == code


def flipped(x, number):
    """Return an array with one bit of one element flipped in the copy of device `number`."""
    shards = {shard.device: np.array(shard.data) for shard in x.addressable_shards}
    if jax.devices()[number] in shards:
        bits = shards[jax.devices()[number]].reshape(-1)[:1].view(np.uint32)
        bits ^= np.uint32(1 << 12)
    arrays = [jax.device_put(data, device) for device, data in shards.items()]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


def flip_weights(monkeypatch, device, at, times=1):
    """Flip a bit of one device's weights after step `at`, as often as the run comes there, up to so many times."""
    plain, left = loop.Loop.take_step, [times]

    def take_step(self, *arguments):
        if self.number == at and left[0]:
            left[0] -= 1
            leaves, structure = jax.tree.flatten(self.state.params)
            shared = next(i for i, x in enumerate(leaves) if not any(x.sharding.spec))  # every device has a copy
            leaves[shared] = flipped(leaves[shared], device)
            self.state = self.state._replace(params=jax.tree.unflatten(structure, leaves))
        return plain(self, *arguments)

    monkeypatch.setattr(loop.Loop, "take_step", take_step)


def flip_gradient(monkeypatch, device, at):
    """Let one device compute one bit of its gradient differently in the second computation before step `at` + 1."""

    def faulty(function):
        def gradients(*arguments):
            found = function(*arguments)
            leaves, structure = jax.tree.flatten(found.grads)
            bits = lax.bitcast_convert_type(leaves[0], jnp.uint32).reshape(-1)
            bits = jnp.where(position(AXES) == device, bits.at[0].set(bits[0] ^ jnp.uint32(1 << 12)), bits)
            leaves[0] = lax.bitcast_convert_type(bits, jnp.float32).reshape(leaves[0].shape)
            return found._replace(grads=jax.tree.unflatten(structure, leaves))

        return gradients

    plain, left = verification.Checks, [2, 1]

    class Checks(plain):
        def __init__(self, step):
            super().__init__(step)
            self.good = self.compute
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(steps, "GRADIENTS", {key: faulty(one) for key, one in steps.GRADIENTS.items()})
                step = steps.build(step.plan.config, step.plan.mesh)
                bad = step.digests.gradients.lower(step.state, step.batch).compile()

            def compute(state, batch):
                here = int(state.step) == at
                left[0] -= here
                return bad(state, batch) if here and left[0] == 0 else self.good(state, batch)

            self.compute = compute

    monkeypatch.setattr(loop, "Checks", Checks)


FLIPS = {"params": (flip_weights, "of equal copies"), "gradients": (flip_gradient, "computed twice")}
CASES = [(name, of) for of in FLIPS for name in LAYOUTS if of == "gradients" or name not in COPIES_APART]
FAST = [("data", "params"), ("tensor", "gradients")]


@pytest.mark.parametrize("case", cover(FAST, [case for case in CASES if case not in FAST]))
def test_a_flipped_bit_is_found_and_undone(case, config_file, tmp_path, monkeypatch, capsys):
    """The run equals one without checks or errors."""
    name, of = case
    layout, device, place = LAYOUTS[name]
    flip, check = FLIPS[of]
    with monkeypatch.context() as patch:
        flip(patch, device, at=7)
        run(config_file, tmp_path / "run", *layout)
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("silent error after ")]
    assert line.startswith(f"silent error after step 7: {check}, {of}/")
    assert line.endswith(f" differs on process 0, local device {device} ({place}); back to step 5, and on")
    assert "  silent errors     1 (runtime.verify_every)" in out
    run(config_file, tmp_path / "other", *layout, "runtime.verify_every=0")
    same(saved_state(tmp_path / "run"), saved_state(tmp_path / "other"))
    logged, expected = (without_times(records(tmp_path / name)) for name in ("run", "other"))
    assert [record.pop("mismatches", 0) for record in logged] == [0] * 6 + [1] * 15  # step 7 was pending
    assert {record["step"]: record for record in logged} == {record["step"]: record for record in expected}
    line = goodput.read(tmp_path / "run")[-1]
    assert line.undone == 2
    assert 0 < goodput.by_cause([line])["verification"] < line.time - line.began


@pytest.mark.parametrize("case", cover([], LAYOUTS))
def test_a_run_with_checks_is_bitwise_one_without(case, config_file, tmp_path, capsys):
    layout = LAYOUTS[case][0]
    run(config_file, tmp_path / "run", *layout, "runtime.verify_every=1")
    assert "silent error" not in capsys.readouterr().out
    run(config_file, tmp_path / "other", *layout, "runtime.verify_every=0")
    same(saved_state(tmp_path / "run"), saved_state(tmp_path / "other"))
    logged, expected = (without_times(records(tmp_path / name)) for name in ("run", "other"))
    assert logged == expected


def test_different_copies_are_never_saved_and_stop_a_run_that_does_not_come_past_them(
    config_file, tmp_path, monkeypatch, capsys
):
    """The weights change after the only check of a step, before a checkpoint."""
    flip_weights(monkeypatch, 2, at=9, times=2)
    run(config_file, tmp_path / "run", "runtime.verify_every=100", code=ENDED)
    out, err = capsys.readouterr()
    assert "silent error after step 10: of equal copies, params/" in out
    assert "back to step 5, and on" in out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: silent error after step 10, again after that of step 10: of equal copies, params/")
    assert line.endswith("the newest checkpoint is of step 5; replace the device and repeat the command")
    assert saved_state(tmp_path / "run")[0] == 5
    assert records(tmp_path / "run")[-1]["mismatches"] == 2


@pytest.mark.long
def test_a_run_that_is_told_to_stop_says_where_and_resumes(config_file, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        flip_gradient(patch, 1, at=7)
        run(config_file, tmp_path / "run", "runtime.on_mismatch=stop", code=ENDED)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: silent error after step 7: computed twice, gradients/")
    assert " on process 0, local device 1 (data 1); the newest checkpoint is of step 5; " in line
    assert saved_state(tmp_path / "run")[0] == 5
    run(config_file, tmp_path / "run", "runtime.on_mismatch=stop")
    run(config_file, tmp_path / "other", "runtime.verify_every=0")
    same(saved_state(tmp_path / "run"), saved_state(tmp_path / "other"))


@pytest.mark.long
def test_the_process_of_the_device_is_named(config_file, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flip = "import runpy, sys, pytest; sys.path[:0] = ['tests', 'tests/run']; import test_verification as t; "
    flip += "t.flip_weights(pytest.MonkeyPatch(), 5, at=7); "
    begin = ["-c", flip + "runpy.run_module('nanotrain_jax.train', run_name='__main__', alter_sys=True)"]
    keys = [*KEYS, "parallel.data=8", f"logging.dir={tmp_path}/run"]
    both = [one(config_file, env | {"RANK": str(i)}, *keys, begin=begin) for i in range(2)]
    out, _ = [finished(process)[0] for process in both]
    assert "silent error after step 7: of equal copies, params/" in out
    assert " differs on process 1, local device 1 (data 5); back to step 5, and on" in out
    run(config_file, tmp_path / "other", "parallel.data=8")
    last = [records(tmp_path / name)[-1] for name in ("run", "other")]
    assert last[0].pop("mismatches") == 1
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)


def test_most_copies_are_right_and_of_two_either_may_be_wrong():
    mesh = meshes.make(data=4, tensor=2)
    ids = mesh.devices.reshape(-1)  # data outside of tensor
    assert [device.id for device in ids] == list(range(8))
    rows = {name: np.arange(8, dtype=np.uint32) * 0 for name in ("all", "split", "apart", "rows")}
    specs = {"all": P(), "split": P(None, "tensor"), "apart": P(("data", "tensor")), "rows": P("data")}
    assert verification.odd({"all": rows["all"], "split": np.tile(np.uint32([1, 2]), 4)}, specs, mesh) == {}
    rows["all"][5] = rows["split"][2] = rows["apart"][3] = rows["rows"][7] = 9
    del rows["apart"]  # without copies
    found = verification.odd(rows, specs, mesh)
    assert found == {"all": [5], "split": [2], "rows": [6, 7]}
    text = verification.described({"rows": [6, 7], "all": [6, 7]}, mesh)
    assert text == (
        "rows and 1 more arrays differ on 2 of 8 devices, one of them wrong: process 0, local device 6 (data 3, "
        "tensor 0), process 0, local device 7 (data 3, tensor 1)"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32"])
def test_every_flipped_bit_changes_the_digest(dtype):
    values = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (3, 5)), dtype)
    kind = np.dtype(f"uint{8 * values.dtype.itemsize}")
    compute = jax.jit(digest.digest)
    known = int(compute(values))
    assert known == int(np.asarray(values).view(kind).astype(np.uint64).sum() % 2**32)
    for bit in range(8 * kind.itemsize):
        bits = np.array(values).view(kind)
        bits[1, 2] ^= kind.type(1 << bit)
        assert int(compute(jnp.asarray(bits.view(values.dtype)))) != known


@pytest.mark.parametrize(
    "parallel", cover([{"zero": 1}], [{}, {"zero": 3, "persist_below": 0}, {"pipe": 2, "microbatches": 2}], str)
)
def test_a_check_needs_no_more_memory_than_a_step(parallel):
    step = built(small(parallel={"data": 4} | parallel))
    of_check, of_step = (
        function.lower(step.state, step.batch).compile() for function in (step.digests.gradients, step.train)
    )
    moments = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(step.state.opt))
    digests = sum(x.size * 4 for x in jax.tree.leaves(of_check.out_info))
    peak, most = (program.memory_analysis().peak_memory_in_bytes for program in (of_check, of_step))
    assert peak + moments <= most + digests  # the moments, which a check does not read, stay where they are
