"""The train command end to end: it runs, prints its progress and writes the documented outputs."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import jax
import numpy as np
import pytest
from command import config_file, losses, main
from conftest import cover, exit_code, records

from nanotrain_jax import train
from nanotrain_jax.checkpoint import directory, write
from nanotrain_jax.config import load
from nanotrain_jax.config import schema as configs
from nanotrain_jax.data import batches
from nanotrain_jax.distributed.exit_codes import ENDED
from nanotrain_jax.run import goodput, held_out, loop, shell

__all__ = ["config_file"]  # a fixture


def test_a_run_writes_all_documented_outputs(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "logging.tensorboard=true") == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} - {".logging.dir.lock"} == {
        "config.yaml",
        "metrics.jsonl",
        "goodput.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
        "processes",
    }
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").iterdir())
    lines = records(run)
    assert [r["step"] for r in lines] == list(range(1, 21))
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds", "goodput"}
    assert set(lines[0]) == keys
    assert set(lines[9]) == keys | {"val_loss"}
    assert lines[19]["tokens"] == 20 * 8 * 32
    assert lines[19]["loss"] < lines[0]["loss"]
    assert all(str(np.float32(r["loss"])) == str(r["loss"]) for r in lines)  # all of a float32, and no more
    # The resolved config runs by itself.
    resolved = load.load(run / "config.yaml")
    assert resolved.model.vocab_size == 257
    assert resolved.parallel.data == 4
    out = capsys.readouterr().out
    for words in "done at step 20 of 20", "validation loss", "bigram", "loss.png", "checkpoints":
        assert words in out


@pytest.mark.long
def test_the_same_seed_gives_bitwise_the_same_losses(config_file, tmp_path):
    few = "checkpoint.every=0", "train.steps=6", "train.eval_every=3"
    for name in "a", "b":
        assert main(config_file, f"logging.dir={tmp_path}/{name}", *few) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert main(config_file, f"logging.dir={tmp_path}/c", *few, "data.seed=1") == 0
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_a_finished_run_keeps_its_newest_checkpoints_and_started_again_prints_its_summary_without_compiling(
    config_file, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    keys = f"logging.dir={run}", "checkpoint.keep=2"
    assert main(config_file, *keys) == 0
    assert sorted(p.name for p in (run / "checkpoints").glob("[0-9]*")) == ["15", "20"]
    summary = capsys.readouterr().out.partition("done at step 20 of 20")
    assert "  training loss     " in summary[2]
    assert "  validation loss   " in summary[2]
    (prompt,) = re.findall(rf"generate --run {run} --prompt (.*)", summary[2])
    (words,) = shlex.split(prompt)
    dataset = batches.load(load.load(config_file).data)
    assert words and bytes(dataset.val.slice(0, 200).tolist()[:100]).decode().split()[0] == words.split()[0]
    monkeypatch.setattr(loop.Loop, "compile", pytest.fail)
    before = (run / "metrics.jsonl").read_text()
    assert main(config_file, *keys) == 0
    assert (run / "metrics.jsonl").read_text() == before
    capsys.readouterr()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 99.0}\n\0\0\0\n\n')  # after the newest checkpoint; a crash
    assert main(config_file, *keys) == 0
    again = capsys.readouterr().out.partition("done at step 20 of 20")
    assert again[1:] == summary[1:]
    assert "warning: 2 lines of " in again[0]


def test_zero_on_one_data_parallel_device_works_and_is_reported(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=2", "parallel.data=1", "parallel.zero=3") == 0
    assert "parallel.zero=3 has no effect: parallel.data and context are 1" in capsys.readouterr().out


@pytest.mark.long
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_float16_logs_its_loss_scale_and_warns_without_one(config_file, tmp_path, capsys):
    half = "precision.compute=float16", "train.steps=2", "checkpoint.every=0"
    assert main(config_file, f"logging.dir={tmp_path}/scaled", *half, "precision.loss_scale=dynamic") == 0
    assert [r["loss_scale"] for r in records(tmp_path / "scaled")] == [65536.0, 65536.0]
    assert "warning" not in capsys.readouterr().out
    assert main(config_file, f"logging.dir={tmp_path}/plain", *half) == 0
    assert "warning: float16 without a loss scale: gradients below 6e-8 underflow to zero" in capsys.readouterr().out
    assert "loss_scale" not in records(tmp_path / "plain")[0]


def test_help_lists_every_key_with_default_and_description(capsys):
    assert exit_code(train.main, ["--help"]) == 0
    out = capsys.readouterr().out
    for section, keys in configs.Config.sections().items():
        assert f"\n{section}:" in out
        for name, key in keys.model_fields.items():
            assert f"  {key.alias or name} " in out
            assert key.description in out


def test_loading_reading_and_compiling_are_announced_first(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=1", "checkpoint.every=0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reading data from text:")
    assert lines[1].startswith("llama with ")
    first = lines.index("compiling the step ...")
    assert lines[first + 1].startswith("compiled in ")


def test_loading_is_announced_by_process_0_and_not_for_help():
    def said(*arguments, **env):
        out = io.StringIO()
        shell.announce(arguments, out, env)
        return out.getvalue()

    line = "loading JAX ...\n"
    assert said("--config", "x.yaml") == said("runtime.process=0", RANK="0") == line
    assert (
        said("--help") == said("runtime.process=1") == said(RANK="1", SLURM_PROCID="0") == said(SLURM_PROCID="3") == ""
    )


def test_announcing_imports_nothing_slow():
    code = "import sys; from nanotrain_jax.run import shell; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
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

    monkeypatch.setattr(batches, "evaluation", lambda *_: range(100))
    run = mock.MagicMock()
    run.evaluation.evaluate = evaluate
    run.dataset.validation = [("", None, 1.0)]
    assert held_out.means(run, mock.Mock(), mock.Mock()) == {"val_loss": 2.0}
    assert (len(most), max(most)) == (100, 2)


def test_a_profile_of_some_steps_is_written_and_summarized(config_file, tmp_path, capsys):
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
    (saved,) = (tmp_path / "run" / "profile").rglob("*.summary.txt")
    summary = saved.read_text()
    assert summary in capsys.readouterr().out
    assert "mean of 2 steps" in summary
    assert " backward " in summary and "update" in summary


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


@pytest.mark.long
def test_a_profile_survives_a_resume_within_it_and_the_end_of_the_run(config_file, tmp_path):
    window = f"logging.dir={tmp_path}/run", "runtime.profile_steps=[4,30]"
    assert main(config_file, *window, "train.steps=5") == 0
    assert main(config_file, *window, "train.steps=7") == 0
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 2


@pytest.mark.parametrize("apart", cover([False], [True], str))
def test_a_run_that_diverges_stops_and_keeps_its_good_checkpoints(apart, config_file, tmp_path, capfd, monkeypatch):
    keys = ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=2", "train.log_every=1", "logging.tensorboard=true"]
    keys += ["parallel.data=1", "parallel.replica=2", "parallel.sync_every=2"] if apart else []
    keys.append(f"logging.dir={tmp_path}/run")
    assert main(config_file, *keys) == 0
    ended, plain = [], write.writing

    @contextmanager
    def writing(config):
        with plain(config) as save:
            yield save
        ended.append("as usual")  # so that several processes complete a checkpoint that is being written

    monkeypatch.setattr(write, "writing", writing)
    diverges = "optimizer.lr=1.0e+30", "optimizer.min_lr=1.0e+30", "optimizer.grad_clip=0", "optimizer.warmup_steps=0"
    assert main(config_file, *keys, *diverges, "train.steps=20", "train.max_skipped=6", "train.log_every=4") == ENDED
    assert ended == ["as usual"]
    err = capfd.readouterr().err
    assert "NaN or Inf" not in err  # of tensorboardX
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    found = re.match(
        r"error: diverged: the gradients of 6 steps in a row until step (\d+) are not finite; the last that "
        r"was not skipped is step (\d+), with loss [\d.e+]+; the last checkpoint is of step (\d+); lower",
        line,
    )
    last, taken, saved = map(int, found.groups())
    assert taken + 6 <= last <= taken + 7
    assert taken <= saved <= taken + 1
    assert int(directory.latest_step(tmp_path / "run" / "checkpoints")) == saved
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["step"] == last + 1
    assert lines[-1]["skipped_steps"] >= 6


def test_a_disk_that_is_full_ends_a_run_in_one_line(config_file, tmp_path, capsys, monkeypatch):
    def append(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(goodput, "append", append)
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=2") == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert f"that of logging.dir={tmp_path}/run or another (No space left on device); free space" in error


def test_a_run_may_go_on_whatever_it_skips(config_file, tmp_path):
    keys = "optimizer.lr=1.0e+30", "optimizer.grad_clip=0", "train.steps=30", "train.max_skipped=0"
    assert main(config_file, f"logging.dir={tmp_path}/run", *keys) == 0
    assert records(tmp_path / "run")[-1]["skipped_steps"] > 20
