"""The command, as people use it: it runs, stops, dies, goes on bitwise, and says in one line what is wrong."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from conftest import LOSS, records

from nanotrain_jax import config as configs
from nanotrain_jax import loading, loop, train
from nanotrain_jax.runtime import checkpoint, data, request, restore

TREE = {
    "model": {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64},
    "parallel": {"data": 4},
    "precision": {"compute": "float32"},
    "data": {"batch_size": 8, "seq_len": 32, "val_fraction": 0.1},
    "optimizer": {"warmup_steps": 2, "decay_steps": 20},
    "train": {"steps": 20, "eval_every": 10, "eval_steps": 2},
    "checkpoint": {"every": 5},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}


@pytest.fixture
def config_file(tmp_path, text_files):
    tree = {**TREE, "data": TREE["data"] | {"source": f"text:{text_files}"}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def main(config_file, *overrides):
    return train.main(["--config", str(config_file), *overrides])


def start(config_file, *overrides, **how):
    """The command as a process of its own."""
    command = [sys.executable, "-m", "nanotrain_jax.train", "--config", str(config_file), *overrides]
    environment = os.environ | {"HOME": str(config_file.parent), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def losses(folder):
    """step -> (loss, val_loss), as it ran last."""
    return {r["step"]: (r["loss"], r.get("val_loss")) for r in records(folder)}


def saved_state(folder):
    """Step and state of the newest checkpoint of a run, as host arrays."""
    with ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        number = manager.latest_step()
        state = manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    apart = sorted((folder / "checkpoints" / "arrays" / str(number)).glob("*"))  # what was written array by array
    with ocp.StandardCheckpointer() as files:
        more = {path.name: files.restore(path) for path in apart}
    return number, jax.tree.map(np.asarray, (state, more))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_leaves_what_the_interface_promises(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "logging.tensorboard=true") == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} - {".logging.dir.lock"} == {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
        "processes",
    }
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").iterdir())
    lines = records(run)
    assert [r["step"] for r in lines] == list(range(1, 21))
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds"}
    assert set(lines[0]) == keys
    assert set(lines[9]) == keys | {"val_loss"}
    assert lines[19]["tokens"] == 20 * 8 * 32
    assert lines[19]["loss"] < lines[0]["loss"]
    assert all(str(np.float32(r["loss"])) == str(r["loss"]) for r in lines)  # all of a float32, and no more
    # The resolved config runs by itself.
    resolved = request.load(run / "config.yaml")
    assert resolved.model.vocab_size == 257
    assert resolved.parallel.data == 4
    out = capsys.readouterr().out
    for words in "done at step 20 of 20", "validation loss", "bigram", "loss.png", "checkpoints":
        assert words in out


def test_the_same_seed_gives_bitwise_the_same_losses(config_file, tmp_path):
    for name in "a", "b":
        assert main(config_file, f"logging.dir={tmp_path}/{name}", "checkpoint.every=0") == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert main(config_file, f"logging.dir={tmp_path}/c", "checkpoint.every=0", "data.seed=1") == 0
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_twenty_steps_are_bitwise_ten_and_ten_more_after_a_resume(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/whole") == 0
    assert main(config_file, f"logging.dir={tmp_path}/parts", "train.steps=10", "checkpoint.async=false") == 0
    assert main(config_file, f"logging.dir={tmp_path}/parts") == 0
    assert "resumed from step 10" in capsys.readouterr().out
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    (step, whole), (again, parts) = saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts")
    assert step == again == 20
    same(whole, parts)


def test_a_resume_on_another_mesh_and_zero_stage_goes_on_with_the_same_numbers(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/whole") == 0
    other = "parallel.data=2", "parallel.replica=4", "parallel.zero=3", "parallel.persist_below=64"
    assert main(config_file, f"logging.dir={tmp_path}/parts", "train.steps=5", *other) == 0
    assert main(config_file, f"logging.dir={tmp_path}/parts", "train.steps=10", "parallel.zero=1") == 0
    split = "parallel.tensor=2", "parallel.data=4", "parallel.zero=2"  # with a padded vocabulary
    assert main(config_file, f"logging.dir={tmp_path}/parts", "train.steps=15", *split) == 0
    assert "257 tokens padded to 384" in capsys.readouterr().out
    assert main(config_file, f"logging.dir={tmp_path}/parts") == 0
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    np.testing.assert_allclose([parts[i][0] for i in range(1, 21)], [whole[i][0] for i in range(1, 21)], **LOSS)


@pytest.mark.long
def test_a_resume_with_other_stages_schedules_and_chunks_goes_on_with_the_same_numbers(config_file, tmp_path, capsys):
    def run(name, steps, *overrides):
        short = "model.num_layers=4", "train.eval_every=0", f"train.steps={steps}", f"logging.dir={tmp_path}/{name}"
        assert main(config_file, *short, *overrides) == 0

    run("whole", 8)
    pipe = "parallel.data=2", "parallel.pipe=2", "parallel.microbatches=4"
    run("parts", 2, *pipe, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.zero=1")
    assert "4 microbatches over 2 stages; a stage waits 11% of the time" in capsys.readouterr().out
    run("parts", 4, "parallel.data=1", "parallel.pipe=4", "parallel.microbatches=8", "parallel.schedule=zero_bubble")
    run("parts", 6, *pipe, "parallel.tensor=2", "parallel.schedule=gpipe", "parallel.zero=3")
    run("parts", 7, *pipe, "parallel.schedule=interleaved", "parallel.chunks=2")
    run("parts", 8)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    np.testing.assert_allclose([parts[i][0] for i in range(1, 9)], [whole[i][0] for i in range(1, 9)], **LOSS)


def test_only_padding_is_cut_or_filled_up_when_a_checkpoint_is_read(tmp_path):
    state = {"ends": {"head_VD": jax.numpy.ones((3, 2))}, "layers": {"q_DNH": jax.numpy.ones((4, 6))}}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with checkpoint.writing(configs.Checkpoint(dir=str(tmp_path))) as save:
        save(1, state, {"position": 7})

    def read(head, q):
        shapes = {"ends": {"head_VD": head}, "layers": {"q_DNH": q}}
        is_shape = lambda x: isinstance(x, tuple)
        struct = lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=device)
        abstract = jax.tree.map(struct, shapes, is_leaf=is_shape)
        return restore.read_state(tmp_path, 1, abstract, lambda path: path == "ends/head_VD")

    for rows in (2, 3, 5):
        found = read((rows, 2), (4, 6))
        np.testing.assert_array_equal(found["ends"]["head_VD"], np.eye(rows, 3).sum(1)[:, None] * np.ones((1, 2)))
    for head, q in (((3, 1), (4, 6)), ((3, 2), (4, 3)), ((3, 2), (5, 6))):
        with pytest.raises(ValueError, match=r"of another shape (ends/head_VD|layers/q_DNH) \[[34], [26]\], not"):
            read(head, q)


def test_the_newest_checkpoints_are_kept_and_a_finished_run_is_left_alone(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "checkpoint.keep=2") == 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*")) == ["15", "20"]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_finished_run_started_again_prints_its_summary_without_compiling(config_file, tmp_path, capsys, monkeypatch):
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    summary = capsys.readouterr().out.partition("done at step 20 of 20")
    assert "  training loss     " in summary[2]
    assert "  validation loss   " in summary[2]
    assert f'generate --run {tmp_path}/run --prompt "def "' in summary[2]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 99.0}\n\0\0\0\n\n')  # after the newest checkpoint; a crash
    monkeypatch.setattr(loop.Loop, "compile", pytest.fail)
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    again = capsys.readouterr().out.partition("done at step 20 of 20")
    assert again[1:] == summary[1:]
    assert "warning: 2 lines of " in again[0]


def test_zero_with_nothing_to_shard_over_works_and_says_so(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=2", "parallel.data=1", "parallel.zero=3") == 0
    assert "parallel.zero=3 has nothing to shard over" in capsys.readouterr().out


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_float16_tells_its_loss_scale_and_warns_without_one(config_file, tmp_path, capsys):
    half = "precision.compute=float16", "train.steps=2", "checkpoint.every=0"
    assert main(config_file, f"logging.dir={tmp_path}/scaled", *half, "precision.loss_scale=dynamic") == 0
    assert [r["loss_scale"] for r in records(tmp_path / "scaled")] == [65536.0, 65536.0]
    assert "warning" not in capsys.readouterr().out
    assert main(config_file, f"logging.dir={tmp_path}/plain", *half) == 0
    assert "warning: float16 without a loss scale: gradients below 6e-8 become zero" in capsys.readouterr().out
    assert "loss_scale" not in records(tmp_path / "plain")[0]


def test_another_run_can_start_from_a_checkpoint_by_its_path(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/a", "train.steps=10") == 0
    assert main(config_file, f"logging.dir={tmp_path}/b", f"checkpoint.resume={tmp_path}/a/checkpoints") == 0
    assert [r["step"] for r in records(tmp_path / "b")] == list(range(11, 21))
    assert not (tmp_path / "a" / "checkpoints" / "20").exists()
    # The same command again goes on with its own checkpoints.
    again = "train.steps=21", f"checkpoint.resume={tmp_path}/a/checkpoints"
    assert main(config_file, f"logging.dir={tmp_path}/b", *again) == 0
    assert records(tmp_path / "b")[-1]["step"] == 21
    assert main(config_file, f"logging.dir={tmp_path}/c", f"checkpoint.resume={tmp_path}/none") == 2
    assert "holds no finished checkpoint" in capsys.readouterr().err


def wait_for_lines(run, more_than, process, limit=120):
    """Wait until metrics.jsonl has more lines than that."""
    path, end = run / "metrics.jsonl", time.monotonic() + limit
    while time.monotonic() < end:
        if path.exists() and path.read_text().count("\n") > more_than:
            return
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        time.sleep(0.01)
    raise AssertionError("no progress")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_stop_signal_saves_and_exits_with_0(number, config_file, tmp_path):
    long = "train.steps=100000", "train.eval_every=0", "checkpoint.every=100000", f"logging.dir={tmp_path}/run"
    process = start(config_file, *long)
    wait_for_lines(tmp_path / "run", 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert out.startswith("loading JAX ...\n")
    last = records(tmp_path / "run")[-1]["step"]
    assert f"stopped at step {last} of 100000" in out
    assert saved_state(tmp_path / "run")[0] == last
    assert (tmp_path / "run" / "loss.png").exists()


def test_the_metrics_of_a_step_are_written_before_its_checkpoint(config_file, tmp_path, monkeypatch):
    run, seen, save = tmp_path / "run", [], loop.Loop.save

    def look(self, write):
        save(self, lambda number, *state: seen.append((number, records(run)[-1]["step"])) or write(number, *state))

    monkeypatch.setattr(loop.Loop, "save", look)
    assert main(config_file, f"logging.dir={run}", "train.steps=12", "train.eval_every=0") == 0
    assert seen == [(5, 5), (10, 10), (12, 12)]


@pytest.mark.long
@pytest.mark.parametrize("where", ["device", "nvme"])
def test_ten_kills_at_random_moments_lose_nothing_and_end_in_bitwise_the_same_run(where, config_file, tmp_path):
    options = ["train.steps=1500", "train.eval_every=500", "checkpoint.every=10", "checkpoint.keep=2"]
    if where == "nvme":
        options += ["memory.offload_optimizer=nvme", f"memory.nvme_dir={tmp_path}/disk", "parallel.persist_below=0"]
        options += ["parallel.zero=3", "train.steps=600"]
    whole = start(config_file, *options, f"logging.dir={tmp_path}/whole")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err

    rng, run, kills = random.Random(0), tmp_path / "killed", 0
    newest = 0
    while kills < 10:
        process = start(config_file, *options, f"logging.dir={run}")
        if kills % 4 == 3:  # while it starts
            time.sleep(rng.uniform(0, 4))
        elif kills % 4 == 1:  # after it has saved once more, however slow this machine is
            while (checkpoint.latest_step(run / "checkpoints") or 0) <= newest and process.poll() is None:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1))
        else:  # while it trains and saves
            wait_for_lines(run, len(records(run)) if run.exists() else 0, process)
            time.sleep(rng.uniform(0, 2))
        process.kill()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"the run ended before the kill: {out} {err}"
        kills += 1
        found = checkpoint.latest_step(run / "checkpoints") or 0
        assert found >= newest  # a finished checkpoint is never lost
        newest = found
    assert newest > 0
    process = start(config_file, *options, f"logging.dir={run}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "resumed from step" in out
    assert losses(run) == losses(tmp_path / "whole")
    same(saved_state(run), saved_state(tmp_path / "whole"))


@pytest.mark.long
def test_a_write_that_fails_half_way_leaves_the_previous_checkpoint_usable(config_file, tmp_path):
    run = tmp_path / "run"
    first = start(config_file, f"logging.dir={run}", "train.steps=5")
    assert first.wait(120) == 0
    full = start(config_file, f"logging.dir={run}")
    resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))  # what exceeds it fails as on a full disk
    out, err = full.communicate(timeout=120)
    assert full.returncode == 2, err
    # Threads of tensorstore print what they saw as well, at the same time; of ours there is one message.
    assert len(re.findall("error: no checkpoint can be written .*: the run goes on from step 5", err)) == 1, err
    again = start(config_file, f"logging.dir={run}")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "resumed from step 5" in out
    assert saved_state(run)[0] == 20


def test_a_disk_without_room_for_a_checkpoint_is_told_in_one_line_and_the_previous_stays(
    config_file, tmp_path, capsys, monkeypatch
):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=5") == 0
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(config_file, f"logging.dir={tmp_path}/run") == 2
    err = capsys.readouterr().err
    assert "bytes and 1,000 are free" in err
    assert err.count("\n") == 1
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*")] == ["5"]
    monkeypatch.undo()
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert saved_state(tmp_path / "run")[0] == 20


PIPE = ["parallel.pipe=4", "parallel.data=1", "model.num_layers=8"]
BAD = [
    (["model.num_layer=3"], "unknown key model.num_layer; did you mean model.num_layers?"),
    (["train.lr=1"], "did you mean optimizer.lr?"),
    (["optimizer.lr=fast"], "optimizer.lr='fast': input should be a valid number"),
    (["model.family=bert"], "'llama' or 'gpt2'"),
    (["train.steps"], "not of the form section.key=value"),
    (["data.source=text:nowhere/*.txt"], "matches no file"),
    (["data.source=tokens:nowhere"], "prepare_data.py"),
    (["data.tokenizer=nowhere.json"], "nowhere.json"),
    (["data.seq_len=100000000"], "data.seq_len=100000000 needs at least 100000001"),
    (
        ["data.batch_size=9"],
        "data.batch_size=9 is not divisible by replica x data x microbatches = 1 x 4 x 1 = 4; use 8 or 12",
    ),
    (["parallel.microbatches=3"], "use 12"),
    (
        ["model.num_heads=4", "model.num_kv_heads=3"],
        "model.num_kv_heads=3 does not divide model.num_heads=4; use 2 or 4",
    ),
    (["model.loss_chunk=7"], "model.loss_chunk=7 does not divide the"),
    (["parallel.data=16"], "needs 16 devices but there are 8"),
    (["parallel.data=3", "parallel.replica=-1"], "cannot be split into groups of 3"),
    (["parallel.context=2"], "not implemented yet"),
    (["parallel.tensor=4", "parallel.data=1"], "parallel.tensor=4 does not divide model.num_heads=2; use 1 or 2"),
    (
        ["parallel.tensor=2", "parallel.data=1", "model.d_ff=63"],
        "parallel.tensor=2 does not divide model.d_ff=63; use 1",
    ),
    (
        ["parallel.tensor=2", "parallel.data=1", "data.seq_len=31"],
        "does not divide data.seq_len=31; use 1, another data.seq_len, or parallel.sequence_parallel=false",
    ),
    (
        ["parallel.tensor=4", "parallel.data=1", "model.num_heads=12", "model.num_kv_heads=6", "model.d_model=48"],
        "parallel.tensor=4 neither divides model.num_kv_heads=6 nor is a multiple of it; use 1 or 2",
    ),
    (["parallel.zero=4"], "parallel.zero=4"),
    (["memory.remat=half"], "memory.remat='half' is unknown; use none, selective, full or block:N"),
    (["memory.remat=block:2"], "does not divide model.num_layers=1; use block:1"),
    (
        ["parallel.data=1", "parallel.pipe=-1"],
        "parallel.pipe=8 does not divide model.num_layers=1; use parallel.pipe=1, or 8 layers",
    ),
    (
        ["parallel.pipe=4", "parallel.data=1", "model.num_layers=6"],
        "parallel.pipe=4 does not divide model.num_layers=6; use parallel.pipe=1 or 2 or 3 or 6, or 4 or 8 layers",
    ),
    (
        ["parallel.pipe=2", "parallel.data=1", "model.num_layers=6", "parallel.chunks=2"],
        "parallel.pipe x parallel.chunks = 2 x 2 = 4 does not divide model.num_layers=6; use parallel.pipe=3, or",
    ),
    (["parallel.chunks=2"], "parallel.chunks=2 with parallel.pipe=1 has nothing to interleave; use 1"),
    ([*PIPE, "parallel.chunks=2"], "parallel.schedule=1f1b: 2 chunks per stage; use 1, or interleaved"),
    (
        [*PIPE, "parallel.schedule=zb_h1", "parallel.microbatches=2"],
        "parallel.schedule=zb_h1: 2 microbatches are too few for 4 stages; use at least 4, or 1f1b",
    ),
    (
        [*PIPE, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.microbatches=2"],
        "parallel.schedule=interleaved: 2 microbatches are not a multiple of 4 stages; use 4",
    ),
    ([*PIPE, "parallel.grad_reduce=per_layer"], "parallel.grad_reduce=per_layer with parallel.pipe=4"),
    ([*PIPE, "parallel.prefetch=true", "parallel.zero=3"], "parallel.prefetch=true with parallel.pipe=4"),
    (
        [*PIPE, "parallel.schedule=zb_h1", "memory.remat=block:2", "parallel.microbatches=4"],
        "memory.remat='block:2' with parallel.schedule=zb_h1: the backward of a block of layers is a loop",
    ),
    (
        [*PIPE, "memory.remat=block:4"],
        "does not divide model.num_layers / (parallel.pipe x parallel.chunks)=2; use block:2",
    ),
    (["model.vocab_size=100"], "smaller than the tokenizer's 257"),
    (["model.max_seq_len=16"], "longer than model.max_seq_len=16"),
    (["logging.dir={tmp}/small.yaml/run"], "cannot be written to"),
    (['logging.dir=""'], "logging.dir=''"),
    (["model.attention=cudnn"], "model.attention=cudnn needs an NVIDIA GPU"),
    (["train.seed=4294967296"], "train.seed=4294967296"),
    (["checkpoint.resume={tmp}"], "holds no finished checkpoint"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_a_wrong_request_is_told_in_one_line_and_nothing_is_written(overrides, message, config_file, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    overrides = [o.format(tmp=tmp_path) for o in overrides]
    assert main(config_file, f"logging.dir={tmp_path}/run", *overrides) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_or_broken_config_file_is_told_in_one_line(tmp_path, capsys):
    assert main(tmp_path / "none.yaml") == 2
    assert "none.yaml" in capsys.readouterr().err
    (tmp_path / "broken.yaml").write_text("train: [1\n")
    assert main(tmp_path / "broken.yaml") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.d_model=64"], "model.d_model=64 but the checkpoint was trained with 32"),
        (["precision.compute=bfloat16"], "precision.compute=bfloat16 but the checkpoint was trained with float32"),
        (["data.tokenizer={bpe}"], "the data's tokenizer is sha256:"),
        (["checkpoint.resume=never"], "already holds step 5"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_and_the_checkpoint_stays(
    overrides, message, config_file, tmp_path, capsys
):
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(map(chr, range(33, 127)))}, []))
    model.save(str(tmp_path / "bpe.json"))
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=5") == 0
    before = saved_state(tmp_path / "run")
    overrides = [o.format(bpe=tmp_path / "bpe.json") for o in overrides]
    assert main(config_file, f"logging.dir={tmp_path}/run", *overrides) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    same(saved_state(tmp_path / "run"), before)


def test_other_data_are_announced_on_resume(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=5") == 0
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=6", "data.source=stdlib") == 0
    assert "not those of the checkpoint" in capsys.readouterr().out


def test_help_lists_every_key_with_default_and_meaning():
    process = subprocess.run([sys.executable, "-m", "nanotrain_jax.train", "--help"], capture_output=True, text=True)
    assert process.returncode == 0
    for section, field in configs.Config.model_fields.items():
        assert f"\n{section}:" in process.stdout
        for name, key in field.annotation.model_fields.items():
            assert f"  {key.alias or name} " in process.stdout
            assert key.description in process.stdout


def test_what_is_loading_read_and_compiled_is_said_before_it_is(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=1", "checkpoint.every=0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reading data from text:")
    assert lines[1].startswith("llama of ")
    first = lines.index("compiling the step ...")
    assert lines[first + 1].startswith("compiled in ")


def test_loading_is_said_by_process_0_and_not_for_help():
    def said(*arguments, **env):
        out = io.StringIO()
        loading.announce(arguments, out, env)
        return out.getvalue()

    line = "loading JAX ...\n"
    assert said("--config", "x.yaml") == said("runtime.process=0", RANK="0") == line
    assert (
        said("--help") == said("runtime.process=1") == said(RANK="1", SLURM_PROCID="0") == said(SLURM_PROCID="3") == ""
    )


def test_saying_what_is_loading_loads_nothing():
    code = "import sys; from nanotrain_jax import loading; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_evaluation_keeps_two_batches_in_flight(monkeypatch):
    """XLA:CPU aborts a program that dispatches hundreds without waiting for one."""
    flight, most = set(), []

    class Pending(float):
        def block_until_ready(self):
            flight.discard(id(self))

    def evaluate(params, batch):
        sums = Pending(6.0), Pending(3)
        flight.update(map(id, sums))
        most.append(len(flight) // 2)
        return sums

    monkeypatch.setattr(data, "evaluation", lambda *_: range(100))
    run = mock.Mock()
    run.step.evaluate = evaluate
    run.state.step = 0
    assert loop.Loop(run, None, None, None, mock.Mock()).evaluate() == 2.0
    assert (len(most), max(most)) == (100, 2)


def test_a_profile_of_some_steps_is_written_where_asked(config_file, tmp_path):
    assert (
        main(
            config_file,
            f"logging.dir={tmp_path}/run",
            "train.steps=4",
            "checkpoint.every=0",
            "runtime.profile_steps=[2,3]",
        )
        == 0
    )
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_profile_that_is_open_at_a_signal_is_written(config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop.Loop, "between_steps", lambda self, write: os.kill(os.getpid(), signal.SIGTERM))
    assert main(config_file, f"logging.dir={tmp_path}/run", "runtime.profile_steps=[1,30]") == 0
    out = capsys.readouterr().out
    assert "stopped at step 1 of 20" in out
    assert f"profile written to {tmp_path}/run/profile\n  in TensorBoard    pip install tensorboard xprof; " in out
    assert list((tmp_path / "run" / "profile").glob("plugins/profile/*/*.xplane.pb"))
    assert list((tmp_path / "run" / "profile").glob("plugins/profile/*/*.trace.json.gz"))


def test_a_profile_that_is_open_at_an_error_is_written(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Loop, "between_steps", lambda self, write: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(config_file, f"logging.dir={tmp_path}/run", "runtime.profile_steps=[1,30]")
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_profile_survives_a_resume_within_it_and_the_end_of_the_run(config_file, tmp_path):
    window = f"logging.dir={tmp_path}/run", "runtime.profile_steps=[4,30]"
    assert main(config_file, *window, "train.steps=5") == 0
    assert main(config_file, *window, "train.steps=7") == 0
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 2


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_goes_on(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(config_file, f"logging.dir={tmp_path}/whole") == 0
    assert main(config_file, f"logging.dir={run}", "train.steps=10") == 0
    flip(run / "checkpoints" / "10", random.Random(0))
    assert main(config_file, f"logging.dir={run}") == 0
    out = capsys.readouterr().out
    assert re.search(r"warning: checkpoint 10 in \S+ is not used: \S+ is damaged", out)
    assert "resumed from step 5" in out
    assert (run / "checkpoints" / "damaged" / "10" / "10").is_dir()
    same(saved_state(run), saved_state(tmp_path / "whole"))
    assert [r["step"] for r in records(run)] == [*range(1, 11), *range(6, 21)]


def test_where_no_checkpoint_is_whole_one_line_tells_the_ways_out(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(config_file, f"logging.dir={run}", "train.steps=10") == 0
    for step in "5", "10":
        (run / "checkpoints" / step / "state" / "_METADATA").unlink()
    capsys.readouterr()
    assert main(config_file, f"logging.dir={run}") == 2
    err = capsys.readouterr().err
    assert len(re.findall(r"/(?:10|5)/state/_METADATA cannot be read \(No such file or directory\); ", err)) == 2
    assert err.count("\n") == 1
    assert main(config_file, f"logging.dir={run}", "checkpoint.verify=false") == 2  # then orbax says it
    assert "checkpoint 10: it cannot be read (" in capsys.readouterr().err


def test_a_checkpoint_whose_run_ended_before_its_checksums_is_used(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checksums" / "10")
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert "resumed from step 10" in capsys.readouterr().out


def flip(folder, rng, by_size=True):
    """Flip a bit of a checkpoint or of its checksums: any as likely as any other, or of any file as of any other."""
    files = [*folder.rglob("*"), *(folder.parent / "checksums" / folder.name).iterdir()]
    files = [f for f in files if f.is_file() and f.stat().st_size]
    file = rng.choices(files, [f.stat().st_size if by_size else 1 for f in files])[0]
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def test_a_hundred_flipped_bits_are_found(config_file, tmp_path):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    good, bad, rng = tmp_path / "run" / "checkpoints", tmp_path / "bad", random.Random(1)
    assert restore.newest(good, True, str) == (10, "10", {})
    for trial in range(100):
        shutil.copytree(good, bad)
        flip(bad / "10", rng, by_size=trial % 2)
        number, _, damaged = restore.newest(bad, True, str)
        assert (number, [*damaged]) == (5, [10])
        shutil.rmtree(bad)


def test_a_second_run_in_the_same_folder_is_refused(config_file, tmp_path, capsys):
    first = start(config_file, f"logging.dir={tmp_path}/run", "train.steps=100000", "train.eval_every=0")
    wait_for_lines(tmp_path / "run", 1, first)
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert main(config_file, f"logging.dir={tmp_path}/run") == 2
    err = capsys.readouterr().err
    assert "in use by another run" in err
    assert err.count("\n") == 1
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    first.kill()
    first.communicate()


def test_a_line_of_metrics_that_was_cut_short_is_dropped_on_resume(config_file, tmp_path):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, 21))


def test_metrics_of_a_step_that_is_not_finite_are_still_json(config_file, tmp_path):
    assert (
        main(
            config_file, f"logging.dir={tmp_path}/run", "optimizer.lr=1.0e+30", "optimizer.grad_clip=0", "train.steps=6"
        )
        == 0
    )
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["skipped_steps"] >= 1
