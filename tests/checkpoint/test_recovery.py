"""A run that is stopped or killed, or finds damaged or missing checkpoints, resumes bitwise."""

import random
import re
import resource
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from command import arrays_of, config_file, flip, losses, main, same, saved_state, start, wait_for_lines
from conftest import LOSS, cover, records

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint import write as checkpoint
from nanotrain_jax.config import schema as configs
from nanotrain_jax.run import loop

__all__ = ["config_file"]  # a fixture


@pytest.mark.long  # the default run has it in the resume after a damaged checkpoint, below
def test_twenty_steps_are_bitwise_ten_and_ten_more_after_a_resume(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/whole") == 0
    assert main(config_file, f"logging.dir={tmp_path}/parts", "train.steps=10", "checkpoint.async=false") == 0
    assert main(config_file, f"logging.dir={tmp_path}/parts") == 0
    assert "resumed from step 10" in capsys.readouterr().out
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    (step, whole), (again, parts) = saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts")
    assert step == again == 20
    same(whole, parts)


REPLICAS = "parallel.data=2", "parallel.replica=4", "parallel.zero=3", "parallel.persist_below=64"
SPLIT = "parallel.tensor=2", "parallel.data=4", "parallel.zero=2"  # with a padded vocabulary
CONTEXT = "parallel.data=2", "parallel.context=4", "parallel.zero=1"


@pytest.mark.parametrize("meshes", cover([(REPLICAS, SPLIT)], [(SPLIT, CONTEXT, ())], lambda meshes: str(len(meshes))))
def test_a_resume_on_another_mesh_and_zero_stage_continues_with_the_same_losses(meshes, config_file, tmp_path, capsys):
    def run(name, steps, mesh=()):
        keys = f"logging.dir={tmp_path}/{name}", f"train.steps={steps}", "train.eval_every=0"
        assert main(config_file, *keys, *mesh) == 0

    last = 5 * len(meshes)
    run("whole", last)
    for i, mesh in enumerate(meshes, 1):
        run("parts", 5 * i, mesh)
    assert "257 tokens padded to 384" in capsys.readouterr().out
    whole, parts = ([losses(tmp_path / name)[i][0] for i in range(1, last + 1)] for name in ("whole", "parts"))
    np.testing.assert_allclose(parts, whole, **LOSS)


@pytest.mark.long
def test_a_resume_with_other_stages_schedules_and_chunks_continues_with_the_same_losses(config_file, tmp_path, capsys):
    def run(name, steps, *overrides):
        short = "model.num_layers=4", "train.eval_every=0", f"train.steps={steps}", f"logging.dir={tmp_path}/{name}"
        assert main(config_file, *short, *overrides) == 0

    run("whole", 8)
    pipe = "parallel.data=2", "parallel.pipe=2", "parallel.microbatches=4"
    run("parts", 2, *pipe, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.zero=1")
    assert "4 microbatches over 2 stages; bubble 11% (modelled" in capsys.readouterr().out
    run("parts", 4, "parallel.data=1", "parallel.pipe=4", "parallel.microbatches=8", "parallel.schedule=zero_bubble")
    run("parts", 6, *pipe, "parallel.tensor=2", "parallel.schedule=gpipe", "parallel.zero=3")
    run("parts", 7, *pipe, "parallel.schedule=interleaved", "parallel.chunks=2")
    run("parts", 8)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    np.testing.assert_allclose([parts[i][0] for i in range(1, 9)], [whole[i][0] for i in range(1, 9)], **LOSS)


def test_only_vocabulary_padding_is_truncated_or_padded_on_restore(tmp_path):
    state = {"ends": {"head_VD": jax.numpy.ones((3, 2))}, "layers": {"q_DNH": jax.numpy.ones((4, 6))}}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with checkpoint.writing(configs.Checkpoint(dir=str(tmp_path))) as save:
        save(1, state, {"position": 7})

    def read(head, q):
        shapes = {"ends": {"head_VD": head}, "layers": {"q_DNH": q}}
        return restore.read_state(tmp_path, 1, arrays_of(shapes, device), lambda path: path == "ends/head_VD")

    for rows in (2, 3, 5):
        found = read((rows, 2), (4, 6))
        np.testing.assert_array_equal(found["ends"]["head_VD"], np.eye(rows, 3).sum(1)[:, None] * np.ones((1, 2)))
    for head, q in (((3, 1), (4, 6)), ((3, 2), (4, 3)), ((3, 2), (5, 6))):
        with pytest.raises(ValueError, match=r"of another shape (ends/head_VD|layers/q_DNH) \[[34], [26]\], not"):
            read(head, q)


@pytest.mark.long
def test_another_run_can_start_from_a_checkpoint_by_its_path(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/a", "train.steps=10") == 0
    assert main(config_file, f"logging.dir={tmp_path}/b", f"checkpoint.resume={tmp_path}/a/checkpoints") == 0
    assert [r["step"] for r in records(tmp_path / "b")] == list(range(11, 21))
    assert not (tmp_path / "a" / "checkpoints" / "20").exists()
    # The same command again resumes from its own checkpoints.
    again = "train.steps=21", f"checkpoint.resume={tmp_path}/a/checkpoints"
    assert main(config_file, f"logging.dir={tmp_path}/b", *again) == 0
    assert records(tmp_path / "b")[-1]["step"] == 21
    assert main(config_file, f"logging.dir={tmp_path}/c", f"checkpoint.resume={tmp_path}/none") == 2
    assert "holds no finished checkpoint" in capsys.readouterr().err
    earlier = f"logging.dir={tmp_path}/d", f"checkpoint.resume={tmp_path}/a/checkpoints"
    assert main(config_file, *earlier, "checkpoint.step=7") == 2
    assert "checkpoint.step=7 is not in checkpoint.resume=" in capsys.readouterr().err
    for steps in "11", "12":  # then from its own checkpoint
        assert main(config_file, *earlier, "checkpoint.step=5", f"train.steps={steps}") == 0
    assert [r["step"] for r in records(tmp_path / "d")] == list(range(6, 13))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_run_refuses_another_in_its_folder_and_at_a_stop_signal_saves_and_exits_with_0(
    number, config_file, tmp_path, capsys
):
    long = "train.steps=100000", "train.eval_every=0", "checkpoint.every=100000", f"logging.dir={tmp_path}/run"
    process = start(config_file, *long)
    wait_for_lines(tmp_path / "run", 3, process)
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert main(config_file, f"logging.dir={tmp_path}/run") == 2
    err = capsys.readouterr().err
    assert "in use by another run" in err
    assert err.count("\n") == 1
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
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
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("where", "count"), [("device", 5), ("nvme", 4)])
def test_kills_at_random_moments_end_in_bitwise_the_same_run(where, count, config_file, tmp_path):
    options = ["train.steps=1000", "train.eval_every=500", "checkpoint.every=10", "checkpoint.keep=2"]
    if where == "nvme":
        options += ["memory.offload_optimizer=nvme", f"memory.nvme_dir={tmp_path}/disk", "parallel.persist_below=0"]
        options += ["parallel.zero=3", "train.steps=400"]
    whole = start(config_file, *options, f"logging.dir={tmp_path}/whole")
    out, err = whole.communicate()
    assert whole.returncode == 0, err

    rng, run, kills = random.Random(0), tmp_path / "killed", 0
    newest = 0
    while kills < count:
        process = start(config_file, *options, f"logging.dir={run}")
        if kills % 4 == 3:  # while it starts
            time.sleep(rng.uniform(0, 4))
        elif kills % 4 == 1:  # after it has saved once more, however slow this machine is
            while (directory.latest_step(run / "checkpoints") or 0) <= newest and process.poll() is None:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1))
        else:  # while it trains and saves
            wait_for_lines(run, len(records(run)) if run.exists() else 0, process)
            time.sleep(rng.uniform(0, 2))
        process.kill()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"the run ended before the kill: {out} {err}"
        kills += 1
        found = directory.latest_step(run / "checkpoints") or 0
        assert found >= newest  # a finished checkpoint is never lost
        newest = found
    assert newest > 0
    process = start(config_file, *options, f"logging.dir={run}")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "resumed from step" in out
    assert losses(run) == losses(tmp_path / "whole")
    same(saved_state(run), saved_state(tmp_path / "whole"))


@pytest.mark.long
def test_a_failed_write_leaves_the_previous_checkpoint_valid(config_file, tmp_path):
    run = tmp_path / "run"
    first = start(config_file, f"logging.dir={run}", "train.steps=5")
    assert first.wait(120) == 0
    full = start(config_file, f"logging.dir={run}")
    resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))  # what exceeds it fails as on a full disk
    out, err = full.communicate(timeout=120)
    assert full.returncode == 2, err
    # Threads of tensorstore print what they saw as well, at the same time; of ours there is one message.
    assert len(re.findall("error: no checkpoint can be written .*: the run resumes from step 5", err)) == 1, err
    again = start(config_file, f"logging.dir={run}")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "resumed from step 5" in out
    assert saved_state(run)[0] == 20


@pytest.mark.long
def test_a_full_disk_is_reported_in_one_line_and_keeps_the_previous_checkpoint(
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


def test_resume_moves_a_damaged_checkpoint_and_falls_back_to_the_previous_one(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(config_file, f"logging.dir={tmp_path}/whole") == 0
    assert main(config_file, f"logging.dir={run}", "train.steps=10") == 0
    flip(run / "checkpoints" / "10", random.Random(0))
    assert main(config_file, f"logging.dir={run}") == 0
    out = capsys.readouterr().out
    assert re.search(r"warning: skipped checkpoint 10 in \S+: \S+ is damaged", out)
    assert "resumed from step 5" in out
    assert (run / "checkpoints" / "damaged" / "10" / "10").is_dir()
    same(saved_state(run), saved_state(tmp_path / "whole"))
    assert losses(run) == losses(tmp_path / "whole")
    assert [r["step"] for r in records(run)] == [*range(1, 11), *range(6, 21)]


def test_no_intact_checkpoint_is_reported_in_one_line_with_remedies(config_file, tmp_path, capsys):
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


@pytest.mark.long
def test_a_checkpoint_without_checksums_is_used(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checksums" / "10")
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert "resumed from step 10" in capsys.readouterr().out


@pytest.mark.long
def test_a_hundred_flipped_bits_are_detected(config_file, tmp_path):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    good, bad, rng = tmp_path / "run" / "checkpoints", tmp_path / "bad", random.Random(1)
    assert restore.newest(good, True, str) == (10, "10", {})
    for trial in range(100):
        shutil.copytree(good, bad)
        flip(bad / "10", rng, by_size=trial % 2)
        number, _, damaged = restore.newest(bad, True, str)
        assert (number, [*damaged]) == (5, [10])
        shutil.rmtree(bad)


@pytest.mark.long
def test_an_incomplete_metrics_line_is_dropped_on_resume(config_file, tmp_path):
    assert main(config_file, f"logging.dir={tmp_path}/run", "train.steps=10") == 0
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')
    assert main(config_file, f"logging.dir={tmp_path}/run") == 0
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, 21))
