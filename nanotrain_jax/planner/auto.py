"""`parallel: auto` in training: the layout of the checkpoint that the run resumes from, or the planner's first one."""

from __future__ import annotations

from math import prod
from pathlib import Path

import jax

from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint import starting_point
from nanotrain_jax.config.misfit import Misfit
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed.processes import on_all_processes
from nanotrain_jax.planner import choice, search


def with_layout(config: Config) -> tuple[Config, list[str]]:
    """Return the config with a layout for all devices, and lines for the banner. Unchanged without `parallel: auto`.

    All processes choose the same. Raises ValueError if nothing fits.
    """
    if not config.parallel.auto:
        return config, []
    folder = starting_point.agree(config.checkpoint)
    kept = on_all_processes(lambda: _kept(config, folder) if folder else None)
    if kept:
        return kept, [f"parallel: auto keeps the layout of the checkpoint: {search.describe(kept)}"]
    e = on_all_processes(lambda: choice.for_devices(config, jax.devices()))
    layout = choice.layout_of(e.config)
    chosen = f"parallel: auto chose {search.describe(e.config)}, {e.peak_bytes / 1e9:.3g} GB per device:"
    return choice.adopted(config, layout), [chosen, *choice.as_yaml(layout).splitlines()]


def _kept(config: Config, folder: Path) -> Config | None:
    """Return the config with the layout of the checkpoint that it starts from; None if that does not suit these devices
    or keys."""
    try:
        saved = restore.read_meta(folder, starting_point.candidates(folder, config.checkpoint)[0]).config
    except restore.Unreadable:
        return None
    chosen = choice.adopted(config, saved)
    axes, given = chosen.parallel.axes, choice.beside_auto(config)
    differs = any(saved["parallel"].get(key.removeprefix("parallel.")) != value for key, value in given.items())
    if differs or prod(axes.values()) != len(jax.devices()):
        return None
    try:
        resolve(chosen, axes, choice.vocabulary(config))
    except Misfit:
        return None
    return chosen
