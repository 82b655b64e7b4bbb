"""Draw pictures of coloured shapes with questions of one-word answers, into a folder for `data.source=arrays:DIR`.

    python scripts/examples/make_shapes.py --out runs/shapes [--train 60000] [--val 2000] [--seed 0]

A picture of 48 x 48 pixels has 1 to 4 shapes, mostly few, each in its own cell of a 3 x 3 grid, shifted in it.
Kinds of questions: exists, count, colour, shape, size, place (in the grid), and relation, about the next cell. Some
pairs of colour and shape are never drawn or asked for training: only the validation has them.

A row: places of the picture (<image>), then questions of 9 words each with padding; after a question mark the target is
the answer, all others are ignored. Answers are not among the inputs. Training rows have 4 questions, every fourth 1;
validation rows have 1, so that no other question tells something about the picture. meta.json has also the accuracy of
the best guess without the picture: the most frequent training answer to the same question, or to its kind. Same seed,
same files. Exit codes: 0 done; 2 the request is wrong (one line on stderr).
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanotrain_jax.config.load import Parser, at_least, path_argument, refuse
from nanotrain_jax.data import arrays

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40),
           "purple": (160, 60, 190), "white": (230, 230, 230)}  # fmt: skip
COLOUR_NAMES = list(COLOURS)
SHAPES = "circle", "square", "triangle"
SIZES = "small", "large"
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
RADII = np.array([4.0, 6.4])
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "above": (-1, 0), "below": (1, 0)}  # of the answer, seen from the asked
NUMBERS = "zero", "one", "two", "three", "four", "five", "six"
PAD, IMAGE = "<pad>", "<image>"
WORDS = [PAD, IMAGE, "?", "how", "many", "is", "there", "a", "at", "the", "which", "colour", "shape", "size", "of",
         "objects", "yes", "no", *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), *SIZES, *DIRECTIONS, *ROWS,
         "centre", *NUMBERS]  # fmt: skip
ID = {word: i for i, word in enumerate(WORDS)}
HELD_OUT = [("red", "triangle"), ("blue", "circle")]
KINDS = {
    "exists": 0.13,
    "count": 0.2,
    "colour": 0.12,
    "shape": 0.12,
    "size": 0.08,
    "place": 0.2,
    "relation": 0.15,
}  # shares

SIDE, CELLS, CELL = 48, 3, 16  # pixels; cells of the grid along a side, and their pixels
PLACES, TEXT, QUESTIONS = 10, 9, 4  # of a row: places for the picture, words of a question, questions


class Scenes(NamedTuple):
    """Pictures as lists of shapes, one for each cell of the grid [n 9]; colour, shape, size are indices."""

    present: np.ndarray
    colour: np.ndarray
    shape: np.ndarray
    size: np.ndarray
    centre: np.ndarray  # y, x in pixels [n 9 2]

    @property
    def pair(self) -> np.ndarray:
        """Number of the pair of colour and shape."""
        return self.colour * len(SHAPES) + self.shape


class Questions(NamedTuple):
    """A question for each picture: word ids [n TEXT], the answer's id [n]; False where the picture allows none [n]."""

    words: np.ndarray
    answer: np.ndarray
    valid: np.ndarray


def all_pairs() -> np.ndarray:
    """Return the numbers of all pairs of colour and shape."""
    return np.arange(len(COLOURS) * len(SHAPES))


def held_out_pairs() -> np.ndarray:
    """Return the numbers of the pairs that are not in the training rows."""
    return np.array([COLOUR_NAMES.index(colour) * len(SHAPES) + SHAPES.index(shape) for colour, shape in HELD_OUT])


def draw_scenes(rng: np.random.Generator, count: int, pairs: np.ndarray) -> Scenes:
    """Draw scenes of these pairs of colour and shape."""
    cells = CELLS**2
    rank = rng.random((count, cells)).argsort(1)
    present = rank < rng.integers(1, 5, (count, 1, 2)).min(-1)
    colour, shape = np.divmod(pairs[rng.integers(len(pairs), size=(count, cells))], len(SHAPES))
    grid = np.stack(np.divmod(np.arange(cells), CELLS), -1) * CELL + CELL / 2
    centre = grid + rng.uniform(-1.5, 1.5, (count, cells, 2))
    return Scenes(present, colour, shape, rng.integers(2, size=(count, cells)), centre)


def paint(rng: np.random.Generator, scenes: Scenes) -> np.ndarray:
    """-> pictures uint8 [n SIDE SIDE 3]: dark grey with noise, and the brighter shapes on it."""
    picture, cell = np.nonzero(scenes.present)
    size = (len(scenes.present), SIDE, SIDE, 3)
    image = rng.integers(10, 51, size, dtype=np.uint8)
    centre = scenes.centre[picture, cell]
    first = np.clip(centre.astype(int) - 7, 0, SIDE - 15)  # of a window of 15 x 15 pixels
    y, x = (first[:, axis, None] + np.arange(15) for axis in (0, 1))
    dy, dx = y[:, :, None] - centre[:, 0, None, None], x[:, None] - centre[:, 1, None, None]
    r = RADII[scenes.size[picture, cell]][:, None, None]
    inside = np.stack([
        dy**2 + dx**2 <= r**2,
        np.maximum(abs(dy), abs(dx)) <= 0.85 * r,
        (dy <= 0.8 * r) & (abs(dx) <= 0.55 * (dy + r)),
    ])[scenes.shape[picture, cell], np.arange(len(picture))]  # fmt: skip
    which, row, column = np.nonzero(inside)
    colour = np.array(list(COLOURS.values()))[scenes.colour[picture, cell]] + rng.integers(-20, 21, (len(picture), 3))
    image[picture[which], y[which, row], x[which, column]] = np.clip(colour, 0, 255)[which]
    return image


def sentences(*columns: str | np.ndarray) -> np.ndarray:
    """Words, or arrays of word ids [n], side by side, padded -> [n TEXT]."""
    count = next(len(column) for column in columns if isinstance(column, np.ndarray))
    words = [column if isinstance(column, np.ndarray) else np.full(count, ID[column]) for column in columns]
    return np.stack(words + [np.full(count, ID[PAD])] * (TEXT - len(words)), 1)


def ids(words: list[str], chosen: np.ndarray) -> np.ndarray:
    """Indices into words -> ids."""
    return np.array([ID[word] for word in words])[chosen]


def one_of(rng: np.random.Generator, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """allowed[n 9] -> an allowed cell at random [n], and whether there is one [n]."""
    return (rng.random(allowed.shape) * allowed).argmax(1), allowed.any(1)


def at(values: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """values[n 9], cell[n] -> [n]"""
    return values[np.arange(len(cell)), cell]


def alone(scenes: Scenes, values: np.ndarray) -> np.ndarray:
    """True for the shapes whose value no other shape of the picture has [n 9]."""
    same = (values[:, :, None] == values[:, None]) & scenes.present[:, None]
    return scenes.present & (same.sum(2) == 1)


def ask_exists(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """is there a red circle ? about a pair that is there, or about any."""
    there = at(scenes.pair, one_of(rng, scenes.present)[0])
    pair = np.where(rng.random(len(there)) < 0.4, there, pairs[rng.integers(len(pairs), size=len(there))])
    colour, shape = np.divmod(pair, len(SHAPES))
    words = sentences("is", "there", "a", ids(COLOUR_NAMES, colour), ids(SHAPES, shape), "?")
    found = (scenes.present & (scenes.pair == pair[:, None])).any(1)
    return Questions(words, ids(["no", "yes"], found.astype(int)), np.ones(len(pair), bool))


def ask_count(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """how many objects ? how many red objects ? how many circles ? mostly about what is there."""
    count = len(scenes.present)
    cell = one_of(rng, scenes.present)[0]
    is_there = rng.random(count) < 0.8
    colour = np.where(is_there, at(scenes.colour, cell), rng.integers(len(COLOURS), size=count))
    shape = np.where(is_there, at(scenes.shape, cell), rng.integers(len(SHAPES), size=count))
    plurals = [f"{shape}s" for shape in SHAPES]
    forms = [
        (sentences("how", "many", np.full(count, ID["objects"]), "?"), scenes.present),
        (sentences("how", "many", ids(COLOUR_NAMES, colour), "objects", "?"), scenes.colour == colour[:, None]),
        (sentences("how", "many", ids(plurals, shape), "?"), scenes.shape == shape[:, None]),
    ]
    form = rng.choice(3, count, p=[0.2, 0.4, 0.4])
    words = np.stack([words for words, _ in forms])[form, np.arange(count)]
    number = np.stack([(matches & scenes.present).sum(1) for _, matches in forms])[form, np.arange(count)]
    return Questions(words, ids(NUMBERS, number), np.ones(count, bool))


def ask_colour(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """which colour is the circle ? where there is one circle."""
    cell, valid = one_of(rng, alone(scenes, scenes.shape))
    words = sentences("which", "colour", "is", "the", ids(SHAPES, at(scenes.shape, cell)), "?")
    return Questions(words, ids(COLOUR_NAMES, at(scenes.colour, cell)), valid)


def ask_shape(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """which shape is red ? where one object is."""
    cell, valid = one_of(rng, alone(scenes, scenes.colour))
    words = sentences("which", "shape", "is", ids(COLOUR_NAMES, at(scenes.colour, cell)), "?")
    return Questions(words, ids(SHAPES, at(scenes.shape, cell)), valid)


def ask_place(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """which colour is at the top left ? which shape is at the middle right ? where there is one."""
    cell, valid = one_of(rng, scenes.present)
    asks_colour = rng.random(len(cell)) < 0.4
    rows, columns = (ids(names, where) for names, where in zip((ROWS, COLUMNS), np.divmod(cell, CELLS), strict=True))
    asked = np.where(asks_colour, ID["colour"], ID["shape"])
    answer = np.where(asks_colour, ids(COLOUR_NAMES, at(scenes.colour, cell)), ids(SHAPES, at(scenes.shape, cell)))
    return Questions(sentences("which", asked, "is", "at", "the", rows, columns, "?"), answer, valid)


def ask_size(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """which size is the red circle ? where there is one."""
    cell, valid = one_of(rng, alone(scenes, scenes.pair))
    names = ids(COLOUR_NAMES, at(scenes.colour, cell)), ids(SHAPES, at(scenes.shape, cell))
    return Questions(sentences("which", "size", "is", "the", *names, "?"), ids(SIZES, at(scenes.size, cell)), valid)


def ask_relation(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> Questions:
    """which colour is left of the blue square ? where there is one, and a shape in the cell beside it."""
    direction = rng.integers(len(DIRECTIONS), size=len(scenes.present))
    step = np.array(list(DIRECTIONS.values()))[direction]
    row, column = np.divmod(np.arange(CELLS**2), CELLS)
    row, column = row + step[:, :1], column + step[:, 1:]  # of the cell beside each cell [n 9]
    beside = np.clip(row, 0, CELLS - 1) * CELLS + np.clip(column, 0, CELLS - 1)
    in_grid = (row >= 0) & (row < CELLS) & (column >= 0) & (column < CELLS)
    allowed = alone(scenes, scenes.pair) & in_grid & np.take_along_axis(scenes.present, beside, 1)
    cell, valid = one_of(rng, allowed)
    answer = at(beside, cell)
    asks_colour = rng.random(len(cell)) < 0.5
    asked = np.where(asks_colour, ID["colour"], ID["shape"])
    names = ids(COLOUR_NAMES, at(scenes.colour, cell)), ids(SHAPES, at(scenes.shape, cell))
    beginning, end = ("which", asked, "is", ids(list(DIRECTIONS), direction)), ("the", *names, "?")
    is_beside = np.isin(direction, [0, 1])  # left of, right of; but: above, below
    words = np.where(is_beside[:, None], sentences(*beginning, "of", *end), sentences(*beginning, *end))
    colour, shape = ids(COLOUR_NAMES, at(scenes.colour, answer)), ids(SHAPES, at(scenes.shape, answer))
    return Questions(words, np.where(asks_colour, colour, shape), valid)


ASK = {"exists": ask_exists, "count": ask_count, "colour": ask_colour, "shape": ask_shape, "size": ask_size,
       "place": ask_place, "relation": ask_relation}  # fmt: skip


def ask(rng: np.random.Generator, scenes: Scenes, pairs: np.ndarray) -> tuple[Questions, np.ndarray]:
    """Ask a question about each picture -> questions, the kind of each [n]."""
    asked = [ask_kind(rng, scenes, pairs) for ask_kind in ASK.values()]
    wish = np.log(list(KINDS.values())) + rng.gumbel(size=(len(scenes.present), len(ASK)))  # largest as often as shared
    valid = np.stack([questions.valid for questions in asked], 1)
    kind = np.where(valid, wish, -np.inf).argmax(1)
    chosen = kind, np.arange(len(kind))
    words, answer = (
        np.stack([getattr(questions, what) for questions in asked])[chosen] for what in ("words", "answer")
    )
    return Questions(words, answer, valid.any(1)), kind


def make_rows(rng: np.random.Generator, count: int, pairs: np.ndarray, questions: int) -> dict[str, np.ndarray]:
    """Return the arrays of a side of the data: images, inputs, targets, and the kind of the first question.

    Rows have up to QUESTIONS questions: every fourth only the first, the others as many as asked for.
    """
    scenes = draw_scenes(rng, count, pairs)
    asked = [ask(rng, scenes, pairs) for _ in range(QUESTIONS)]
    words, answer = (np.stack([getattr(one, what) for one, _ in asked], 1) for what in ("words", "answer"))
    number = np.where(np.arange(count) % 4 == 0, 1, questions)
    words = np.where((np.arange(QUESTIONS) < number[:, None])[..., None], words, ID[PAD])
    targets = np.where(words == ID["?"], answer[..., None], -1).reshape(count, -1)
    inputs = np.concatenate([np.full((count, PLACES), ID[IMAGE]), words.reshape(count, -1)], 1)
    targets = np.concatenate([np.full((count, PLACES), -1), targets], 1)
    return {
        "images": paint(rng, scenes),
        "inputs": inputs.astype(np.int32),
        "targets": targets.astype(np.int32),
        "kind": asked[0][1].astype(np.int32),
    }


def best_guess(train: dict[str, np.ndarray], val: dict[str, np.ndarray]) -> np.ndarray:
    """Return for each row of val, of one question, whether the guess without the picture is right: the most frequent
    training answer to the first question of a row, or to its kind if it was never asked."""
    first = slice(PLACES, PLACES + TEXT)

    def keys(rows: dict[str, np.ndarray]) -> list[bytes]:
        return [row.tobytes() for row in rows["inputs"][:, first]]

    def most_frequent(keys: list) -> dict:
        counts = {}
        for key, answer in zip(keys, train["targets"][:, first].max(1).tolist(), strict=True):
            counts.setdefault(key, np.zeros(len(WORDS), int))[answer] += 1
        return {key: count.argmax() for key, count in counts.items()}

    of_question, of_kind = most_frequent(keys(train)), most_frequent(train["kind"].tolist())
    asked = zip(keys(val), val["kind"].tolist(), strict=True)
    guess = [of_question.get(question, of_kind[kind]) for question, kind in asked]
    return np.array(guess) == val["targets"].max(1)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 if it is wrong."""
    parser = Parser(description="Draw pictures of coloured shapes with questions of one-word answers.")
    parser.add_argument("--out", required=True, type=path_argument, help="output folder; must not exist")
    parser.add_argument("--train", type=at_least(1), default=60_000, help="training rows (default: 60000)")
    parser.add_argument("--val", type=at_least(1), default=2_000, help="validation rows (default: 2000)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="random seed (default: 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Write the folder; 2 if the request is wrong."""
    asked = arguments(argv)
    try:
        rng = np.random.default_rng(asked.seed)
        train = make_rows(rng, asked.train, np.setdiff1d(all_pairs(), held_out_pairs()), QUESTIONS)
        val = make_rows(rng, asked.val, all_pairs(), 1)
        is_right = best_guess(train, val)
        guess = float(is_right.mean())
        about = {"words": WORDS, "kinds": list(KINDS), "held_out_pairs": HELD_OUT, "best_guess_without_picture": guess}
        about["picture_places"] = PLACES
        arrays.write(Path(asked.out), {"train": train, "val": val}, len(WORDS), about)
    except (ValueError, OSError) as error:
        return refuse(error)
    tokens = PLACES + TEXT * QUESTIONS
    print(f"{asked.out}: {asked.train:,} training and {asked.val:,} validation rows of {tokens} tokens")
    print(f"{len(WORDS)} words; train with data.source=arrays:{asked.out}")
    each = ", ".join(f"{kind} {is_right[val['kind'] == i].mean():.0%}" for i, kind in enumerate(KINDS))
    print(f"best guess without the picture: {guess:.1%} ({each})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
