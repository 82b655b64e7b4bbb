"""The planner: estimate memory and step time of a config, or search for the best layout, without a GPU.

    python -m nanotrain_jax.plan --config configs/llama3_70b.yaml [--gpu h100] [--gpus 64]     the layout of the config
        --choose [--write FILE]                                                                the best layout instead
        [--compile] [--memory-timeline] [--explain] [--report DIR] [--json FILE] [--stage NAME] [section.key=value ...]

Estimates are closed-form; --compile checks them with the real compiler. With --choose, or if the config sets no mesh,
it searches; overrides of searched keys are fixed. With --choose --compile it compiles candidates until one fits. Bytes,
FLOPs and times are per device and step, GB are 1e9 bytes, and all times are modelled, not measured.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nanotrain_jax.audit import topology
from nanotrain_jax.config.load import Parser, finish, nested, path_argument, refuse
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import naming
from nanotrain_jax.costs import counts, hardware
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import choice, explain, formula, search, training_stages
from nanotrain_jax.planner import compiled as compiler
from nanotrain_jax.planner.estimate import MEMORY_FRACTION, Estimate, Verdict, estimate, on_gpus
from nanotrain_jax.planner.report import export, page, terminal
from nanotrain_jax.planner.report.export import Planned
from nanotrain_jax.run import model_config, shell

EXIT: dict[Verdict, int] = {"fits": 0, "does not fit": 1, "may not fit": 3}
CODES = """exit codes:
  0  fits
  1  does not fit (estimated, or with --compile compiled)
  2  invalid request, no layout fits, or the CUDA compiler for --compile is missing
  3  may not fit: the memory limit is within the error margin of the estimate; use --compile"""

MUCH_FASTER = 0.1  # suggest another layout if its modelled step is shorter by this fraction ...
MAX_ESTIMATES = 5000  # ... and the search needs at most this many estimates


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a config; -> exit code, see CODES."""
    options = command_line().parse_intermixed_args(argv)
    options.command = shlex.join(["python", "-m", "nanotrain_jax.plan", *(sys.argv[1:] if argv is None else argv)])
    console = Console(width=128, stderr=options.json == "-")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # tokamax, of sizes that it has no tuned tiles for
    try:
        return plan(options, console)
    except (ValueError, OSError, topology.NoCompiler) as error:
        return refuse(error)


def command_line() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = Parser(
        prog="python -m nanotrain_jax.plan",
        description="Estimate memory and step time of a training run, or search for its best layout. Needs no GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=CODES,
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML config file, or the name of an example: quickstart"
    )
    kinds = ", ".join(hardware.GPUS)
    other = "a YAML file that describes another (fields of hardware.Gpu; `like: h100` sets the defaults)"
    parser.add_argument(
        "--gpu", type=path_argument, help=f"{kinds}, or {other} (default: h100; cpu with runtime.simulate)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: the size of the config's mesh)")
    parser.add_argument(
        "--choose", action="store_true", help="search for the best layout instead of using that of the config"
    )
    parser.add_argument("--stage", metavar="NAME", help="the stage of training to plan (default: the last one)")
    parser.add_argument("--write", type=path_argument, metavar="FILE", help="write a config with the planned layout")
    parser.add_argument(
        "--compile", action="store_true", help="compile the step and compare memory and collectives with the estimate"
    )
    parser.add_argument(
        "--memory-timeline",
        action="store_true",
        help="compile, and show what holds the compiled step's memory, from which line of source",
    )
    parser.add_argument("--explain", action="store_true", help="print the formulas with the numbers of this model")
    parser.add_argument("--report", type=path_argument, metavar="DIR", help="write a report to DIR/index.html")
    parser.add_argument(
        "--json", type=path_argument, metavar="FILE", help="write all numbers as JSON; -: standard output"
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=MEMORY_FRACTION,
        metavar="X",
        help=f"fraction of GPU memory that JAX allocates, XLA_PYTHON_CLIENT_MEM_FRACTION (default: {MEMORY_FRACTION})",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="override a key of the config; train --help lists all keys",
    )
    return parser


def plan(options: argparse.Namespace, console: Console) -> int:
    """Plan and print; -> exit code. Raises ValueError, OSError or NoCompiler if the request is invalid."""
    if not 0 < options.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction={options.memory_fraction:g}: must be in (0, 1]")
    tree = model_config.read(options.config, options.overrides)
    given = finish(tree, options.config)
    config = training_stages.config_of(given, options.stage)
    chooses = options.choose or config.parallel.auto or not any(key in search.MESH for key in choice.keys(tree))
    choice.check_supported(config, chooses)
    gpu = choice.kind_of_gpu(options.gpu, config)
    if options.gpus is not None:
        hardware.check_count(gpu, options.gpus)
    options.compile |= options.memory_timeline
    if options.memory_timeline and gpu == hardware.SIMULATED:
        raise ValueError("--memory-timeline with gpu=cpu: XLA:CPU reports no live ranges; give a GPU, e.g. --gpu h100")
    if options.compile and gpu != hardware.SIMULATED:
        topology.check_compiler(gpu)
    fixed = choice.beside_auto(given) if given.parallel.auto else None
    planned = choose(options, config, gpu, tree, fixed) if chooses else as_given(options, config, gpu, console)
    terminal.estimated(console, planned.estimate)
    terminal.phases(console, given)
    terminal.training_stages(console, training_stages.all_stages(given, planned.estimate))
    if planned.found:
        terminal.candidates(console, planned.found)
    if planned.better:
        terminal.better(console, planned.estimate, planned.better)
    if options.compile:
        first = planned.estimate
        meshes.configure(simulate=first.gpus if gpu == hardware.SIMULATED else 1)  # GPUs are not used
        try:
            planned = compile_until_it_fits(planned, console, options.memory_timeline)
        except RuntimeError as error:  # from the compiler
            print("error: compilation failed: " + " ".join(str(error).split())[:400], file=sys.stderr)
            return 1
        if planned.estimate is not first:
            terminal.estimated(console, planned.estimate)
        terminal.compiled(console, planned.estimate, planned.compiled)
    if options.memory_timeline:
        terminal.timeline(console, planned.estimate, planned.compiled["timeline"])
    explained = explain.explain(planned.estimate)
    if options.explain:
        terminal.formulas(console, explained)
    terminal.verdict(console, planned.estimate, planned.compiled, planned.verdict)
    write(options, planned, tree, explained, console)
    return EXIT[planned.verdict]


def choose(
    options: argparse.Namespace, config: Config, gpu: str, tree: Mapping[str, Any], fixed: dict[str, Any] | None
) -> Planned:
    """Search for the best layout. fixed: searched keys that stay (None: of the request). Raises ValueError if nothing
    fits."""
    has_mesh = any(key in search.MESH for key in choice.keys(tree))
    gpus = options.gpus if options.gpus is not None else config.runtime.simulate
    if not gpus and (not has_mesh or -1 in config.parallel.axes.values()):
        raise ValueError("--gpus is required to choose a layout; give the number of GPUs")
    gpus = gpus or counts.devices(config)
    given = nested(options.overrides) if options.choose else tree
    choice.check_searched(given.get("parallel") or {})
    fixed = choice.keys(given) if fixed is None else fixed
    found = choice.best(config, gpu, gpus, options.memory_fraction, fixed)
    return Planned(found.best[0], found)


def as_given(options: argparse.Namespace, config: Config, gpu: str, console: Console) -> Planned:
    """Estimate the layout of the config, and a better one if a short search finds it. Raises ValueError."""
    gpus = options.gpus if options.gpus is not None else config.runtime.simulate
    e = estimate(on_gpus(config, gpus, gpu, choice.vocabulary(config)), gpu, options.memory_fraction)
    if e.config.data.batch_size != config.data.batch_size:
        console.print(f"{e.gpus} GPUs: data.batch_size scaled to {e.config.data.batch_size}, the same per GPU")
        return Planned(e)
    return Planned(e, better=better_layout(e, choice.keys(nested(options.overrides)), options.memory_fraction))


def better_layout(e: Estimate, fixed: Mapping[str, Any], taken: float) -> Estimate | None:
    """Return the layout of --choose if it fits and e does not, or if it is much faster. None after a long search."""
    p = e.config.parallel
    if e.config.vision or e.gpu == hardware.SIMULATED or p.prefetch or p.grad_reduce == "per_layer":
        return None
    result = search.search(choice.neutral(e.config, None), e.gpu, e.gpus, taken, fixed, MAX_ESTIMATES)
    if not result.complete or not result.best or not result.best[0].fits:
        return None
    best = result.best[0]
    return best if e.verdict == "does not fit" or best.step_seconds < (1 - MUCH_FASTER) * e.step_seconds else None


def compile_until_it_fits(planned: Planned, console: Console, memory_timeline: bool = False) -> Planned:
    """Compile the layout; after a search, compile candidates until one fits, else return the smallest.

    Raises RuntimeError if the compiler fails for all of them.
    """
    candidates = planned.found.best if planned.found else [planned.estimate]
    too_large: list[tuple[Estimate, dict[str, Any]]] = []
    failed = None
    for e, following in zip(candidates, [*candidates[1:], None], strict=True):
        try:
            compiled = compiler.compile_step(e.config, e.gpu, memory_timeline=memory_timeline)
        except RuntimeError as error:
            failed = error
            _say_uncompiled(planned, e, error, console)
            continue
        if compiled["peak_bytes"] <= e.limit_bytes:
            return planned._replace(estimate=e, compiled=compiled, too_large=tuple(too_large))
        too_large.append((e, compiled))
        if planned.found:
            terminal.too_large(console, e, compiled, following)
    if not too_large:
        raise failed
    e, compiled = min(too_large, key=lambda one: one[1]["peak_bytes"])
    return planned._replace(estimate=e, compiled=compiled, too_large=tuple(too_large) if planned.found else ())


def _say_uncompiled(planned: Planned, e: Estimate, error: RuntimeError, console: Console) -> None:
    """Print which candidate of a search failed to compile, and why."""
    if planned.found:
        reason = " ".join(str(error).split())[:200]
        console.print(f"compilation failed: {search.describe(e.config)} ({reason})", soft_wrap=True, markup=False)


def write(
    options: argparse.Namespace,
    planned: Planned,
    tree: dict[str, Any],
    explained: Sequence[formula.Section],
    console: Console,
) -> None:
    """Write the requested files. Raises OSError."""
    if options.write:
        text = export.config_text(tree, planned.estimate, options.config)
        with naming(f"--write={options.write!r} cannot be written", "give another file"):
            Path(options.write).write_text(text)
        console.print(f"wrote {options.write}")
    if options.report:
        file = Path(options.report, "index.html")
        origin = page.Origin(options.config, options.command, page.versions())
        text = page.html(planned.estimate, explained, planned.found, planned.compiled, origin)
        with naming(f"--report={options.report!r} cannot be written", "give another folder"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        console.print(f"wrote {file}")
    if options.json:
        text = json.dumps(export.as_json(planned), indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return
        with naming(f"--json={options.json!r} cannot be written", "give another file, or -"):
            Path(options.json).write_text(text)


if __name__ == "__main__":
    sys.exit(shell.run(main))
