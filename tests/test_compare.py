"""The compare command: picture and table of several runs, and bad input."""

import json

import matplotlib.figure
import pytest
import yaml

from nanotrain_jax import compare
from nanotrain_jax.config.schema import Config
from nanotrain_jax.run import curves


def write(folder, losses, tokens=64, **sections):
    """Write a run as `train` does: a record every second step, a validation loss every fourth."""
    config = Config().replace("logging", dir=str(folder))
    for section, keys in sections.items():
        config = config.replace(section, **keys)
    records = [
        {"step": step, "loss": loss + 0.5, "mean_loss": loss, "grad_norm": 1.0, "mfu": None}
        | {"tokens": step * tokens, "tokens_per_second": 100.0 * step, "step_seconds": 0.5}
        | ({"val_loss": loss + 0.1} if step % 4 == 0 else {})
        for step, loss in zip(range(2, 2 * len(losses) + 1, 2), losses, strict=True)
    ]
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two runs; the second has other weights, twice the batch, and ends above its best validation loss."""
    first = write(tmp_path / "a", [4.0, 3.0, 2.5, 2.0])
    second = write(tmp_path / "b", [4.0, 3.0, 3.5, 3.25], tokens=128, data={"batch_size": 64}, train={"seed": 1})
    return [str(first), str(second)]


@pytest.fixture
def figures(monkeypatch):
    """Every saved figure."""
    found, save = [], matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        found.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return found


def lines(figure):
    (axes,) = figure.axes
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_runs_are_drawn_in_one_picture_and_listed_in_a_table(runs, figures, tmp_path, capsys):
    picture = tmp_path / "out.png"
    assert compare.main([*runs, "--out", str(picture)]) == 0
    assert picture.stat().st_size > 5_000
    assert lines(figures[0]) == {
        runs[0]: [[128, 4.0], [256, 3.0], [384, 2.5], [512, 2.0]],
        runs[1]: [[256, 4.0], [512, 3.0], [768, 3.5], [1024, 3.25]],
    }
    out, err = capsys.readouterr()
    assert err == ""
    assert out.endswith(f"wrote {picture}\n")
    columns = [list(column.cells) for column in compare.table([compare.read(tmp_path / name) for name in "ab"]).columns]
    assert columns == [
        runs,
        ["8", "8"],
        ["512", "1,024"],
        ["2.5000", "3.7500"],
        ["2.1000", "3.1000"],
        ["2.1000", "3.3500"],
        ["500", "500"],
        ["data.batch_size=32\ntrain.seed=0", "data.batch_size=64\ntrain.seed=1"],
    ]
    assert all(cell in out for cells in columns[1:7] for cell in cells)


def test_a_metric_is_drawn_against_steps_or_seconds(runs, figures, tmp_path):
    wanted = [runs[0], "--metric", "val_loss", "--out", str(tmp_path / "out.png")]
    assert compare.main([*wanted, "--against", "steps"]) == 0
    assert compare.main([*wanted, "--against", "seconds"]) == 0
    assert [lines(figure)[runs[0]] for figure in figures] == [[[4, 3.1], [8, 2.1]], [[2.0, 3.1], [4.0, 2.1]]]


def test_a_run_from_the_step_of_another_begins_at_0_seconds(tmp_path):
    log = write(tmp_path / "a", [4.0, 3.0, 2.5, 2.0]) / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    line = {"began": 0.0, "time": 1.0, "first": 3, "step": 4, "skipped": 0, "seconds": {}}
    (tmp_path / "a" / "goodput.jsonl").write_text(json.dumps(line) + "\n")
    run = compare.read(tmp_path / "a")
    assert curves.series(run.records, "val_loss", "seconds", run.first) == [(0.5, 3.1), (2.5, 2.1)]


def test_a_step_that_ran_twice_counts_once(tmp_path):
    records = [{"step": 1, "step_seconds": 1.0, "loss": 3.0}, {"step": 2, "step_seconds": 5.0, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, records[1] | {"loss": 1}]))
    found, _ = curves.read(tmp_path / "metrics.jsonl")
    assert curves.series(found, "loss", "seconds") == [(1.0, 3.0), (6.0, 1)]


def test_of_an_attempt_that_a_run_went_back_before_nothing_counts(tmp_path):
    diverged = [{"step": step, "loss": 3.0} for step in (5, 10, 15, 20)]
    again = [{"step": step, "loss": 2.0} for step in (8, 12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*diverged, *again]))
    assert curves.read(tmp_path / "metrics.jsonl") == ([diverged[0], *again], 0)


def test_a_run_that_diverged_or_was_not_evaluated_says_so(tmp_path):
    run = compare.read(write(tmp_path / "a", [4.0, 3.0]))
    assert (run.final("loss"), run.final("val_loss"), run.final("accuracy")) == ("3.5000", "3.1000", "-")
    run.records[-1]["loss"] = run.records[-1]["val_loss"] = None
    assert (run.final("loss"), run.final("val_loss")) == ("nan", "nan")


def test_only_finite_numbers_are_points():
    records = [{"step": i, "x": x} for i, x in enumerate([1, 2.5, None, "3", True, float("nan"), [4]])]
    assert curves.series(records, "x", "steps") == [(0, 1), (1, 2.5)]
    assert curves.series(records, "x", "tokens") == curves.series(records, "x", "seconds") == []


def test_configs_differ_in_what_one_has_and_the_others_have_not(tmp_path):
    write(tmp_path / "a", [2.0], optimizer={"lr": 0.1})
    write(tmp_path / "b", [2.0], model={"num_layers": 8, "factory": "a:b"})
    write(tmp_path / "c", [2.0])
    (tmp_path / "c" / "config.yaml").write_text("optimizer: {lr: 0.1, gone: [1]}\n")  # of another version: few keys
    found = [compare.read(tmp_path / name) for name in "abc"]
    assert [compare.differences(run, found) for run in found] == [
        ["model.factory=null", "model.num_layers=4", "optimizer.lr=0.1", "optimizer.gone=null"],
        ["model.factory=a:b", "model.num_layers=8", "optimizer.lr=0.001"],
        ["optimizer.gone=[1]"],
    ]
    assert compare.differences(found[0], found[:1]) == []


def test_up_to_thirty_curves_look_unlike_each_other():
    axes = matplotlib.figure.Figure().subplots()
    curves.draw_lines(axes, {f"${i}": [(0, i), (1, i)] for i in range(30)})
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 30


def test_damaged_lines_give_one_warning(runs, tmp_path, capsys):
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo\nnothing\n')
    assert compare.main([*runs, "--out", str(tmp_path / "out.png")]) == 0
    assert capsys.readouterr().err == (
        f"warning: 2 lines of {tmp_path}/a/metrics.jsonl cannot be read; they are left out\n"
    )


BAD = [
    (["{tmp}/none"], "none' has no config.yaml; give the folder of a run"),
    (["{tmp}/untrained"], "untrained' has no metrics.jsonl; give the folder of a run"),
    (["{tmp}/damaged"], "damaged/metrics.jsonl has no records (1 lines cannot be read)"),
    (["{tmp}/a", "--metric", "acuracy"], "it has grad_norm, loss, mean_loss, step, step_seconds, tokens, tokens_per"),
    (["{tmp}/a", "{tmp}/short", "--metric", "val_loss"], "short has no such values; it has grad_norm, loss"),
    (["{tmp}/a", "--metric", "mfu"], "a has no such values"),
    (["{tmp}/a", "--against", "days"], "invalid choice: 'days'"),
    (["{tmp}/a", "--out", "{tmp}/none/out.png"], "none/out.png' cannot be written (No such file or directory)"),
    (["{tmp}/a", "--out", "{tmp}/out.doc"], "doc"),
    (["{tmp}/text"], "not valid YAML"),
    ([], "RUN"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_an_invalid_request_is_reported_in_one_line(arguments, message, runs, tmp_path, capsys):
    write(tmp_path / "short", [2.0])
    (write(tmp_path / "untrained", [2.0]) / "metrics.jsonl").unlink()
    (write(tmp_path / "damaged", [2.0]) / "metrics.jsonl").write_text("{\n")
    (write(tmp_path / "text", [2.0]) / "config.yaml").write_text("a: b: c")
    try:
        code = compare.main([argument.format(tmp=tmp_path) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
