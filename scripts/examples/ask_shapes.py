"""Ask a vision-language model questions about new pictures of shapes, and count right answers by kind of question.

    python scripts/examples/ask_shapes.py --run runs/vision_language [--pictures 4000] [--seed 1]

The run is one of configs/vision_language.yaml, with data of make_shapes.py. Pictures are drawn as the held-out
ones were, with another seed: neither training nor its evaluations have seen them. Then others with only those pairs of
colour and shape that training never shows. Beside the model: the best guess without the picture (make_shapes.py).
"""

import argparse
import sys

import jax
import make_shapes
import numpy as np
from rich.console import Console
from rich.table import Table

from nanotrain_jax import Config, build, load_params
from nanotrain_jax.config.load import Parser, at_least, path_argument, refuse
from nanotrain_jax.data import batches
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step.build import Step

Rows = dict[str, np.ndarray]
NEW = 1  # beside a seed: no picture of make_shapes.py, whatever its seed


def right_answers(step: Step, params: dict, rows: Rows) -> float:
    """Return the share of right answers to rows of one question each."""
    size, count = step.batch["inputs"].shape[0], len(rows["inputs"])
    right = 0.0
    for first in range(0, count, size):
        batch = {}
        for name, wanted in step.batch.items():
            part = rows[name][first : first + size]
            padding = [(0, size - len(part))] + [(0, 0)] * (part.ndim - 1)
            filled = np.pad(part, padding, constant_values=-1 if name == "targets" else 0)
            batch[name] = jax.device_put(filled, wanted.sharding)
        right += float(step.evaluate(params, batch)[-1])
    return right / count


def row(name: str, step: Step, params: dict, rows: Rows, guessed: np.ndarray) -> list[str]:
    """Return the cells of some questions: how many, right answers, best guess."""
    return [name, f"{len(guessed):,}", f"{right_answers(step, params, rows):.1%}", f"{guessed.mean():.1%}"]


def asked_about(title: str, step: Step, params: dict, rows: Rows, train: Rows) -> Table:
    """Return a table of right answers: of each kind of question, and of all."""
    guessed, table = make_shapes.best_guess(train, rows), Table("question", "asked", "right", "best guess", title=title)
    for i, kind in enumerate(make_shapes.KINDS):
        chosen = rows["kind"] == i
        if chosen.any():
            of_kind = {name: array[chosen] for name, array in rows.items()}
            table.add_row(*row(kind, step, params, of_kind, guessed[chosen]))
    table.add_row(*row("all", step, params, rows, guessed))
    return table


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with 2 if it is wrong."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", required=True, type=path_argument, help="folder of a run, with a checkpoint")
    parser.add_argument("--pictures", type=at_least(1), default=4000, help="new pictures of each table (default: 4000)")
    parser.add_argument("--seed", type=at_least(1), default=1, help="random seed of the pictures (default: 1)")
    return parser.parse_args(argv)


def loaded(config: Config, weights: dict) -> tuple[Step, dict]:
    """Return the step of a run on one device, and its weights there."""
    whole = config.parallel.model_copy(
        update={axis: 1 for axis in config.parallel.axes} | {"microbatches": 1, "zero": 0}
    )
    step = build(config.model_copy(update={"parallel": whole}), meshes.make(**whole.axes))
    return step, jax.tree.map(lambda array, wanted: jax.device_put(array, wanted.sharding), weights, step.state.params)


def main(argv: list[str] | None = None) -> int:
    """Print the tables; 2 if the request is wrong."""
    asked = arguments(argv)
    try:
        weights, config = load_params(asked.run)
        if config.vision is None or config.vision.max_tokens != make_shapes.PLACES:
            raise ValueError(f"--run={asked.run} has no pictures of shapes; give a run of configs/vision_language.yaml")
        train = dict(batches.load(config.data).train.arrays)
    except (ValueError, OSError) as error:
        return refuse(error)
    step, params = loaded(config, weights)
    every, held_out = make_shapes.all_pairs(), make_shapes.held_out_pairs()
    for title, pairs in (("new pictures", every), ("only pairs that training never shows", held_out)):
        rng = np.random.default_rng([NEW, asked.seed])
        rows = make_shapes.make_rows(rng, asked.pictures, pairs, 1)
        Console(highlight=False).print(asked_about(title, step, params, rows, train))
    return 0


if __name__ == "__main__":
    sys.exit(main())
