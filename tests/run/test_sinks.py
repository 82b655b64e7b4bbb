"""Records reach every sink, also where steps run again after a resume; a service that is missing or fails."""

import contextlib
import importlib.util
import json
import re
import struct
import types

import jax.numpy as jnp
import pytest
from command import config_file, main  # noqa: F401 (a fixture)
from conftest import records, resolved, small

from nanotrain_jax.run import metrics, sinks

MISSING = "{0} is not installed: pip install {0}"


def config_of(folder, **logging):
    keys = {"dir": str(folder), "tensorboard": False, "progress": "none"} | logging
    return resolved(small(logging=keys, train={"steps": 10, "log_every": 1}))[0]


def values(loss):
    numbers = {"loss": jnp.float32(loss), "grad_norm": jnp.float32(1), "lr": jnp.float32(0.1)}
    return numbers | {"skipped_steps": jnp.int32(0)}


def write(config, losses):
    """Write the records of steps and close."""
    writer = metrics.Writer(config, min(losses) - 1, None)
    writer.start_clock()
    for step, loss in losses.items():
        writer.step(step, values(loss))
    writer.write(val_loss=losses[max(losses)] / 2)
    writer.close()


@pytest.mark.parametrize("name", sinks.SERVICES)
def test_a_missing_package_is_refused_before_the_run(name, config_file, tmp_path, capsys, monkeypatch):  # noqa: F811
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    assert main(config_file, f"logging.{name}=mine", f"logging.dir={tmp_path}/run") == 2
    rule = f"logging.{name}=mine: the package {name} is not installed"
    assert capsys.readouterr().err == f"error: {rule}; pip install {name}, or leave logging.{name} out\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["3", "null", '""', "[x]"])
def test_a_project_is_a_name_true_or_false(value, config_file, capsys):  # noqa: F811
    assert main(config_file, f"logging.wandb={value}") == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"error: logging.wandb=.*: must be a name of 1 to 128 characters, true or false\n", told)


def test_off_is_off_and_true_is_the_project_of_this_package(tmp_path):
    config = config_of(tmp_path, wandb=False)
    sinks.check(config)
    assert [type(sink) for sink in sinks.opened(config, tmp_path, print)] == [sinks.Lines]
    assert (sinks.project(True), sinks.project("mine")) == ("nanotrain_jax", "mine")


class Failing:
    """A service that takes a number of records."""

    def __init__(self, capacity):
        self.left, self.closed = capacity, False

    def write(self, record):
        if not self.left:
            raise ConnectionError("no\nserver")
        self.left -= 1

    def close(self, failed):
        self.closed = True


def test_a_service_that_fails_is_one_warning_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    service = Failing(capacity=1)
    monkeypatch.setitem(sinks.SERVICES, "wandb", lambda config, folder: service)
    write(config_of(tmp_path, wandb="mine"), {1: 3.0, 2: 2.0, 3: 1.0})
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "warning: logging.wandb ends here (ConnectionError: no server); metrics.jsonl has all records"
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert not service.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_does_not_block(tmp_path):
    board = sinks.TensorBoard(tmp_path)

    def fail(event):
        raise OSError(28, "No space left on device")

    board.board.file_writer.event_writer._ev_writer.write_event = fail
    for step in range(100):
        board.write({"step": step, "loss": 1.0})
    board.close(failed=False)


def test_a_service_that_does_not_start_is_an_error_in_one_line(tmp_path, monkeypatch):
    def refuse(config, folder):
        raise RuntimeError("no key")

    monkeypatch.setitem(sinks.SERVICES, "mlflow", refuse)
    with pytest.raises(
        OSError, match=r"logging.mlflow=mine: mlflow does not start \(RuntimeError: no key\); set it up"
    ):
        metrics.Writer(config_of(tmp_path, mlflow="mine"), 0, None)


def test_a_restart_does_not_depend_on_a_service(tmp_path, capsys, monkeypatch):
    def unreachable(config, folder):
        raise RuntimeError("unreachable")

    monkeypatch.setitem(sinks.SERVICES, "mlflow", unreachable)
    (tmp_path / "mlflow_id").write_text("of an earlier start")
    write(config_of(tmp_path, mlflow=True), {1: 2.0, 2: 1.0})
    assert "mlflow does not start (RuntimeError: unreachable); set it up, delete " in capsys.readouterr().out
    assert [record["loss"] for record in records(tmp_path)] == [2.0, 1.0]


def test_sinks_are_told_whether_the_run_failed(tmp_path, monkeypatch):
    told = []
    service = types.SimpleNamespace(write=lambda record: None, close=lambda failed: told.append(failed))
    monkeypatch.setitem(sinks.SERVICES, "wandb", lambda config, folder: service)
    config = config_of(tmp_path, wandb="mine")
    write(config, {1: 1.0})
    with pytest.raises(KeyError), contextlib.closing(metrics.Writer(config, 0, None)):
        raise KeyError
    assert told == [False, True]


BLOCK, HEADER = 32 * 1024, 7  # of LevelDB's log format: checksum, length, type of each fragment


def entries(data):
    """Yield the entries of a log file, joined from their fragments."""
    at, entry = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", data, at)
        entry, at = entry + data[at + HEADER : at + HEADER + size], at + HEADER + size
        if kind in (1, 4):  # whole, or last
            yield entry
            entry = b""


def stored(folder):
    """Return the rows, the id and the config of the newest offline run of Weights & Biases."""
    from wandb.proto.wandb_internal_pb2 import Record

    newest = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    found = [Record.FromString(entry) for entry in entries(newest.read_bytes())]
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    rows = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    rows = [{"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in row} for row in rows]
    return rows, run.run_id, {x.key: json.loads(x.value_json) for x in run.config.update}


def test_weights_and_biases_has_the_whole_run_after_a_step_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=MISSING.format("wandb"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(tmp_path, wandb="mine")
    write(config, {1: 3.0, 2: float("nan"), 3: 1.0})
    first = stored(tmp_path)
    write(config, {3: 0.9, 4: 0.8})  # a resume from step 2
    rows, run_id, tree = stored(tmp_path)
    assert run_id == first[1] == (tmp_path / "wandb_id").read_text()
    assert tree["optimizer"]["lr"] == config.optimizer.lr
    assert [(row["step"], row["loss"]) for row in first[0]][::2] == [(1, 3.0), (3, 1.0)]
    assert [(row["step"], row.get("loss")) for row in rows][2:] == [
        (3, 1.0),
        (3, pytest.approx(0.9)),
        (4, pytest.approx(0.8)),
    ]
    assert rows[-1]["val_loss"] == pytest.approx(0.4)


def test_mlflow_has_the_whole_run_after_a_step_back(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason=MISSING.format("mlflow"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/store")
    config = config_of(tmp_path, mlflow="mine")
    write(config, {1: 3.0, 2: 2.0, 3: 1.0})
    write(config.replace("optimizer", lr=0.5), {3: 0.9, 4: 0.8})  # a resume from step 2, with another key
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.info.run_id == (tmp_path / "mlflow_id").read_text()
    assert (run.info.status, run.data.params["optimizer.lr"], run.data.tags["optimizer.lr"]) == (
        "FINISHED",
        "0.01",
        "0.5",
    )
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(m.step, pytest.approx(m.value)) for m in sorted(history, key=lambda m: (m.step, m.timestamp))] == [
        (1, 3.0), (2, 2.0), (3, 1.0), (3, 0.9), (4, 0.8)
    ]  # fmt: skip
    assert run.data.metrics["val_loss"] == pytest.approx(0.4)
