"""`python -m nanotrain_jax.plan`: will it fit, how fast, which layout; by closed forms, checked by the real compiler.

    python -m nanotrain_jax.plan --config configs/llama3_70b.yaml [--gpu h100] [--gpus 64]      the config's own layout
        --choose [--write FILE]                                                                 the best layout instead
        [--compile] [--explain] [--report DIR] [--json FILE] [section.key=value ...]

Without a mesh in the config, or with --choose, it searches; overrides of what is searched hold. Bytes, FLOPs and times
are per device and step, GB are 1e9 bytes, and every time is modelled, not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import cost, hardware, topology
from nanotrain_jax.config import Config
from nanotrain_jax.planner import compiled as compiler
from nanotrain_jax.planner import explain, page, search, tables
from nanotrain_jax.planner.estimate import TAKEN, Estimate, estimate, on_gpus
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import corpus, request


def main(argv: Sequence[str] | None = None) -> int:
    """-> 0: it fits; 1: it does not, as estimated or (with --compile) as compiled; 2: the request is wrong."""
    parser = request.Parser(
        prog="python -m nanotrain_jax.plan",
        description="Estimate, choose and compile the layout of a training run, on a machine without a GPU.",
    )
    path = request.path_argument
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument("--gpu", help=f"{', '.join(hardware.GPUS)} (default: h100; cpu with runtime.simulate)")
    parser.add_argument("--gpus", type=int, help="number of GPUs (default: those of the config's mesh)")
    parser.add_argument("--choose", action="store_true", help="search for the best layout, whatever the config has")
    parser.add_argument("--write", type=path, metavar="FILE", help="write the config with the layout that was planned")
    parser.add_argument("--compile", action="store_true", help="compile the real step and set it beside the estimate")
    parser.add_argument("--explain", action="store_true", help="the formulas with this model's numbers put in")
    parser.add_argument("--report", type=path, metavar="DIR", help="write DIR/index.html")
    parser.add_argument("--json", type=path, metavar="FILE", help="write all numbers; - is the standard output")
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=TAKEN,
        metavar="X",
        help=f"share of a GPU's memory that JAX takes, XLA_PYTHON_CLIENT_MEM_FRACTION (default: {TAKEN})",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the file")
    asked = parser.parse_intermixed_args(argv)
    console = Console(width=128, stderr=asked.json == "-")
    try:
        return plan(asked, console)
    except (ValueError, OSError) as error:
        return request.refuse(error)


def plan(asked: argparse.Namespace, console: Console) -> int:
    """What `main` does. Raises ValueError or OSError if the request is wrong."""
    if not 0 < asked.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction {asked.memory_fraction} is no share; give a number above 0, at most 1")
    tree = request.read(asked.config, asked.overrides)
    config = request.load(asked.config, asked.overrides)
    gpu = asked.gpu if asked.gpu is not None else hardware.SIMULATED if config.runtime.simulate else "h100"
    gpus, vocab = asked.gpus if asked.gpus is not None else config.runtime.simulate, vocabulary(config)
    if asked.gpus is not None:
        hardware.check_count(gpu, asked.gpus)
    mesh_given = any(key in search.MESH for key in keys(tree))
    found, compiled = None, None
    if asked.choose or not mesh_given:
        if not gpus and (not mesh_given or -1 in config.parallel.axes.values()):
            raise ValueError("--gpus is missing; say how many there are to choose a layout for")
        gpus = gpus or cost.devices(config)
        held = keys(request.nested(asked.overrides) if asked.choose else tree)
        if config.parallel.prefetch or config.parallel.grad_reduce == "per_layer":
            given = request.nested(asked.overrides).get("parallel", {}) if asked.choose else tree.get("parallel", {})
            for key in {"prefetch", "grad_reduce"} & given.keys():
                raise ValueError(
                    f"parallel.{key} is not searched; leave it out, and try it with the layout that is found"
                )
        found = search.search(neutral(config, vocab), gpu, gpus, asked.memory_fraction, held)
        if not found.best:
            raise ValueError(search.why_nothing_fits(found, gpu, gpus, asked.memory_fraction, held))
        e = found.best[0]
    else:
        e = estimate(on_gpus(config, gpus, gpu, vocab), gpu, asked.memory_fraction)
        if e.config.data.batch_size != config.data.batch_size:
            console.print(
                f"{e.gpus} GPUs: data.batch_size becomes {e.config.data.batch_size}, as much for each as before"
            )
    explained = explain.explain(e)
    tables.estimated(console, e)
    if found:
        tables.candidates(console, found)
    if asked.explain:
        tables.formulas(console, explained)
    if asked.compile:
        meshes.configure(simulate=e.gpus if gpu == hardware.SIMULATED else 1)  # of GPUs none is asked for
        try:
            compiled = compiler.compile_step(e.config, gpu)
            tables.compiled(console, e, compiled)
        except topology.NoCompiler as error:
            print(f"not compiled: {error}; all that stands here is the estimate", file=sys.stderr)
        except RuntimeError as error:  # of the compiler
            print("error: cannot be compiled: " + " ".join(str(error).split())[:400], file=sys.stderr)
            return 1
    fits = (compiled["peak_bytes"] if compiled else e.peak_bytes) <= e.limit_bytes
    tables.verdict(console, e, compiled, fits)
    if asked.write:
        Path(asked.write).write_text(written(tree, e, asked.config))
        console.print(f"wrote {asked.write}")
    if asked.report:
        Path(asked.report).mkdir(parents=True, exist_ok=True)
        file = Path(asked.report, "index.html")
        file.write_text(page.html(e, explained, found, compiled), encoding="utf-8")
        console.print(f"wrote {file}")
    if asked.json:
        text = json.dumps(as_json(e, found, compiled, fits), indent=1) + "\n"
        sys.stdout.write(text) if asked.json == "-" else Path(asked.json).write_text(text)
    return 0 if fits else 1


def keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What nested data has of the keys that a search varies: "section.key" -> value."""
    found = {f"{section}.{key}": value for section, part in tree.items() for key, value in (part or {}).items()}
    return {key: value for key, value in found.items() if key in search.SEARCHED}


def vocabulary(config: Config) -> int | None:
    """How many ids the tokenizer has, where that can be known without reading the data. Raises ValueError, OSError."""
    if not config.data.source.startswith(("stdlib", "text:")):
        return None
    return corpus.tokenizer(config.data.tokenizer or "bytes").vocab_size


def neutral(config: Config, vocab: int | None) -> Config:
    """The config on one device with the plainest layout: what a search begins with."""
    plain = {"microbatches": 1, "chunks": 1, "schedule": "1f1b", "prefetch": False, "grad_reduce": "after_backward"}
    one = dict.fromkeys(config.parallel.axes, 1)
    here = {"offload_params": "none", "offload_activations": "none"}  # which want a ZeRO stage and a policy
    found = resolve(config.replace("parallel", **plain).replace("memory", remat="none", **here), one, vocab)
    return found.replace("memory", **{key: getattr(config.memory, key) for key in here})


def written(tree: dict[str, Any], e: Estimate, origin: str) -> str:
    """The user's config with the layout of an estimate, as YAML."""
    c, tree = e.config, {section: dict(part or {}) for section, part in tree.items()}
    p = c.parallel
    plain = {"pipe": 1, "replica": 1, "tensor": 1, "zero": 0, "chunks": 1, "schedule": "1f1b", "microbatches": 1}
    layout = {key.split(".")[1]: getattr(p, key.split(".")[1]) for key in search.SEARCHED if key.startswith("parallel")}
    others = {k: getattr(p, k) for k in tree.get("parallel", {}) if f"parallel.{k}" not in search.SEARCHED}
    layout.pop("context")
    tree["parallel"] = {k: v for k, v in layout.items() if plain.get(k) != v} | others
    tree["memory"] = tree.get("memory", {}) | {"remat": c.memory.remat}
    tree["data"] = tree.get("data", {}) | {"batch_size": c.data.batch_size}
    if c.runtime.simulate:
        tree["runtime"] |= {"simulate": e.gpus if e.gpu == hardware.SIMULATED else 0}
    head = f"# {origin} on {e.gpus} x {e.gpu}, planned by nanotrain_jax.plan: {e.peak_bytes / 1e9:.3g} GB, modelled "
    return head + f"{e.step_seconds:.3f} s per step\n" + yaml.safe_dump(tree, sort_keys=False)


def as_json(e: Estimate, found: search.Found | None, compiled: dict[str, Any] | None, fits: bool) -> dict[str, Any]:
    """All numbers, as plain data."""
    c, parts = e.config, e.moments[e.peak]
    out = {
        "model": {
            "params": cost.parameters(c.model),
            "flops_per_token": cost.flops_per_token(c.model, c.data.seq_len)["full"],
        },
        **layout_json(e),
        "estimate": {
            "state_bytes": {
                "params": parts["params"],
                "grads": parts["gradients"],
                "optimizer": parts["optimizer"],
            },
            "activation_bytes": parts["activations"],
            "moments": e.moments,
            **numbers_json(e),
            "seconds": e.seconds,
            "flops": e.flops,
            "host_bytes": e.host_bytes,
            "on_host": e.on_host,
            "nvme_bytes": e.nvme_bytes,
            "limit_bytes": e.limit_bytes,
        },
        "collectives": [
            {"axis": t.axis, "op": t.op, "bytes_per_device": t.bytes, "why": t.why, "link": t.link}
            | {"seconds": t.seconds, "exposed_seconds": t.exposed}
            for t in e.transfers
        ],
        "host_copies": [
            {"to": t.op.removeprefix("to "), "bytes_per_device": t.bytes, "why": t.why, "link": t.link}
            | {"seconds": t.seconds, "exposed_seconds": t.exposed}
            for t in e.copies
        ],
        "fits": fits,
    }
    if compiled:
        out["compiled"] = compiled
        out["ratios"] = compiler.ratios(e, compiled)
    if found:
        out["candidates"] = [layout_json(other) | numbers_json(other) for other in found.best[:10]]
        out["rejected"] = dict(found.rejected)
    return out


def layout_json(e: Estimate) -> dict[str, Any]:
    """Mesh and settings of a layout."""
    p = e.config.parallel
    return {
        "mesh": p.axes,
        "zero": p.zero,
        "schedule": p.schedule if p.pipe > 1 else None,
        "chunks": p.chunks,
        "microbatches": p.microbatches,
        "remat": e.config.memory.remat,
        "gpu": e.gpu,
        "gpus": e.gpus,
    }


def numbers_json(e: Estimate) -> dict[str, float]:
    """What an estimate comes to."""
    return {
        "peak_bytes": e.peak_bytes,
        "step_seconds": e.step_seconds,
        "tokens_per_second": e.tokens_per_second,
        "mfu": e.mfu,
        "bubble_fraction": e.bubble_fraction,
    }


if __name__ == "__main__":
    sys.exit(main())
