"""How many steps a run takes that its data decide: train.epochs, data.exhausted=end, also of a run that resumes."""

from types import SimpleNamespace

import pytest
from command import config_file, main
from conftest import records

from nanotrain_jax.config import load
from nanotrain_jax.run.length import Progress, is_by_data, steps

__all__ = ["config_file"]  # a fixture
ROWS = 21


def of_data(done=(0, 0), **sections):
    config = load.parse({"data": {"batch_size": 4} | sections.pop("data", {}), **sections})
    assert is_by_data(config)
    return steps(config, SimpleNamespace(train=range(ROWS)), Progress(*done))


@pytest.mark.parametrize(("epochs", "count"), [(1, 6), (3, 16), (0.5, 3), (0.01, 1), (1.9, 10)])
def test_epochs_are_the_fewest_steps_that_take_all_rows(epochs, count):
    assert of_data(train={"epochs": epochs}) == count


@pytest.mark.parametrize(
    ("done", "epochs", "count"),
    [((3, 6), 1, 7), ((6, 24), 1, 6), ((6, 24), 3, 16), ((9, 36), 1, 9)],  # batches of 2 before; of 4; and too far
)
def test_epochs_count_rows_from_where_a_run_is(done, epochs, count):
    assert of_data(done, train={"epochs": epochs}) == count


@pytest.mark.parametrize(
    ("done", "data", "train", "count"),
    [
        ((0, 0), {}, {}, 5),
        ((0, 0), {}, {"steps": 2}, 2),
        ((2, 16), {}, {}, 3),  # batches of 8 before
        ((5, 21), {}, {}, 5),
        ((0, 0), {}, {"batch_schedule": [{"steps": 4, "batch_size": 2}]}, 7),
        ((0, 0), {}, {"batch_schedule": [{"steps": 40, "batch_size": 2}]}, 10),
        ((6, 16), {}, {"batch_schedule": [{"steps": 4, "batch_size": 2}]}, 7),
    ],
)
def test_a_run_ends_before_a_source_is_read_twice(done, data, train, count):
    assert of_data(done, data=data | {"exhausted": "end"}, train={"steps": 1000} | train) == count


def test_more_rows_than_a_source_has_are_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size=22: a source ends after 21 sequences; use a smaller batch"):
        of_data(data={"exhausted": "end", "batch_size": 22})


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({"exhausted": "end"}, {"epochs": 1}, "exhausted=end with train.epochs, which says how long it is; leave one"),
        ({"exhausted": "end"}, {"stages": [{"name": "a", "steps": 1}]}, "exhausted=end with train.stages"),
        (
            {"exhausted": "end"},
            {"noise_scale": True, "batch_growth": {"batch_size": 1, "every": 2}},
            "exhausted=end with train.batch_growth, whose batches depend on the noise scale",
        ),
        ({"source": "synthetic"}, {"epochs": 2}, "train.epochs=2 with data.source=synthetic, which never ends"),
    ],
)
def test_data_that_cannot_decide_are_refused(data, train, message):
    with pytest.raises(ValueError, match=message):
        of_data(data=data, train=train)


@pytest.mark.long
@pytest.mark.parametrize("keys", [("train.epochs=2", "train.steps=null"), ("data.exhausted=end", "train.steps=1000")])
def test_a_run_that_resumes_with_another_batch_reads_as_many_rows(keys, config_file, tmp_path):
    run = f"logging.dir={tmp_path}/run", "train.eval_every=0"
    assert main(config_file, *run, "train.steps=6", "data.seq_len=512") == 0
    half = "data.batch_size=4", "data.seq_len=512"
    assert main(config_file, *run, *half, *keys) == 0
    log = records(tmp_path / "run")
    rows = log[-1]["tokens"] // 512
    whole = f"logging.dir={tmp_path}/whole", "train.eval_every=0"
    assert main(config_file, *whole, *half, *keys) == 0
    assert rows > 48 and 0 <= rows - records(tmp_path / "whole")[-1]["tokens"] // 512 < 4
