"""Score a model: `python -m nanotrain_jax.evaluate --run DIR | --hf FOLDER --text GLOB | --tasks FILE | --harness ...`

The model is laid out over all devices that are here, whatever the layout of its training (evaluation/). A table on
stdout, JSON with --json. Exit codes: 0 done; 2 invalid request (one line on stderr).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin()
    shell.announce(sys.argv[1:], sys.stderr)

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nanotrain_jax.config.load import Parser, at_least, folder_argument, path_argument, refuse
from nanotrain_jax.config.values import naming
from nanotrain_jax.evaluation import samples, tasks, text
from nanotrain_jax.evaluation.samples import Kept, Sample
from nanotrain_jax.generate import add_model, check_model, load
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.run import shell

Begin = Callable[[int], Callable[[], None]]  # of a progress bar: total -> call it for each that is done


def main(argv: Sequence[str] | None = None) -> int:
    """Score a model; an invalid request gives one line on stderr and exit code 2."""
    options = parse(argv)
    meshes.pin()
    try:
        if options.json:
            check_output(options.json)
        names = [path.stem for path in options.tasks or []]
        if len({*names}) < len(names):
            raise ValueError(f"--tasks: two files have one name, of {', '.join(names)}; rename one")
        questions = {path: tasks.read(path, options.limit) for path in options.tasks or []}
        loaded = load(options)
        with progress() as begin:
            found = measure(options, loaded, questions, begin)
        found = {"model": described(loaded)} | found
        if options.json:
            write(options.json, found)
    except (ValueError, OSError) as error:
        return refuse(error)
    show(found)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(prog="python -m nanotrain_jax.evaluate", description="Score a trained model.")
    add_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=path_argument, metavar="GLOB", help="texts: loss, perplexity and bits per byte")
    what.add_argument(
        "--tasks",
        type=folder_argument,
        metavar="FILE",
        action="append",
        help=f"multiple choice, rows of {tasks.ROW}: acc, acc_norm, acc_bytes; may be repeated",
    )
    what.add_argument("--harness", metavar="TASKS", help="tasks of lm-evaluation-harness, with commas between them")
    parser.add_argument("--include", type=folder_argument, metavar="FOLDER", help="with --harness: of further tasks")
    parser.add_argument(
        "--stride", type=at_least(1), help="of --text: tokens by which the window moves (default: half the context)"
    )
    parser.add_argument("--batch", type=at_least(1), default=8, help="rows that are scored together (default: 8)")
    parser.add_argument("--limit", type=at_least(1), help="only the first so many texts, or questions of each task")
    parser.add_argument(
        "--samples", type=folder_argument, metavar="FILE", help="keep the scores of each sample, and resume from them"
    )
    parser.add_argument("--json", type=folder_argument, metavar="FILE", help="also write the results here")
    options = parser.parse_args(argv)
    check_model(parser, options)
    for name, needed in {"stride": "text", "include": "harness"}.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            parser.error(f"--{name} is for --{needed}; remove it")
    if options.samples and options.harness:
        parser.error("--samples is for --text and --tasks; remove it")
    return options


def check_output(path: Path) -> None:
    """Raise ValueError, before anything is computed, if --json cannot be a file."""
    if not path.parent.is_dir():
        raise ValueError(f"--json={str(path)!r}: its folder does not exist; create it")
    if path.is_dir():
        raise ValueError(f"--json={str(path)!r} is a folder; give a file")


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results. Raises OSError."""
    with naming(f"--json={str(path)!r} cannot be written", "give another file"):
        path.write_text(json.dumps(found, indent=2, default=str) + "\n")


def measure(options: argparse.Namespace, loaded: Loaded, questions: dict[Path, list], begin: Begin) -> dict[str, Any]:
    """Return the scores that the options ask for, by kind. Raises ValueError or OSError."""
    if options.harness:
        return {"harness": in_harness(options, loaded, begin)}
    of_task = {path: tasks.samples(own, loaded) for path, own in questions.items()}
    of_text = text.samples(options.text, loaded, options.stride, options.limit) if options.text else []
    kept, everything = Kept(options.samples, loaded), [*of_text, *(one for own in of_task.values() for one in own)]
    cut = sum(any(request.is_cut for request in one.requests) for own in of_task.values() for one in own)
    if cut:
        print(
            f"questions longer than the context of {loaded.context} tokens, cut from the left: {cut}", file=sys.stderr
        )
    done = begin(len(everything))

    def run(own: list[Sample]) -> list[samples.Record]:
        return samples.run(loaded.engine, own, kept, options.batch, done)

    if of_text:
        return {"text": text.summary(run(of_text))}
    return {"tasks": {path.stem: tasks.summary(run(own)) for path, own in of_task.items()}}


def in_harness(options: argparse.Namespace, loaded: Loaded, begin: Begin) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness. Raises ValueError, also if it is not installed."""
    if options.include and not options.include.is_dir():
        raise ValueError(f"--include={str(options.include)!r} is no folder; give one with tasks of the harness")
    try:
        from nanotrain_jax.evaluation import harness
    except ImportError as error:
        raise ValueError(f"--harness needs lm-eval ({error}); pip install 'nanotrain_jax[eval]'") from None
    adapter = harness.Adapter(loaded, options.batch, begin)
    return harness.evaluate(options.harness.split(","), options.include, adapter, options.limit)


@contextmanager
def progress() -> Iterator[Begin]:
    """Show progress on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("scored"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:

        def begin(total: int) -> Callable[[], None]:
            task = bars.add_task("", total=total)
            return lambda: bars.advance(task)

        yield begin


def described(loaded: Loaded) -> dict[str, Any]:
    """Return what was scored, and where."""
    return {
        "folder": str(loaded.folder),
        "step": loaded.step,
        "dtype": loaded.engine.dtype.name,
        "context": loaded.context,
        "mesh": {axis: size for axis, size in loaded.engine.mesh.shape.items() if size > 1},
    }


def show(found: dict[str, Any]) -> None:
    """Print a table of the scores: a row for all texts, or for each task."""
    rows = {"": found["text"]} if "text" in found else found.get("tasks", found.get("harness"))
    rows = {name: _cells(own) for name, own in rows.items()}
    table = Table()
    names = list(dict.fromkeys(key for cells in rows.values() for key in cells))
    for column in ["" if "text" in found else "task", *names]:
        table.add_column(column, justify="right" if column in names else "left", overflow="fold")
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(key, "") for key in names))
    Console(highlight=False, markup=False).print(table)


def _cells(scores: dict[str, Any]) -> dict[str, str]:
    """Return the scores of a row as text, each with its standard error."""
    cells, errors = {}, {}
    for key, value in scores.items():
        name = key.replace(",none", "")  # the harness names a filter after a comma
        is_number = isinstance(value, int | float)
        if "_stderr" in name:
            errors[name.replace("_stderr", "")] = f" ± {value:.4f}" if is_number else ""
        elif is_number:
            cells[name] = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    return {name: cell + errors.get(name, "") for name, cell in cells.items()}


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax
    sys.exit(shell.run(main))
