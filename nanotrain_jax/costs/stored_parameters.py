"""Parameters that a device has, in closed form: by part of the model, before and after ZeRO. For resolved configs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nanotrain_jax.config.derived import padded_vocab
from nanotrain_jax.config.run_sections import Train
from nanotrain_jax.config.schema import Config, Model, Parallel
from nanotrain_jax.config.vision import Vision
from nanotrain_jax.costs.counts import is_sharded, local_elements, rows, zero_devices, zero_devices_of
from nanotrain_jax.models.parameters import DENSE, ENCODER, ENDS, LAYERS, VISION


def vocab_rows(config: Config) -> float:
    """Return the rows of the embedding, or of the head, on a tensor-parallel device."""
    shards = config.parallel.vocab_shards
    return padded_vocab(config.model.vocab_size, shards) / shards


def vocab_elements(config: Config) -> float:
    """Return the elements of the embedding, or of the head, on a tensor-parallel device."""
    return config.model.d_model * vocab_rows(config)


def local_parameters(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parameters on a device, part -> elements: before ZeRO (Psi), and sharded over data."""
    return _parameters(config, freeze=())


def frozen_elements(config: Config) -> float:
    """Return the elements of frozen weights that a device stores."""
    stage = 1 if config.parallel.zero == 3 else 0
    return sum(local_parameters(config)[stage].values()) - sum(trained_parameters(config)[stage].values())


def trained_parameters(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return `local_parameters` without frozen ones."""
    return _parameters(config, config.train.freeze)


def _parameters(config: Config, freeze: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float]]:
    p = config.parallel
    sizes = _Sizes(p.tensor, p.pipe, zero_devices(config), p.expert, p.persist_below, bool(p.vocab_over_pipe))
    psi, shard = _trained_parameters(config.model, config.vision, sizes, freeze)
    return dict(psi), dict(shard)


class _Sizes(NamedTuple):
    """What the parameters on a device depend on, of the keys of `Parallel`."""

    tensor: int
    pipe: int
    data: int
    expert: int
    persist_below: int
    vocab_over_pipe: bool


@lru_cache(maxsize=4096)  # a search asks for the same values many times
def _trained_parameters(
    model: Model, vision: Vision | None, sizes: _Sizes, freeze: tuple[str, ...]
) -> tuple[dict[str, float], dict[str, float]]:
    parallel = Parallel(**sizes._asdict())
    config = Config(model=model, vision=vision, parallel=parallel, train=Train(freeze=freeze))
    psi, shard = ({LAYERS: 0.0, DENSE: 0.0, ENDS: 0.0, VISION: 0.0} for _ in range(2))
    for row in rows(config).values():
        if row.is_frozen:
            continue
        size, part = local_elements(row, config), VISION if row.part == ENCODER else row.part
        psi[part] += size
        shard[part] += size / (zero_devices_of(row, config) if is_sharded(row, config) else 1)
    return psi, shard
