"""What is written of a step, and when."""

import json

import jax.numpy as jnp
import pytest
from conftest import records, resolved, small

from nanotrain_jax.runtime import metrics


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
    writer = metrics.Writer(config, 0, 1e9, None)
    writer.start_clock()
    writer.step(2, values())
    assert records(tmp_path) == []
    writer.step(3, values())
    assert [r["step"] for r in records(tmp_path)] == [2]
    writer.finish()
    writer.close()


def test_only_logged_steps_evaluations_and_the_last_step_are_written(config, tmp_path):
    writer = metrics.Writer(config, 0, 1e9, 1e12)
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


def test_what_is_not_finite_is_null(config, tmp_path):
    writer = metrics.Writer(config, 0, 1e9, None)
    writer.start_clock()
    writer.step(2, values(loss=float("nan"), grad_norm=jnp.float32("inf")))
    writer.finish()
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["loss"] is found["grad_norm"] is found["mfu"] is None


def test_the_picture_is_drawn_from_the_last_time_a_step_ran(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.5, "val_loss": 2.6},
        {"step": 2, "loss": 2.4},
        {"step": 3, "loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics.plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5_000
