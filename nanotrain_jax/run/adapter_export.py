"""Write the adapters of a run (train.lora) as a folder of PEFT."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from nanotrain_jax.checkpoint import by_layer, safetensors
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.config import load as configs
from nanotrain_jax.models import hugging_face, peft
from nanotrain_jax.run.conversion import copy_tokenizer
from nanotrain_jax.run.model_config import CONFIG


class Adapters:
    """The adapters of a checkpoint as tensors of a folder of PEFT.

    dtype: None: float32, as PEFT stores them. base: where it is now; None: where the checkpoint says.
    """

    def __init__(self, checkpoints: Path, step: int, run: Path, dtype: str | None = None, base: Base | None = None):
        meta = restore.read_meta(checkpoints, step)
        self.tokenizer = meta.tokenizer
        self.run, self.model, self.dtype = run, configs.parse(meta.config).model, jnp.dtype(dtype or "float32")
        known = safetensors.read_json(run / CONFIG) if (run / CONFIG).is_file() else {}
        self.kind = hugging_face.kind_of(self.model, known.get("model_type"))
        self.base, self.adapters = base or meta.base, peft.inventory(self.kind, self.model)
        self.weights = by_layer.Weights(checkpoints, step, is_exact=self.dtype == jnp.float32)

    @property
    def model_folder(self) -> str | None:
        """The model folder that the adapters belong to; None: the checkpoint of a run, which PEFT cannot read."""
        return self.base.folder if self.base.step is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(int(np.prod(shape)) for shape in peft.shapes(self.adapters).values()) * self.dtype.itemsize

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> tensor, in the dtype of the folder."""
        found = {name: x for adapter in self.adapters for name, x in adapter.tensors(self.weights.read).items()}
        return {name: x.astype(self.dtype) for name, x in found.items()}

    def write(self, folder: Path) -> None:
        """Write the files of the adapters into a folder that exists. Raises OSError."""
        copy_tokenizer(self.run, folder)
        safetensors.write_json(folder / peft.CONFIG, peft.config(self.adapters, self.model, self.model_folder))
        safetensors.save(self.tensors, folder / peft.TENSORS)

    def check(self, folder: Path) -> str:
        """Compare what was written with the run -> what was found. Raises OSError if it differs."""
        written = safetensors.load(folder / peft.TENSORS)
        wrong = [name for name, x in self.tensors.items() if written[name].tobytes() != x.tobytes()]
        if wrong:
            raise OSError(f"{wrong[0]} does not read back as it was written; check the disk")
        return f"{len(written)} tensors read back equal"

    @property
    def summary(self) -> str:
        """What the folder holds, in words."""
        count = self.nbytes // self.dtype.itemsize
        text = f"adapters of {self.kind}, rank {self.model.lora.rank}, {count:,} parameters in {self.dtype}"
        if self.model_folder:
            return text
        remedy = "write it with convert --run RUN --to FOLDER, and load the adapters onto FOLDER"
        return f"{text}; PEFT cannot read their base, {self.base.name}: {remedy}"
