"""`python -m nanotrain_jax.plan`: will it fit, how fast, which layout; by closed forms, checked by the real compiler.

    python -m nanotrain_jax.plan --config configs/llama3_70b.yaml [--gpu h100] [--gpus 64]      the config's own layout
        --choose [--write FILE]                                                                 the best layout instead
        [--compile] [--explain] [--report DIR] [--json FILE] [section.key=value ...]

Without a mesh in the config, or with --choose, it searches; overrides of what is searched hold. With --choose --compile
candidates are compiled until one fits. Bytes, FLOPs and times are per device and step, GB are 1e9 bytes, and every time
is modelled, not measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nanotrain_jax import mesh as meshes
from nanotrain_jax.audit import cost, hardware, topology
from nanotrain_jax.config import Config
from nanotrain_jax.planner import compiled as compiler
from nanotrain_jax.planner import explain, output, page, search, tables
from nanotrain_jax.planner.estimate import TAKEN, Estimate, Verdict, estimate, on_gpus
from nanotrain_jax.planner.output import Planned
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import corpus, request

EXIT: dict[Verdict, int] = {"fits": 0, "does not fit": 1, "may not fit": 3}
CODES = """exit codes: 0 it fits; 1 it does not, as estimated or (with --compile) as compiled; 2 the request is wrong,
no layout fits, or --compile lacks the CUDA compiler; 3 it may not fit: the limit is within the margin of the estimate,
and --compile tells"""

# A config is told of a layout whose modelled step is shorter by this share, where a search estimates at most so many.
MUCH_FASTER, MOST_ESTIMATES = 0.1, 5000


def main(argv: Sequence[str] | None = None) -> int:
    """-> 0: it fits; 1: it does not, as estimated or (with --compile) as compiled; 2: the request is wrong; 3: it may
    not fit, because the limit is within the margin of the estimate."""
    asked = command_line().parse_intermixed_args(argv)
    asked.command = shlex.join(["python", "-m", "nanotrain_jax.plan", *(sys.argv[1:] if argv is None else argv)])
    console = Console(width=128, stderr=asked.json == "-")
    try:
        return plan(asked, console)
    except (ValueError, OSError, topology.NoCompiler) as error:
        return request.refuse(error)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = request.Parser(
        prog="python -m nanotrain_jax.plan",
        description="Estimate, choose and compile the layout of a training run, on a machine without a GPU.",
        epilog=CODES,
    )
    path = request.path_argument
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    kinds = ", ".join(hardware.GPUS)
    own = "a YAML file with the figures of another (those of hardware.Gpu; `like: h100` gives those left out)"
    parser.add_argument("--gpu", type=path, help=f"{kinds}, or {own} (default: h100; cpu with runtime.simulate)")
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
    return parser


def plan(asked: argparse.Namespace, console: Console) -> int:
    """What `main` does. Raises ValueError, OSError or NoCompiler if the request is wrong."""
    if not 0 < asked.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction={asked.memory_fraction:g}: must be in (0, 1]")
    tree = request.read(asked.config, asked.overrides)
    config = request.load(asked.config, asked.overrides)
    if config.model.factory:
        raise ValueError(
            f"model.factory={config.model.factory}: the planner knows memory and FLOPs of the decoder only; "
            "leave it out, or train without a plan"
        )
    gpu = kind_of_gpu(asked.gpu, config)
    if asked.gpus is not None:
        hardware.check_count(gpu, asked.gpus)
    if asked.compile and gpu != hardware.SIMULATED:
        topology.check_compiler(gpu)
    has_mesh = any(key in search.MESH for key in keys(tree))
    chooses = asked.choose or not has_mesh
    planned = choose(asked, config, gpu, tree) if chooses else as_given(asked, config, gpu, console)
    tables.estimated(console, planned.estimate)
    if planned.found:
        tables.candidates(console, planned.found)
    if planned.faster:
        tables.slower(console, planned.estimate, planned.faster)
    if asked.compile:
        first = planned.estimate
        meshes.configure(simulate=first.gpus if gpu == hardware.SIMULATED else 1)  # of GPUs none is asked for
        try:
            planned = compile_until_it_fits(planned, console)
        except RuntimeError as error:  # of the compiler
            print("error: cannot be compiled: " + " ".join(str(error).split())[:400], file=sys.stderr)
            return 1
        if planned.estimate is not first:
            tables.estimated(console, planned.estimate)
        tables.compiled(console, planned.estimate, planned.compiled)
    explained = explain.explain(planned.estimate)
    if asked.explain:
        tables.formulas(console, explained)
    tables.verdict(console, planned.estimate, planned.compiled, planned.verdict)
    write(asked, planned, tree, explained, console)
    return EXIT[planned.verdict]


def kind_of_gpu(asked: str | None, config: Config) -> str:
    """The name of the GPU in hardware.GPUS, where a YAML file of figures is added. Raises ValueError, OSError."""
    if asked is None:
        return hardware.SIMULATED if config.runtime.simulate else "h100"
    if Path(asked).suffix not in (".yaml", ".yml"):
        return asked
    hardware.add(Path(asked).stem, request.read(asked, option="--gpu"))
    return Path(asked).stem


def choose(asked: argparse.Namespace, config: Config, gpu: str, tree: Mapping[str, Any]) -> Planned:
    """The best layout, and what the search found. Raises ValueError if nothing fits."""
    has_mesh = any(key in search.MESH for key in keys(tree))
    gpus = asked.gpus if asked.gpus is not None else config.runtime.simulate
    if not gpus and (not has_mesh or -1 in config.parallel.axes.values()):
        raise ValueError("--gpus is missing; say how many there are to choose a layout for")
    gpus = gpus or cost.devices(config)
    given = request.nested(asked.overrides) if asked.choose else tree
    unsearched = {"prefetch", "grad_reduce"} & (given.get("parallel") or {}).keys()
    if unsearched and (config.parallel.prefetch or config.parallel.grad_reduce == "per_layer"):
        raise ValueError(
            f"parallel.{min(unsearched)} is not searched; leave it out, and try it with the layout that is found"
        )
    held = keys(given)
    found = search.search(neutral(config, vocabulary(config)), gpu, gpus, asked.memory_fraction, held)
    if not found.best:
        raise ValueError(search.why_nothing_fits(found, gpu, gpus, asked.memory_fraction, held))
    return Planned(found.best[0], found)


def as_given(asked: argparse.Namespace, config: Config, gpu: str, console: Console) -> Planned:
    """The config's own layout, and a much faster one, if a short search finds it. Raises ValueError."""
    gpus = asked.gpus if asked.gpus is not None else config.runtime.simulate
    e = estimate(on_gpus(config, gpus, gpu, vocabulary(config)), gpu, asked.memory_fraction)
    if e.config.data.batch_size != config.data.batch_size:
        console.print(f"{e.gpus} GPUs: data.batch_size becomes {e.config.data.batch_size}, as much for each as before")
        return Planned(e)
    return Planned(e, faster=much_faster(e, keys(request.nested(asked.overrides)), asked.memory_fraction))


def much_faster(e: Estimate, held: Mapping[str, Any], taken: float) -> Estimate | None:
    """The layout that --choose finds, where its modelled step is much shorter and the search is not long."""
    p = e.config.parallel
    if e.gpu == hardware.SIMULATED or p.prefetch or p.grad_reduce == "per_layer":
        return None
    found = search.search(neutral(e.config, None), e.gpu, e.gpus, taken, held, MOST_ESTIMATES)
    if not found.complete or not found.best or not found.best[0].fits:
        return None
    best = found.best[0]
    return best if best.step_seconds < (1 - MUCH_FASTER) * e.step_seconds else None


def compile_until_it_fits(planned: Planned, console: Console) -> Planned:
    """Compile the layout, and after a search the candidates in turn until one fits; else that which needs least.

    Raises RuntimeError if the compiler fails for all of them.
    """
    candidates = planned.found.best if planned.found else [planned.estimate]
    too_large: list[tuple[Estimate, dict[str, Any]]] = []
    failed = None
    for e, following in zip(candidates, [*candidates[1:], None], strict=True):
        try:
            compiled = compiler.compile_step(e.config, e.gpu)
        except RuntimeError as error:
            failed = error
            _say_uncompiled(planned, e, error, console)
            continue
        if compiled["peak_bytes"] <= e.limit_bytes:
            return planned._replace(estimate=e, compiled=compiled, too_large=tuple(too_large))
        too_large.append((e, compiled))
        if planned.found:
            tables.too_large(console, e, compiled, following)
    if not too_large:
        raise failed
    e, compiled = min(too_large, key=lambda one: one[1]["peak_bytes"])
    return planned._replace(estimate=e, compiled=compiled, too_large=tuple(too_large) if planned.found else ())


def _say_uncompiled(planned: Planned, e: Estimate, error: RuntimeError, console: Console) -> None:
    """Say for which candidate of a search the compiler fails, and why."""
    if planned.found:
        reason = " ".join(str(error).split())[:200]
        console.print(f"cannot be compiled: {search.words(e.config)} ({reason})", soft_wrap=True, markup=False)


def write(
    asked: argparse.Namespace,
    planned: Planned,
    tree: dict[str, Any],
    explained: Sequence[explain.Section],
    console: Console,
) -> None:
    """The files that were asked for. Raises OSError."""
    if asked.write:
        Path(asked.write).write_text(output.config_text(tree, planned.estimate, asked.config))
        console.print(f"wrote {asked.write}")
    if asked.report:
        Path(asked.report).mkdir(parents=True, exist_ok=True)
        file = Path(asked.report, "index.html")
        origin = page.Origin(asked.config, asked.command, page.made())
        text = page.html(planned.estimate, explained, planned.found, planned.compiled, origin)
        file.write_text(text, encoding="utf-8")
        console.print(f"wrote {file}")
    if asked.json:
        text = json.dumps(output.as_json(planned), indent=1) + "\n"
        sys.stdout.write(text) if asked.json == "-" else Path(asked.json).write_text(text)


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
    plainest = config.replace("parallel", **plain).replace("memory", remat="none", **here)
    found = resolve(plainest.replace("model", loss_chunk=0), one, vocab)
    return found.replace("memory", **{key: getattr(config.memory, key) for key in here})


if __name__ == "__main__":
    sys.exit(main())
