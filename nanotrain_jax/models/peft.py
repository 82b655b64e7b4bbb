"""The adapter format of PEFT (github.com/huggingface/peft): which tensors a folder has, and its adapter_config.json.

Adapters of several of our matrices beside one stored tensor (c_attn holds queries, keys and values) are one
adapter there: the columns of their A side by side, their B as blocks, the rest zeros. Its rank is the sum of theirs,
and its alpha is such that what multiplies A B stays the same. Needs no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import decoder_table, hugging_face
from nanotrain_jax.models.hugging_face import Stored

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Adapter(NamedTuple):
    """The adapter beside a stored tensor. pairs: the paths of our A and B beside each of its arrays; None: there is
    none beside that."""

    stored: Stored
    pairs: tuple[tuple[str, str] | None, ...]
    inputs: int
    outputs: int  # of one array
    rank: int
    is_transposed: bool  # the tensor is stored [inputs outputs]
    target: str  # the end of its layer's name that no other layer of a block has: c_fc, attn.c_proj

    @property
    def module(self) -> str:
        """The name of the layer whose weight the tensor is."""
        return self.stored.name.removesuffix(".weight")

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name -> shape of its tensors."""
        name = f"base_model.model.{self.module}"
        outputs = self.outputs * len(self.pairs)
        return {f"{name}.lora_A.weight": (self.rank, self.inputs), f"{name}.lora_B.weight": (outputs, self.rank)}

    def tensors(self, read: Any) -> dict[str, np.ndarray]:
        """Name -> tensor. read(path, layer) -> our array."""
        present = [pair for pair in self.pairs if pair]
        rank = self.rank // len(present)
        b = np.zeros((len(self.pairs), self.outputs, self.rank), np.float32)
        for column, (_, of_b) in enumerate(present):
            row = self.pairs.index(present[column])
            b[row, :, column * rank : (column + 1) * rank] = read(of_b, self.stored.layer).reshape(rank, -1).T
        a = [read(of_a, self.stored.layer).reshape(self.inputs, rank).T for of_a, _ in present]
        names = self.shapes
        arrays = np.concatenate(a), b.reshape(-1, self.rank)
        return {name: np.ascontiguousarray(x) for name, x in zip(names, arrays, strict=True)}


def inventory(kind: str, model: Model) -> list[Adapter]:
    """Return every adapter of a resolved model (model.lora), of the model_type kind, layer by layer."""
    pairs, table = decoder_table.adapter_paths(model), decoder_table.table(model)
    every = hugging_face.inventory(kind, model.model_copy(update={"lora": None}))
    names = [x.name.removesuffix(".weight") for x in every]
    found = []
    for stored in every:
        own = tuple(pairs.get(path) for path in stored.paths)
        if any(own):
            a, b = next(pair for pair in own if pair)
            rank = model.lora.rank * sum(pair is not None for pair in own)
            inputs, outputs = table[a].shape[:-1], table[b].shape[1:]
            is_transposed = stored.groups[0] == stored.words[: len(inputs)]
            target = _target(stored.name.removesuffix(".weight"), names)
            found.append(Adapter(stored, own, prod(inputs), prod(outputs), rank, is_transposed, target))
    return found


def config(adapters: Sequence[Adapter], model: Model, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json. base: the folder of the model that they belong to, if there is one."""
    lora = model.lora
    modules = {adapter.target: adapter for adapter in adapters}
    joined = {name: adapter for name, adapter in modules.items() if adapter.rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "use_rslora": lora.rslora,
        "rank_pattern": {name: adapter.rank for name, adapter in joined.items()},
        "alpha_pattern": {name: _number(_alpha(adapter, model)) for name, adapter in joined.items()},
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": adapters[0].is_transposed,
        "inference_mode": True,
    }


def _target(name: str, names: Sequence[str]) -> str:
    """Return the end of a layer's name that no other layer of a block has. names: of all layers of the model."""
    *parents, last = name.split(".")
    modules = {other.split(".")[-2] for other in names if other.endswith(f".{last}")}
    return last if len(modules) == 1 else f"{parents[-1]}.{last}"


def _alpha(adapter: Adapter, model: Model) -> float:
    scale = model.lora.scale
    return scale * (adapter.rank**0.5 if model.lora.rslora else adapter.rank)


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x


def shapes(adapters: Sequence[Adapter]) -> Mapping[str, tuple[int, int]]:
    """Name -> shape of all tensors."""
    return {name: shape for adapter in adapters for name, shape in adapter.shapes.items()}
