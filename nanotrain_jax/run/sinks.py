"""Where the records of a run go: metrics.jsonl, TensorBoard, Weights & Biases, MLflow.

A sink has two methods: `write(record)`, which waits for no network, and `close(failed)`. `opened` opens those of a
config, on process 0. The clients of Weights & Biases and MLflow send in the background; where to, and with which key,
is in their own environment (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, ...). The id of a run is kept in its
folder, so that a resumed run continues there. A step that runs again after a resume is written again, as in
metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tensorboardX

from nanotrain_jax.config.load import flat
from nanotrain_jax.config.schema import Config
from nanotrain_jax.run import curves

JSONL, TENSORBOARD = "metrics.jsonl", "tensorboard"
Record = dict[str, Any]
FINISH = 60  # seconds


class Sink(Protocol):
    """What takes the records of a run."""

    def write(self, record: Record) -> None:
        """Take a record: `step`, and values by name; None where unknown."""

    def close(self, failed: bool) -> None:
        """Write what is left. failed: the run ended with an error."""


class Lines:
    """metrics.jsonl: one JSON object per record, null for values that are not finite."""

    def __init__(self, folder: Path):
        trim(folder / JSONL)
        self.file = open(folder / JSONL, "a", buffering=1)  # noqa: SIM115 (closed by close)

    def write(self, record: Record) -> None:
        """Append a line."""
        self.file.write(json.dumps(dict.fromkeys(record) | finite(record)) + "\n")

    def close(self, failed: bool) -> None:
        """Close the file."""
        with suppress(OSError):
            self.file.close()


class TensorBoard:
    """Files for TensorBoard."""

    def __init__(self, folder: Path):
        # Its thread ends at the first error, e.g. of a full disk; a bounded queue would then block the run.
        self.board = tensorboardX.SummaryWriter(str(folder / TENSORBOARD), max_queue=0)

    def write(self, record: Record) -> None:
        """Add a scalar for each finite value."""
        for name, value in finite(scalars(record)).items():
            self.board.add_scalar(name, value, record["step"])

    def close(self, failed: bool) -> None:
        """Write what is left."""
        with suppress(OSError):
            self.board.close()


class WeightsAndBiases:
    """A run of Weights & Biases.

    Its own step must grow, so `step` is a value like others, and the x axis of all: what is logged at an earlier step
    after a resume is kept. Offline, a client knows nothing of what an earlier one wrote, and a later upload of the same
    run replaces it; so each start first logs what is in metrics.jsonl, and its folder holds the whole run.
    """

    def __init__(self, config: Config, folder: Path):
        import wandb

        kept = folder / "wandb_id"
        self.run = wandb.init(
            project=project(config.logging.wandb),
            name=folder.name,
            id=kept.read_text() if kept.exists() else None,
            resume="allow",
            dir=str(folder),
            config=config.to_dict(),
            allow_val_change=True,  # a resumed run may have changed keys
            settings=wandb.Settings(console="off", finish_timeout=FINISH),
        )
        kept.write_text(self.run.id)
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        for record in curves.read(folder / JSONL)[0] if self.run.offline else ():
            self.write(record)

    def write(self, record: Record) -> None:
        """Hand the record to the client's process."""
        self.run.log({"step": record["step"]} | scalars(record))

    def close(self, failed: bool) -> None:
        """Wait until all is sent, at most FINISH seconds: the rest stays in the folder."""
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow. Keys of the config are parameters; a key that a resume has changed is a tag, as parameters are
    fixed."""

    def __init__(self, config: Config, folder: Path):
        import mlflow

        self.client, self.sent, kept = mlflow, None, folder / "mlflow_id"
        mlflow.set_experiment(project(config.logging.mlflow))
        run = mlflow.start_run(kept.read_text() if kept.exists() else None, run_name=folder.name)
        kept.write_text(run.info.run_id)
        texts, known = {key: str(value) for key, value in flat(config.to_dict()).items()}, run.data.params
        mlflow.log_params({key: text for key, text in texts.items() if key not in known})
        mlflow.set_tags({key: text for key, text in texts.items() if known.get(key, text) != text})

    def write(self, record: Record) -> None:
        """Hand the record to the client's thread."""
        self.sent = self.client.log_metrics(scalars(record), step=record["step"], synchronous=False)

    def close(self, failed: bool) -> None:
        """Wait until all is sent, or the client gives up."""
        self.client.flush_async_logging()
        self.client.end_run("FAILED" if failed else "FINISHED")
        if self.sent:
            self.sent.wait()  # raises what the newest record met


SERVICES: dict[str, Callable[[Config, Path], Sink]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}


class Lenient:
    """A sink whose first failure is a warning, and its end: a run does not depend on a service."""

    def __init__(self, name: str, sink: Sink | None, say: Callable[[str], None]):
        self.name, self.sink, self.say = name, sink, say

    def write(self, record: Record) -> None:
        """Hand the record on."""
        self._call("write", record)

    def close(self, failed: bool) -> None:
        """Close the sink."""
        self._call("close", failed)

    def _call(self, method: str, argument: Any) -> None:
        try:
            if self.sink:
                getattr(self.sink, method)(argument)
        except Exception as error:  # of the client, or of a library of its own
            self.sink = None
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.say(f"warning: logging.{self.name} ends here ({text[:200]}); metrics.jsonl has all records")


def check(config: Config) -> None:
    """Raise ValueError if the package of a service that the config logs to is not installed."""
    for name in SERVICES:
        value = getattr(config.logging, name)
        if value and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logging.{name}={value}: the package {name} is not installed; pip install {name}, or leave "
                f"logging.{name} out"
            )


def opened(config: Config, folder: Path, say: Callable[[str], None]) -> list[Sink]:
    """Open the sinks of a config. say: prints a warning. Raises OSError, also if a service does not start."""
    sinks: list[Sink] = [Lines(folder)]
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder))
    for name, service in SERVICES.items():
        if getattr(config.logging, name):
            start = partial(started, name, service, config, folder)
            sinks.append(Lenient(name, start() if is_first(name, folder) else unless_it_fails(start, say), say))
    return sinks


def is_first(name: str, folder: Path) -> bool:
    """True if no run of this service was started before."""
    return not (folder / f"{name}_id").exists()


def unless_it_fails(start: Callable[[], Sink], say: Callable[[str], None]) -> Sink | None:
    """Return what starts; None, and a warning, if it does not: a restart does not depend on a service."""
    try:
        return start()
    except OSError as error:
        say(f"warning: {error}; this start continues without it")
        return None


def started(name: str, service: Callable[[Config, Path], Sink], config: Config, folder: Path) -> Sink:
    """Start or resume the run of a service. Raises OSError, in one line."""
    try:
        return service(config, folder)
    except Exception as error:  # the errors of the clients and of their libraries have no common type
        kept = folder / f"{name}_id"
        gone = "" if is_first(name, folder) else f", delete {kept} if its run is gone"
        raise OSError(
            f"logging.{name}={getattr(config.logging, name)}: {name} does not start ({type(error).__name__}: {error}); "
            f"set it up{gone}, or leave logging.{name} out"
        ) from None


def project(name: str | bool) -> str:
    """Return the name under which a service keeps runs."""
    return "nanotrain_jax" if name is True else name


def scalars(record: Record) -> Record:
    """Return the known values of a record but its step."""
    return {name: value for name, value in record.items() if name != "step" and value is not None}


def finite(record: Record) -> Record:
    """Return the values of a record that are not infinite or nan."""
    return {name: value for name, value in record.items() if not isinstance(value, float) or math.isfinite(value)}


def trim(jsonl: Path) -> None:
    """Truncate an incomplete last line (of a killed run, or a full disk)."""
    if jsonl.exists():
        with open(jsonl, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
