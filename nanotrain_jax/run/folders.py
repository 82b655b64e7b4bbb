"""Folders of a run: those it writes to, and its weights as a model folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax

from nanotrain_jax.config.schema import Config
from nanotrain_jax.run import conversion
from nanotrain_jax.run.adapter_export import Adapters

MODEL = "hf"  # in the folder of a run: its weights as a model folder


def new_folder(key: str, path: str) -> Path:
    """Create a folder if it does not exist and check that it is writable. Raises OSError that names the key."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise OSError(f"{key}={path!r} cannot be written to ({error.strerror}); choose another folder") from None


def save_model(folder: Path, config: Config, number: int) -> str:
    """Write <folder>/hf from the checkpoint of step `number`, in process 0; -> a line about it. Raises OSError."""
    if jax.process_index() == 0:
        kind = Adapters if config.train.lora else conversion.Export
        conversion.replace(kind(Path(config.checkpoint.dir), number, folder), folder / MODEL)
    what = "adapters, as PEFT reads them" if config.train.lora else "a model folder of Hugging Face"
    return f"wrote {folder / MODEL}: {what}"
