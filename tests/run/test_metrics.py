"""What metrics are written, and when."""

import json

import jax
import jax.numpy as jnp
import matplotlib.figure
import pytest
from conftest import records, resolved, small

from nanotrain_jax.run import curves, metrics


@pytest.fixture
def config(tmp_path):
    tree = small(
        logging={"dir": str(tmp_path), "tensorboard": False, "progress": "none"},
        train={"steps": 10, "log_every": 2},
    )
    return resolved(tree)[0]


def values(loss=2.0, **more):
    scalars = {"loss": loss, "grad_norm": 1.0, "lr": 0.1}
    return {k: jnp.float32(v) for k, v in scalars.items()} | {"skipped_steps": jnp.int32(0)} | more


def test_a_step_is_written_when_the_next_one_has_been_dispatched(config, tmp_path):
    writer = metrics.Writer(config, 0, None)
    writer.start_clock()
    writer.step(2, values())
    assert records(tmp_path) == []
    writer.step(3, values())
    assert [r["step"] for r in records(tmp_path)] == [2]
    writer.finish()
    writer.close()


def test_only_logged_steps_evaluations_and_the_last_step_are_written(config, tmp_path):
    writer = metrics.Writer(config, 0, 1e12)
    writer.flops_per_token = 1e9 / (32 * 16)
    writer.start_clock()
    for number in range(1, 11):
        writer.step(number, values(loss=1 / 3, skipped_steps=jnp.int32(number > 4)))
        if number == 5:
            writer.write(val_loss=1.5)
    writer.finish()
    writer.close()
    found = records(tmp_path)
    assert [r["step"] for r in found] == [2, 4, 5, 6, 8, 10]
    assert [r.get("val_loss") for r in found] == [None, None, 1.5, None, None, None]
    assert [r.get("skipped_steps") for r in found] == [None, None, 1, 1, 1, 1]
    assert found[0]["loss"] == 0.33333334  # float32 to full precision
    assert found[-1]["tokens"] == 10 * 32 * 16
    assert found[0]["tokens_per_second"] == pytest.approx(32 * 16 / found[0]["step_seconds"])
    assert found[0]["mfu"] == pytest.approx(1e9 / found[0]["step_seconds"] / 1e12)


def test_the_steps_until_a_stop_are_in_the_records(config, tmp_path):
    writer = metrics.Writer(config, 0, None)
    writer.start_clock()
    for number in range(1, 6):
        writer.step(number, values(loss=float(number)))
    writer.write(is_last=True)
    writer.finish()
    writer.close()
    assert [(r["step"], r.get("mean_loss")) for r in records(tmp_path)] == [(2, 1.5), (4, 3.5), (5, None)]


def test_tokens_and_throughput_are_right_where_the_batch_changes_between_two_records(config, tmp_path):
    writer = metrics.Writer(config, 4, 1e12, tokens=100)
    writer.flops_per_token = 1e6
    writer.start_clock()
    for number, tokens in ((5, 64), (6, 64), (7, 64), (8, 512)):
        writer.tokens_per_step = tokens
        writer.step(number, values())
        writer.settle()
    writer.finish()
    writer.close()
    found = records(tmp_path)
    assert [r["tokens"] for r in found] == [100 + 2 * 64, 100 + 3 * 64 + 512]
    assert found[1]["tokens_per_second"] == pytest.approx((64 + 512) / 2 / found[1]["step_seconds"])
    assert found[1]["mfu"] == pytest.approx(1e6 * found[1]["tokens_per_second"] / 1e12)


def test_non_finite_metrics_are_null(config, tmp_path):
    writer = metrics.Writer(config, 0, None)
    writer.start_clock()
    writer.step(2, values(loss=float("nan"), grad_norm=jnp.float32("inf")))
    writer.finish()
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["loss"] is found["grad_norm"] is found["mfu"] is None


def drawn(monkeypatch):
    """Return a list that collects every saved figure."""
    figures, save = [], matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return figures


def curves_of(figure):
    """Return label -> points of each curve of a figure."""
    (axes,) = figure.axes
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_the_plot_uses_the_last_record_of_each_step(tmp_path, monkeypatch):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.5, "val_loss": 2.6},
        {"step": 2, "loss": 2.4},
        {"step": 3, "loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = drawn(monkeypatch)
    assert curves.draw(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "a run", None) == 0
    assert (tmp_path / "loss.png").stat().st_size > 5_000
    assert curves_of(figures[0]) == {"training": [[1, 3.0], [2, 2.4]]}


def test_the_plot_shows_mean_losses_the_bigram_line_and_a_title(config, tmp_path, monkeypatch):
    writer = metrics.Writer(config, 0, None)
    writer.start_clock()
    for number, loss in enumerate([4.0, 3.0, float("nan"), 2.0], 1):
        writer.step(number, values(loss=loss))
    figures = drawn(monkeypatch)
    writer.finish("quickstart: llama", 2.5)
    writer.close()
    assert [(r["loss"], r["mean_loss"]) for r in records(tmp_path)] == [(3.0, 3.5), (2.0, 2.0)]  # a skipped step
    (figure,) = figures
    assert figure.axes[0].get_title() == "quickstart: llama"
    found = curves_of(figure)
    assert found["training (mean since the previous point)"] == [[2, 3.5], [4, 2.0]]
    assert [y for _, y in found["bigram model (2.5000)"]] == [2.5, 2.5]


DAMAGED = {
    "NULs": b"\0" * 400,
    "blank": b"",
    "half a line": b'{"step": 7, "lo',
    "not UTF-8": b'{"step": 7, "loss": "\xff\xfe"}',
    "a list": b"[1, 2]",
    "a number": b"3",
    "nested": b"[" * 100_000,
    "no step": b'{"loss": 1.0}',
    "a loss that is none": b'{"step": 7, "loss": "low"}',
    "a step that is none": b'{"step": [7], "loss": 1.0}',
}


def test_damaged_lines_of_metrics_are_counted_and_do_not_fail_a_run(config, tmp_path, capsys, monkeypatch):
    good = [b'{"step": %d, "loss": 3.0}' % step for step in range(1, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], *DAMAGED.values(), good[1], b'{"step": 3, "l']))
    writer = metrics.Writer(config, 2, None)
    figures = drawn(monkeypatch)
    writer.start_clock()
    writer.step(4, values())
    writer.finish()
    writer.close()
    assert f"{len(DAMAGED)} lines of {tmp_path}/metrics.jsonl cannot be read" in capsys.readouterr().out
    assert curves_of(figures[0]) == {"training": [[1, 3.0], [2, 3.0], [4, 2.0]]}


@pytest.mark.parametrize("name", DAMAGED)
def test_each_kind_of_damaged_line_is_skipped(name, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(DAMAGED[name] + b'\n{"step": 1, "loss": 3.0}\n')
    assert curves.read(tmp_path / "metrics.jsonl") == ([{"step": 1, "loss": 3.0}], 1)


def test_a_failed_plot_gives_one_warning(config, tmp_path, capsys):
    (tmp_path / "loss.png").mkdir()
    writer = metrics.Writer(config, 0, None)
    writer.start_clock()
    writer.step(2, values())
    writer.finish()
    writer.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: cannot draw loss.png (IsADirectoryError")


def test_durations_may_exceed_24_hours():
    assert [metrics.clock(s) for s in (0, 59.6, 3599, 97_445, 360_000)] == [
        "00:00:00",
        "00:01:00",
        "00:59:59",
        "27:04:05",
        "100:00:00",
    ]


def test_a_progress_line_shows_the_remaining_time(config, capsys):
    many = config.replace("train", steps=100_000).replace("logging", progress="lines")
    writer = metrics.Writer(many, 0, None)
    writer.start_clock()
    writer.step(2, values())
    writer.settle()
    writer.seconds = 10.0
    writer.write()
    writer.close()
    assert capsys.readouterr().out.strip().endswith("ETA 277:46:20")  # 99,998 steps of 10 s


def test_validation_losses_stay_on_the_screen_beside_a_bar(config, capsys):
    writer = metrics.Writer(config.replace("logging", progress="bar"), 0, None)
    writer.start_clock()
    for number in (3, 5):
        writer.step(number, values())
        writer.write(val_loss=1 + number / 8)
    writer.close()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:6] for line in lines if "ETA" in line] == [
        ["step", "3/10", "loss", "2.0000", "val", "1.3750"],
        ["step", "5/10", "loss", "2.0000", "val", "1.6250"],
    ]


@pytest.mark.parametrize("log_every", [0, 1, 1000])
def test_the_host_is_one_step_ahead_however_rarely_a_step_is_logged(log_every, config, monkeypatch):
    """XLA:CPU aborts a program whose loop dispatches steps without ever waiting for one."""
    fetched, device_get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(float(tree["loss"])) or device_get(tree))
    writer = metrics.Writer(config.replace("train", log_every=log_every, steps=10_000), 0, None)
    writer.start_clock()
    for number in range(1, 5):
        writer.step(number, values(loss=number))
        assert fetched == list(range(1, number))
    writer.close()
