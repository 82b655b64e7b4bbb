"""Local copies of checkpoints (checkpoint.local_dir): a run resumes bitwise from its own, from peers', or without."""

import errno
import shutil
import signal
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import config_file, losses, main, same, saved_state, start, wait_for_lines
from conftest import cover, on_devices, random_tokens, records, resolved, small
from local_copies import flip, kept, remove_checkpoint

from nanotrain_jax.checkpoint import checksums, compatibility, directory, local, local_read, lock, safetensors
from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.run_sections import Checkpoint
from nanotrain_jax.data import batches as data
from nanotrain_jax.step import build as steps

__all__ = ["config_file"]  # a fixture


@pytest.fixture
def stopped(config_file, tmp_path):
    """A run with shared checkpoints of steps 5 and 10 and local copies of 12 and 15, as if killed after step 15."""
    keys = (config_file, f"logging.dir={tmp_path}/run", f"checkpoint.local_dir={tmp_path}/local")
    keys += "checkpoint.local_every=3", "train.eval_every=0", "checkpoint.every=10"
    assert main(*keys, "train.steps=16") == 0
    remove_checkpoint(tmp_path / "run", 16)
    assert (directory.finished(tmp_path / "run" / "checkpoints"), kept(tmp_path / "local" / "0")) == ([10], [12, 15])
    return keys


def test_a_run_resumes_bitwise_from_a_newer_local_copy_and_of_damaged_ones_from_the_one_before(
    stopped, tmp_path, capsys
):
    assert main(*stopped[:1], f"logging.dir={tmp_path}/whole", "train.eval_every=0") == 0
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.copytree(tmp_path / "local", tmp_path / "local_again")
    assert main(*stopped) == 0
    assert f"resumed from step 15 of local copies in {tmp_path}/local\n" in capsys.readouterr().out
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "run"))
    assert [r["step"] for r in records(tmp_path / "run")] == [*range(1, 17), *range(16, 21)]
    assert [r["step"] for r in records(tmp_path / "run")[16:] if "save_seconds" in r] == [19]

    flip(tmp_path / "local_again" / "0", 15)
    again = f"logging.dir={tmp_path}/again", f"checkpoint.local_dir={tmp_path}/local_again"
    assert main(*stopped, *again) == 0
    out = capsys.readouterr().out
    folder = f"{tmp_path}/local_again/0"
    assert f"warning: skipped the local copy of step 15 in {folder}: 15/model.safetensors is damaged\n" in out
    assert "warning: skipped local copies of step 15: none is intact\n" in out
    assert f"resumed from step 12 of local copies in {tmp_path}/local_again\n" in out
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "again"))


def test_without_an_intact_local_copy_a_run_resumes_from_the_shared_one(stopped, tmp_path, capsys):
    flip(tmp_path / "local" / "0", 15)
    shutil.rmtree(next((tmp_path / "local" / "0").glob("*/checksums/12")))  # never completed
    assert main(*stopped, "train.steps=14") == 0
    out = capsys.readouterr().out
    assert "warning: skipped local copies of step 15: none is intact\n" in out
    assert f"resumed from step 10 in {tmp_path}/run/checkpoints\n" in out
    assert kept(tmp_path / "local" / "0") == [12]  # taken again; what is of a later step is gone


def test_a_run_whose_last_step_has_only_a_local_copy_saves_it(stopped, tmp_path, capsys):
    assert main(*stopped, "train.steps=15") == 0
    out = capsys.readouterr().out
    assert "resumed from step 15 of local copies" in out
    assert "done at step 15 of 15" in out
    assert directory.finished(tmp_path / "run" / "checkpoints") == [15, 10]
    assert main(*stopped, "train.steps=15") == 0
    assert f"resumed from step 15 in {tmp_path}/run/checkpoints" in capsys.readouterr().out


def test_copies_of_another_run_are_not_used_and_make_room(stopped, tmp_path, capsys):
    remove_checkpoint(tmp_path / "run", 10)
    assert main(*stopped, "train.steps=6", "checkpoint.resume=never") == 0
    assert "resumed" not in capsys.readouterr().out
    assert kept(tmp_path / "local" / "0") == [3, 6]
    shutil.rmtree(tmp_path / "run")  # start again in a new folder
    assert main(*stopped, "train.steps=3") == 0
    assert "resumed" not in capsys.readouterr().out
    assert kept(tmp_path / "local" / "0") == [3]
    (tmp_path / "file").write_text("")
    for keys, text in {
        (f"checkpoint.local_dir={tmp_path}/file",): f"checkpoint.local_dir='{tmp_path}/file/0' cannot be written to",
        ("checkpoint.local_every=20",): "checkpoint.local_every=20, a multiple of checkpoint.every=10: such steps",
        ("checkpoint.every=0",): "with checkpoint.every=0: local copies are lost with their hosts; use checkpoint.eve",
        (f"checkpoint.dir={tmp_path}/local",): f"checkpoint.local_dir='{tmp_path}/local' is checkpoint.dir too; use a",
        (
            "memory.offload_optimizer=nvme",
            f"memory.nvme_dir={tmp_path}/nvme",
        ): "local copies hold what is in memory; use",
    }.items():
        assert main(*stopped, *keys) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1
    with lock.held(local.KEY, tmp_path / "local" / "0"):
        assert main(*stopped, "train.steps=4") == 2
    assert (
        "local/0 is in use by another run; stop it, or choose another checkpoint.local_dir" in capsys.readouterr().err
    )


def test_a_full_local_disk_is_one_warning_and_the_run_continues(stopped, tmp_path, capsys, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    usage = shutil.disk_usage
    monkeypatch.setattr(local.shutil, "disk_usage", lambda path: free if "local/" in str(path) else usage(path))
    assert main(*stopped) == 0
    out = capsys.readouterr().out
    assert f"warning: no local copy of step 18 (checkpoint.local_dir={tmp_path}/local): it needs " in out
    assert "and 1,000 are free; the run continues without it\n" in out
    assert kept(tmp_path / "local" / "0") == [15]  # the one before stays


def test_a_copy_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    (tmp_path / "local" / "0").mkdir(parents=True)
    keys = {"dir": str(tmp_path), "local_dir": str(tmp_path / "local"), "async": False}
    config, state, warnings = Checkpoint.model_validate(keys), {"x": jnp.ones(4)}, []
    with local.ready(config, 0), local.writing(config, 0, warnings.append) as save:
        save(1, state, {})
        with monkeypatch.context() as patched:
            patched.setattr(local.safetensors, "write", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            save(2, state, {})
        assert [text.partition(" (")[0] for text in warnings] == ["warning: no local copy of step 2"]
        assert kept(tmp_path / "local" / "0") == [1]
        save(3, state, {})
    assert kept(tmp_path / "local" / "0") == [1, 3]


def test_a_rollback_removes_copies_that_no_process_uses_too(tmp_path):
    (tmp_path / "local" / "0").mkdir(parents=True)
    config, state = Checkpoint(dir=str(tmp_path), local_dir=str(tmp_path / "local")), {"x": jnp.ones(4)}
    with local.ready(config, 0), local.writing(config, 0, pytest.fail) as save:
        save(1, state, {})
    other = tmp_path / "local" / "1"  # of a process that was here when hosts had another order
    shutil.copytree(tmp_path / "local" / "0", other)
    local.forget(config)
    assert [path.name for path in (tmp_path / "local").glob("?/[!.]*")] == []


def test_a_lock_of_a_process_that_is_ending_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "OF_ORPHANS", 20.0)
    for env, seconds in {(): 0, ("NANOTRAIN_LAUNCHER",): 20, ("NANOTRAIN_LAUNCHER", "NANOTRAIN_ROUND"): 180}.items():
        with monkeypatch.context() as patched:
            for name in env:
                patched.setenv(name, "7")
            assert lock.patience() == seconds
    with lock.held(local.KEY, tmp_path), pytest.raises(OSError, match="in use"), lock.held(local.KEY, tmp_path):
        pass
    before = lock.held(local.KEY, tmp_path)
    before.__enter__()
    threading.Timer(0.2, before.__exit__, (None, None, None)).start()
    with lock.held(local.KEY, tmp_path, patience=30):
        pass


LAYOUTS = {
    "zero3": {"parallel": {"data": 4, "zero": 3, "persist_below": 64}},
    "chunks": {
        "model": {"num_layers": 4},
        "parallel": {"pipe": 2, "data": 2, "zero": 1, "microbatches": 2, "schedule": "interleaved", "chunks": 2},
    },
    "uneven": {"model": {"num_layers": 3}, "parallel": {"pipe": 2, "tensor": 2, "microbatches": 2}},
    "apart": {"parallel": {"replica": 2, "data": 2, "zero": 2, "sync_every": 5, "persist_below": 64}},
    "compressed": {"parallel": {"replica": 2, "data": 2, "compress": "topk:0.1"}},
    "host": {"memory": {"offload_optimizer": "host"}, "parallel": {"data": 2, "zero": 1}},
    "host zero3": {
        "memory": {"offload_optimizer": "host", "offload_params": "host"},
        "parallel": {"data": 2, "zero": 3, "persist_below": 64},
    },
    "float16": {"precision": {"compute": "float16", "loss_scale": "dynamic"}, "parallel": {"data": 2}},
    "bfloat16": {"precision": {"compute": "bfloat16"}, "parallel": {"data": 2, "tensor": 2, "zero": 2}},
    "muon": {"optimizer": {"name": "muon"}, "parallel": {"data": 2, "zero": 2}},
}
META = {
    "config": {"model": {}, "data": {"seq_len": 16}}
    | {section: {} for section in compatibility.REPORTED.keys() - {"model", "data"}},
    "tokenizer": None,
    "data": {"position": 7, "fingerprint": "x"},
}


def saved_and_found(tmp_path, state, abstract):
    """Save a state and restore it onto other shardings -> it or None, and warnings."""
    config = configs.Checkpoint(dir=str(tmp_path), local_dir=str(tmp_path / "local"))
    (tmp_path / "local" / "0").mkdir(parents=True)
    with local.ready(config, 0), local.writing(config, 0, pytest.fail) as save:
        save(1, state, META)

    def use(copies):
        assert copies.meta().data.position == 7
        assert copies.shapes() == directory.shapes(state)
        return copies.state(abstract, bool)

    return local_read.newest(config, 0, use)


@pytest.mark.parametrize("layout", cover(["chunks"], [name for name in LAYOUTS if name != "chunks"]))
@jax.numpy_dtype_promotion("standard")
def test_every_layout_restores_bitwise(layout, tmp_path):
    sections = {name: dict(keys) for name, keys in LAYOUTS[layout].items()}
    step = steps.build(*resolved(small(**sections)))
    state = step.init()
    (tokens,) = random_tokens(step.plan.config, count=1)
    state, *_ = step.train(state, on_devices(tokens, step))
    state = step.in_layer_order(state)
    found, warnings = saved_and_found(tmp_path, state, step.saved)
    assert not warnings
    same(jax.device_get(found), jax.device_get(state))
    assert jax.tree.map(lambda x: (x.dtype, x.sharding.memory_kind), found) == jax.tree.map(
        lambda x: (x.dtype, x.sharding.memory_kind), state
    )
    step.train(step.in_stage_order(found), on_devices(tokens, step))


def on_mesh(spec, **shapes):
    """Arrays of consecutive numbers, split as spec over 4 devices."""
    sharding = jax.NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), spec)
    return {
        name: jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)
        for name, shape in shapes.items()
    }


SPLIT, WHOLE = jax.P("data"), jax.P()


def test_each_distinct_shard_is_written_once(tmp_path):
    state = {"state": on_mesh(SPLIT, w=(8, 3))} | on_mesh(WHOLE, b=(4,), step=())
    _, warnings = saved_and_found(tmp_path, state, state)
    (folder,) = (tmp_path / "local" / "0").glob("*/1")
    sizes = {name: tensor.size for name, tensor in safetensors.load(folder / safetensors.SINGLE).items()}
    rows = {f"state/w float32 [8, 3] {i}:{i + 2},0:3": 24 for i in (0, 2, 4, 6)}
    assert sizes == rows | {"b float32 [4] 0:4": 16, "step float32 [] ": 4}
    assert not warnings


@pytest.mark.parametrize(
    ("shapes", "spec", "lost"),
    [
        ({"w": (8, 3)}, WHOLE, "w"),
        ({"w": (8, 4)}, SPLIT, "w"),
        ({"w": (8, 3), "b": (4,)}, SPLIT, "b"),
        ({"w": (8, 3), "b": (4,), "c": (4,)}, SPLIT, "b and 1 more arrays"),
    ],
)
def test_shards_of_another_layout_are_refused(shapes, spec, lost, tmp_path):
    found, (warning,) = saved_and_found(tmp_path, on_mesh(SPLIT, w=(8, 3)), on_mesh(spec, **shapes))
    text = f"no process has all shards of {lost}; a host is lost, or parallel differs"
    assert (found, warning) == (None, f"warning: skipped local copies of step 1: {text}")


def test_an_array_that_is_not_asked_for_is_refused_unless_it_may_be_left_out(tmp_path):
    state = on_mesh(SPLIT, w=(8, 3))
    found, (warning,) = saved_and_found(tmp_path / "a", state, {})
    assert (found, warning) == (None, "warning: skipped local copies of step 1: this run has no array w")
    assert saved_and_found(tmp_path / "b", state, {"w": None}) == ({"w": None}, [])


def test_the_same_step_of_another_start_is_not_mixed_in(tmp_path):
    """A host that was lost comes back, with a step that the run has taken again since."""
    state, folder = on_mesh(SPLIT, w=(8, 3)), tmp_path / "local"
    saved_and_found(tmp_path, state, state)
    (run,) = (path.name for path in folder.glob("0/*") if path.is_dir())
    shutil.copytree(folder / "0" / run, folder / "1" / run)
    text = (folder / "1" / run / "1" / local.META).read_text()
    (folder / "1" / run / "1" / local.META).write_text(text.replace('"start": "', '"start": "0'))
    shutil.rmtree(folder / "1" / run / directory.SUMS)
    checksums.record(folder / "1" / run, ["1"], folder / "1" / run / directory.SUMS / "1")
    half = [name for name in local.distinct_shards(state) if "w float32 [8, 3] 0:2" in name]
    tensors = safetensors.load(folder / "0" / run / "1" / safetensors.SINGLE)
    safetensors.save(
        {name: x for name, x in tensors.items() if name not in half}, folder / "0" / run / "1" / safetensors.SINGLE
    )
    config = configs.Checkpoint(dir=str(tmp_path), local_dir=str(folder), verify=False)

    def use(copies):
        copies.meta()
        return copies.state(state, bool)

    found, warnings = local_read.newest(config, 0, use)
    assert (found, len(warnings)) == (None, 1)
    assert "no process has all shards of w; a host is lost" in warnings[0]


RUNS = {
    "stages": ("train.stages=[{name: a, steps: 8}, {name: b, steps: 12, freeze: [mlp]}]",),
    "phases": ("train.batch_schedule=[{steps: 13, batch_size: 4}]", "parallel.data=2", "parallel.microbatches=2"),
    "checks": ("runtime.verify_every=3",),
    "host": ("memory.offload_optimizer=host", "parallel.zero=2", "parallel.persist_below=64"),
    "chunks": ("parallel={pipe: 2, data: 2, schedule: interleaved, chunks: 2, microbatches: 4}", "model.num_layers=4"),
    "apart": ("parallel.replica=2", "parallel.data=2", "parallel.sync_every=4"),
    "adapters": ("train.lora={rank: 4}", "checkpoint.resume=BASE/checkpoints"),
    "synchronous": ("checkpoint.async=false", "checkpoint.verify=false"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", RUNS)
def test_every_kind_of_run_ends_bitwise_as_without_a_stop(kind, config_file, tmp_path, capsys):
    keys = config_file, *(key.replace("BASE", f"{tmp_path}/base") for key in RUNS[kind])
    keys += "train.eval_every=0", "checkpoint.every=1000"
    assert kind != "adapters" or main(config_file, f"logging.dir={tmp_path}/base", "train.steps=2") == 0
    ours = f"logging.dir={tmp_path}/run", f"checkpoint.local_dir={tmp_path}/local", "checkpoint.local_every=3"
    assert main(*keys, f"logging.dir={tmp_path}/whole") == 0
    assert main(*keys, *ours, "train.steps=16") == 0
    remove_checkpoint(tmp_path / "run", 16)
    assert main(*keys, *ours) == 0
    assert "resumed from step 15 of local copies" in capsys.readouterr().out
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "run"))


@pytest.mark.long
def test_a_killed_run_resumes_bitwise_from_its_local_copy(config_file, tmp_path, capsys):
    keys = config_file, "train.eval_every=0", "checkpoint.every=100000"
    ours = f"logging.dir={tmp_path}/run", f"checkpoint.local_dir={tmp_path}/local", "checkpoint.local_every=3"
    process = start(*keys, *ours, "train.steps=100000")
    wait_for_lines(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = kept(tmp_path / "local" / "0")[-1]
    assert newest >= 6
    last = records(tmp_path / "run")[-1]["step"] + 3
    assert main(*keys, *ours, f"train.steps={last}") == 0
    assert f"resumed from step {newest} of local copies" in capsys.readouterr().out
    assert main(*keys, f"logging.dir={tmp_path}/whole", f"train.steps={last}") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "run"))


@pytest.mark.long
def test_a_rollback_goes_to_the_shared_checkpoint_and_removes_local_copies(config_file, tmp_path, monkeypatch, capsys):
    """A local copy may be of the step before the spike, when the weights were already on their way."""
    batches = data.batches

    def poisoned(source, shapes, seed, position, order):
        for batch in batches(source, shapes, seed, position, order):
            is_bad, position = position == 13 * 8, position + shapes["inputs"].shape[0]
            yield batch | {"targets": jax.numpy.full_like(batch["targets"], 1)} if is_bad else batch

    monkeypatch.setattr(data, "batches", poisoned)
    forget, before = local.forget, []
    monkeypatch.setattr(local, "forget", lambda keys: before.append(kept(tmp_path / "local" / "0")) or forget(keys))
    keys = "train.rollback={window: 8, deviations: 3}", "train.eval_every=0", "checkpoint.every=10"
    keys += "optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=1.0e-2", "checkpoint.local_every=3"
    assert main(config_file, *keys, f"logging.dir={tmp_path}/run", f"checkpoint.local_dir={tmp_path}/local") == 0
    assert "back to step 10, and past the batches of steps 11 to 14" in capsys.readouterr().out
    assert before == [[9, 12]]
    assert kept(tmp_path / "local" / "0") == [15, 18]
