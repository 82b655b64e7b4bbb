"""scripts/examples/ask_shapes.py: right answers of a trained model, by kind of question, add up to those of all."""

import importlib.util
import re
import sys

import pytest
from conftest import ROOT, exit_code, resolved, small

from nanotrain_jax import train
from nanotrain_jax.step import build as steps

sys.path.insert(0, str(ROOT / "scripts" / "examples"))  # scripts import each other
spec = importlib.util.spec_from_file_location("ask_shapes", ROOT / "scripts" / "examples" / "ask_shapes.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ROW = re.compile(r"(\w+) +│ +([\d,]+) +│ +([\d.]+)% +│ +([\d.]+)%")


@pytest.mark.long
def test_kinds_of_questions_add_up_to_all(tmp_path, capsys):
    data, run = tmp_path / "shapes", tmp_path / "run"
    assert script.make_shapes.main(["--out", str(data), "--train", "400", "--val", "64"]) == 0
    keys = "train.steps=3", "train.eval_every=0", "checkpoint.every=3", "runtime.simulate=8"
    config = str(ROOT / "configs" / "vision_language.yaml")
    assert train.main(["--config", config, f"data.source=arrays:{data}", f"logging.dir={run}", *keys]) == 0
    capsys.readouterr()
    assert script.main(["--run", str(run), "--pictures", "300"]) == 0
    out = capsys.readouterr().out
    found = [(kind, int(count), float(right)) for kind, count, right, _ in ROW.findall(out)]
    ends = [i for i, (kind, _, _) in enumerate(found) if kind == "all"]
    assert len(ends) == 2
    for first, last in ((0, ends[0]), (ends[0] + 1, ends[1])):
        assert found[last][1] == 300 == sum(count for _, count, _ in found[first:last])
        mean = sum(count * right for _, count, right in found[first:last]) / 300
        assert found[last][2] == pytest.approx(mean, abs=0.1)


@pytest.mark.long
def test_rows_that_fill_the_last_batch_do_not_count():
    """Targets are right where the model's most likely token is asked for; 5 rows are not a multiple of the batch."""
    vision = {"image_size": 48, "patch_size": 16, "scales": [3, 1], "num_layers": 1, "width": 32, "num_heads": 4}
    tree = small(vision=vision | {"min_tokens": 4, "max_tokens": script.make_shapes.PLACES})
    places, words = script.make_shapes.PLACES, len(script.make_shapes.WORDS)
    tree["model"] |= {"vocab_size": words}
    tree["data"] |= {"batch_size": 4, "seq_len": places + 36}
    step = steps.build(*resolved(tree | {"parallel": {"data": 1}}))
    params = step.init().params
    rng = script.np.random.default_rng(0)
    rows = script.make_shapes.make_rows(rng, 5, script.make_shapes.all_pairs(), 1)
    likely = [script.right_answers(step, params, with_answer(rows, token)) for token in range(words)]
    assert sum(likely) == pytest.approx(1)  # each row has exactly one most likely token


def with_answer(rows, token):
    return rows | {"targets": script.np.where(rows["targets"] < 0, -1, token).astype("int32")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--run", "nowhere"], "nowhere holds no finished checkpoint"), (["--run", "x", "--seed", "0"], "from 1")],
)
def test_a_wrong_request_is_one_line(arguments, message, capsys):
    assert exit_code(script.main, arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
