"""Start and resume runs that train adapters (train.lora): their base is read at each start, and never saved."""

from __future__ import annotations

from pathlib import Path

import jax

from nanotrain_jax.checkpoint import base as bases
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint import starting_point
from nanotrain_jax.checkpoint.compatibility import Base
from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed.processes import of_first, on_all_processes
from nanotrain_jax.parallel.zero.optimizer_step import merge
from nanotrain_jax.run import model_config, sources
from nanotrain_jax.run.sources import Source
from nanotrain_jax.step import state as states
from nanotrain_jax.step.build import State, Step, shardings


def new_base(requested: Config, checkpoints: Path | None) -> Base | None:
    """Return the base with which a run starts; None: it trains no adapters, or resumes some.

    checkpoints: those to resume from (`starting_point.agree`). Raises ValueError or OSError, on all processes.
    """
    if requested.train.lora is None:
        return None
    folder, step = on_all_processes(lambda: _origin(requested, checkpoints))
    if folder is None:
        return None
    described = on_all_processes(lambda: bases.of(folder, step).model_dump_json() if jax.process_index() == 0 else "")
    return Base.model_validate_json(of_first(described))


def _origin(requested: Config, checkpoints: Path | None) -> tuple[Path | None, int | None]:
    """Return the folder and step of a new base; None: adapters are resumed."""
    if checkpoints is None:
        folder = model_config.folder_of(requested.checkpoint.resume)
        if folder is None:
            raise ValueError(
                "train.lora without weights to adapt; use checkpoint.resume=hf:FOLDER, a model folder of Hugging Face, "
                "or checkpoint.resume=PATH, the checkpoints of a run"
            )
        return folder, None
    verify, steps = requested.checkpoint.verify, starting_point.candidates(checkpoints, requested.checkpoint)
    step, meta, _ = restore.newest(checkpoints, verify, lambda number: restore.read_meta(checkpoints, number), steps)
    if meta.base:
        return None, None
    if checkpoints == Path(requested.checkpoint.dir):
        raise ValueError(
            f"checkpoint.dir={str(checkpoints)!r} holds a run without train.lora; to adapt its weights use another "
            f"logging.dir, and checkpoint.resume={checkpoints}"
        )
    return checkpoints, step


def started(step: Step, source: Source) -> State:
    """Return the state before the first step: new adapters beside the weights of a source."""
    plan = step.plan
    places = shardings(states.adapters_alone(plan, step.state))
    fresh = jax.jit(lambda: states.adapters_alone(plan, states.init(plan)), out_shardings=places)()
    return with_base(step, fresh, source)


def with_base(step: Step, state: State, source: Source) -> State:
    """Return a state of adapters with the weights of their base, which it reads onto the devices."""
    frozen = jax.tree.map(lambda x, trains: None if trains else x, step.state.params, step.plan.trainable)
    return state._replace(params=merge(state.params, sources.on_mesh(source, frozen, step.plan.layer_order)))
