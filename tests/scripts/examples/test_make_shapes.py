"""make_shapes.py: answers are those of the scenes, held-out pairs stay out of training, a seed repeats."""

import importlib.util
import json

import numpy as np
import pytest
from conftest import ROOT, exit_code

from nanotrain_jax.config.load import load

spec = importlib.util.spec_from_file_location("make_shapes", ROOT / "scripts" / "examples" / "make_shapes.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ALL = np.arange(len(script.COLOURS) * len(script.SHAPES))


def objects(scenes, i):
    """The shapes of picture i by cell: colour, shape, size in words."""
    return {
        int(cell): (
            script.COLOUR_NAMES[scenes.colour[i, cell]],
            script.SHAPES[scenes.shape[i, cell]],
            script.SIZES[scenes.size[i, cell]],
        )
        for cell in np.flatnonzero(scenes.present[i])
    }


def beside(found, cell, direction):
    """The shape in the next cell."""
    (row, column), (down, right) = divmod(cell, script.CELLS), script.DIRECTIONS[direction]
    row, column = row + down, column + right
    inside = 0 <= row < script.CELLS and 0 <= column < script.CELLS
    return found.get(row * script.CELLS + column) if inside else None


def the(found, *words):
    """The cell of the only shape that has all of these words."""
    (cell,) = (cell for cell, thing in found.items() if set(words) <= set(thing))
    return cell


def answer(found, words):
    """Answer a question in plain Python."""
    things = list(found.values())
    match words:
        case ["is", "there", "a", colour, shape, "?"]:
            return "yes" if any(thing[:2] == (colour, shape) for thing in things) else "no"
        case ["how", "many", *which, "?"]:
            wanted = {word.removesuffix("s") if word.removesuffix("s") in script.SHAPES else word for word in which}
            return script.NUMBERS[sum(wanted - {"objects"} <= set(thing) for thing in things)]
        case ["which", "colour", "is", "the", shape, "?"]:
            return found[the(found, shape)][0]
        case ["which", "shape", "is", colour, "?"]:
            return found[the(found, colour)][1]
        case ["which", "size", "is", "the", colour, shape, "?"]:
            return found[the(found, colour, shape)][2]
        case ["which", what, "is", "at", "the", row, column, "?"]:
            cell = script.ROWS.index(row) * script.CELLS + script.COLUMNS.index(column)
            return found[cell][what == "shape"]
        case ["which", what, "is", direction, *_, colour, shape, "?"]:
            return beside(found, the(found, colour, shape), direction)[what == "shape"]


def words_of(ids):
    return [script.WORDS[i] for i in ids if i != script.ID[script.PAD]]


def test_answers_are_those_of_the_scenes():
    rng = np.random.default_rng(0)
    scenes = script.draw_scenes(rng, 2000, ALL)
    questions, kind = script.ask(rng, scenes, ALL)
    for i in range(2000):
        assert answer(objects(scenes, i), words_of(questions.words[i])) == script.WORDS[questions.answer[i]]
    assert set(kind) == set(range(len(script.KINDS)))
    assert questions.valid.all()


def test_each_shape_is_drawn_where_the_scene_has_it():
    rng = np.random.default_rng(1)
    scenes = script.draw_scenes(rng, 100, ALL)
    images = script.paint(rng, scenes).astype(int)
    for i, cell in zip(*np.nonzero(scenes.present), strict=True):
        y, x = scenes.centre[i, cell].astype(int)
        colour = script.COLOURS[script.COLOUR_NAMES[scenes.colour[i, cell]]]
        assert np.abs(images[i, y, x] - colour).max() <= 20
    empty = ~scenes.present.any(1)
    assert not empty.any()


def make(folder, *keys):
    assert script.main(["--out", str(folder), "--train", "400", "--val", "80", *keys]) == 0
    return json.loads((folder / "meta.json").read_text())


def test_held_out_pairs_are_asked_in_validation_only(tmp_path):
    meta = make(tmp_path / "a")
    for side, expected in (("train", False), ("val", True)):
        inputs = np.load(tmp_path / "a" / side / "inputs.npy")
        text = " ".join(word for row in inputs for word in words_of(row))
        assert any(f"{colour} {shape} " in text for colour, shape in script.HELD_OUT) == expected
    targets = np.load(tmp_path / "a" / "val" / "targets.npy")
    np.testing.assert_array_equal((targets >= 0).sum(1), 1)
    assert 0.2 < meta["best_guess_without_picture"] < 0.6
    assert meta["vocab_size"] == len(script.WORDS) < 100
    config = load(ROOT / "configs" / "vision_language.yaml")
    assert meta["picture_places"] == config.vision.max_tokens
    assert inputs.shape[1] == config.data.seq_len


def test_the_same_seed_makes_the_same_files(tmp_path):
    sums = [make(tmp_path / name, "--seed", seed)["sha256"] for name, seed in (("a", "3"), ("b", "3"), ("c", "4"))]
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [(["--train", "0"], "--train: '0' must be"), (["--seed", "-1"], "--seed: '-1'")],
)
def test_wrong_numbers_are_refused_in_one_line(tmp_path, capsys, keys, message):
    assert exit_code(script.main, ["--out", str(tmp_path / "a"), *keys]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
