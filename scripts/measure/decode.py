"""Measure decoding: tokens/s beside the bandwidth of memory, or compiled for GPUs the bytes per token beside the least.

    python scripts/measure/decode.py --hf FOLDER | --run DIR [--batches 1,8] [--tokens 8,100,1000] [--repeats 5]
    python scripts/measure/decode.py --config llama3_8b --gpu h100 --gpus 8 [--batches 2] [--slots 8192]

A step must read every weight but the embedding once, and the caches, whose slots double as texts grow. Timings are the
least of several, side by side with a sum over 400 MB in the same run. Compiled programs are those that `generate` runs.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nanotrain_jax import generate
from nanotrain_jax.audit import traffic
from nanotrain_jax.audit.topology import NoCompiler, compile_only
from nanotrain_jax.config.experts import Experts
from nanotrain_jax.config.load import Parser, at_least, load, refuse
from nanotrain_jax.generation import load as models
from nanotrain_jax.generation.engine import PLACE, ROWS, STRIDE, Choice, Engine, Rows
from nanotrain_jax.generation.sampling import Sampling
from nanotrain_jax.generation.session import Session
from nanotrain_jax.models.parameters import ENDS
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.run.model_config import resolved_model

GREEDY = Choice(Sampling(temperature=0.0), ())
PROMPT = 8  # different tokens, repeated
SUMMED = 100_000_000  # float32 numbers


def local_bytes(tree: Tree) -> int:
    """Return the bytes of arrays, or of their types, on one device."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def needed_bytes(engine: Engine, rows: int, experts: Experts | None) -> int:
    """Return the bytes of weights that a step reads on a device: all but an embedding that is not the head, and of few
    rows the experts that they go to alone."""
    ends = engine.params[ENDS]
    unread = {name: x for name, x in ends.items() if "embedding" in name} if len(ends) > 2 else {}
    of_rows = rows * experts.top_k / experts.num if experts else 1.0
    leaves = jax.tree_util.tree_leaves_with_path(engine.params)
    of_experts = [x for path, x in leaves if re.search(r"_(EDF|EFD)$", path_name(path))]
    saved = local_bytes(of_experts) * (1 - of_rows) if of_rows <= 0.5 else 0
    return local_bytes(engine.params) - local_bytes(unread) - int(saved)


def timed(loaded: models.Loaded, cases: list[tuple[int, int]], repeats: int) -> dict:
    """Time steps of so many rows after so many tokens on this machine, and a sum -> figures."""
    engine, experts = loaded.engine, loaded.config.model.experts
    numbers = jnp.ones(SUMMED, jnp.float32)
    total = jax.jit(jnp.sum)
    sessions = {case: Session(engine, GREEDY, loaded.context) for case in cases}
    for (rows, tokens), session in sessions.items():
        session.feed([[1 + i % PROMPT for i in range(tokens)]] * rows)
    seconds: dict = {}

    def measure(name: Any, work) -> None:
        started = time.perf_counter()
        jax.block_until_ready(work())
        seconds[name] = min(seconds.get(name, np.inf), time.perf_counter() - started)

    def steps(session: Session) -> jax.Array:
        session.rows, _ = engine.next_tokens(session.rows, GREEDY)
        return session.rows.token_B

    for _ in range(repeats + 1):  # the first compiles
        measure("sum", lambda: total(numbers))
        for (rows, tokens), session in sessions.items():
            session.rows = session.rows._replace(place=session.rows.place._replace(slot=jnp.int32(tokens)))
            measure((rows, tokens), partial(steps, session))
    bandwidth = numbers.nbytes / seconds["sum"]
    weights = {rows: needed_bytes(engine, rows, experts) for rows, _ in sessions}
    read = ", ".join(f"{size / 1e9:.3f} GB ({rows} rows)" for rows, size in weights.items())
    print(f"a sum reads {bandwidth / 1e9:.1f} GB/s; a step reads of weights {read}")
    found = []
    for (rows, tokens), session in sessions.items():
        step, needed = seconds[rows, tokens] / STRIDE, weights[rows] + local_bytes(session.rows.caches)
        found.append({"rows": rows, "tokens": tokens, "step_s": step, "bytes": needed, "tokens_per_s": rows / step})
        print(
            f"{rows} rows after {tokens} tokens: {rows / step:,.1f} tokens/s, {step * 1e3:.1f} ms a step, "
            f"{needed / step / bandwidth:.0%} of the bandwidth for weights and caches"
        )
    return {"bandwidth": bandwidth, "steps": found}


def compiled(section: dict, devices: Sequence[jax.Device], rows: int, slots: int) -> dict:
    """Compile 16 steps of a model, given by its keys, for GPUs -> bytes per step and device. Raises ValueError."""
    section |= {"vocab_size": section["vocab_size"], "max_seq_len": max(slots, section["max_seq_len"] or slots)}
    resolved, mesh, model = models.build(section, models.Placement(dtype="bfloat16"), devices)
    types = models.abstract(model, resolved, mesh)
    engine = Engine(model, mesh, models.split_types(model, types), jnp.bfloat16)
    caches = [engine.cache_types(rows, slots)] * len(engine.layer_specs)

    def put(shape: tuple, spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    state = Rows([], type(PLACE)(put((), PLACE.slot), put((rows,), ROWS)), put((rows,), ROWS))
    program = engine.program("loop", GREEDY).lower(engine.params, caches, state).compile()
    moved = sum(kernel.bytes * kernel.count for kernel in traffic.kernels(program.as_text())) / STRIDE
    least = needed_bytes(engine, rows, resolved.model.experts) + local_bytes(caches)
    layout = {axis: size for axis, size in mesh.shape.items() if size > 1}
    memory = program.memory_analysis()
    return {
        "layout": layout, "rows": rows, "slots": slots, "bytes": float(moved), "least_bytes": least,
        "ratio": float(moved / least), "temp_bytes": memory.temp_size_in_bytes,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    generate.add_model(parser)
    parser.add_argument("--config", help="compile for GPUs: a config, whose model is decoded")
    parser.add_argument("--gpu", default="h100", help="kind of GPU (default: h100)")
    parser.add_argument("--gpus", type=at_least(1), default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--slots", type=at_least(1), default=8192, help="slots of the caches (default: 8192)")
    parser.add_argument("--batches", help="rows, with commas (default: 1,8; compiled: 2)")
    parser.add_argument("--tokens", default="8", help="tokens in the caches, with commas (default: 8)")
    parser.add_argument(
        "--repeats", type=at_least(1), default=5, help="timings, of which the least counts (default: 5)"
    )
    options = parser.parse_args()
    if options.config is None:
        generate.check_model(parser, options)
    return options


def figures(options: argparse.Namespace) -> dict:
    """Return the figures that the options ask for, by rows. Raises ValueError, OSError or NoCompiler."""
    batches = [int(rows) for rows in (options.batches or ("2" if options.config else "1,8")).split(",")]
    if options.config is None:
        loaded = generate.load(options)
        cases = [(rows, int(tokens)) for rows in batches for tokens in options.tokens.split(",")]
        return timed(loaded, cases, options.repeats)
    section = resolved_model(load(options.config).model.model_dump()).model_dump()
    devices = compile_only(options.gpu, options.gpus)
    found = {rows: compiled(section, devices, rows, options.slots) for rows in batches}
    for rows, of_rows in found.items():
        print(f"{rows} rows: {of_rows['bytes'] / 1e9:.3f} GB a step and GPU, {of_rows['ratio']:.3f} of the least")
    return found


def main() -> int:
    """Print figures, and one JSON line."""
    options = parse()
    meshes.pin()
    try:
        print(json.dumps(figures(options)))
    except (ValueError, OSError, NoCompiler) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
