"""Folders of a run: those it writes to, and its weights as a model folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import yaml

from nanotrain_jax.checkpoint import durable, local
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.checkpoint.directory import CHECKPOINTS
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import of_run
from nanotrain_jax.data import batches as data
from nanotrain_jax.run import conversion, model_config, reference
from nanotrain_jax.run.adapter_export import Adapters
from nanotrain_jax.run.origin import Run

MODEL = "hf"  # in the folder of a run: its weights as a model folder


def new_folder(key: str, path: str | Path) -> Path:
    """Create a folder if it does not exist and check that it is writable. Raises OSError that names the key."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise OSError(f"{key}={str(path)!r} cannot be written to ({error.strerror}); choose another folder") from None


def make_ready(run: Run, folder: Path) -> None:
    """Create the folders of a run; write config.yaml and a copy of the tokenizer. Raises OSError."""
    if run.config.checkpoint.is_on:
        new_folder("checkpoint.dir", run.config.checkpoint.dir)
    if run.config.checkpoint.local_dir:
        new_folder(local.KEY, local.of_process(run.config.checkpoint.local_dir))
    if jax.process_index() == 0:
        config = of_run(run.config, run.requested)
        kept = for_another_run(config, run.requested)
        durable.write(folder / "config.yaml", yaml.safe_dump(kept.to_dict(), sort_keys=False).encode())
        for source in model_folders(run):
            conversion.copy_files(source, folder)
        if config.train.objective:
            reference.keep(run.dataset, folder)
        # The tokenizer makes the folder self-contained.
        for name, text in (data.files_of(run.config.data) if run.dataset.tokenizer else {}).items():
            durable.write(folder / name, text.encode())


def for_another_run(config: Config, requested: Config) -> Config:
    """Return a resolved config without what follows from keys that another run may change: the folder of its
    checkpoints, the steps of its decay, what its adapters freeze.

    requested: before `resolve`.
    """
    if Path(config.checkpoint.dir) == Path(config.logging.dir) / CHECKPOINTS:
        config = config.replace("checkpoint", dir=None)
    if config.train.lora:
        config = config.replace("model", lora=None).replace("train", freeze=requested.train.freeze)
    return config.replace("optimizer", decay_steps=requested.optimizer.decay_steps)


def model_folders(run: Run) -> list[Path]:
    """Return the folder whose weights a run starts from, if it has the files of a model folder, which the run keeps."""
    if run.start is None:
        source = model_config.folder_of(run.requested.checkpoint.resume)
    else:
        source = run.start[0].parent if run.meta.weights_only else None
    is_other = source is not None and source.resolve() != Path(run.config.logging.dir).resolve()
    return [source] if is_other else []


def save_model(folder: Path, config: Config, number: int, base: Base | None) -> str:
    """Write <folder>/hf from the checkpoint of step `number`, in process 0; -> a line about it. base: of adapters.

    Raises OSError.
    """
    if jax.process_index() == 0:
        saved = Path(config.checkpoint.dir)
        adapters = Adapters(saved, number, folder, base=base) if config.train.lora else None
        export = adapters or conversion.Export(saved, number, folder)
        conversion.replace(export, folder / MODEL)
    what = "adapters, as PEFT reads them" if config.train.lora else "a model folder of Hugging Face"
    return f"wrote {folder / MODEL}: {what}"
