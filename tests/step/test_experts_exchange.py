"""Experts shared by devices of data: the dense oracle's losses, gradients and updates in every layout; dropped tokens,
resumes, clipping, refusals."""

import math

import numpy as np
import oracle
import pytest
from cases import case
from command import config_file, losses, main, same, saved_state
from conftest import LOSS, cover, equals_the_oracle, records, run

__all__ = ["config_file"]  # a fixture

EXPERTS = {"num": 8, "top_k": 2, "d_ff": 64, "balance": "none", "capacity": 8.0}  # room for all rows
MIXTURE = {"experts": EXPERTS}
SHARED = {"experts": EXPERTS | {"top_k": 3, "shared": 1, "router": "sigmoid", "balance": "loss"}}
SHARED["experts"] |= {"balance_weight": oracle.BALANCE, "z_loss": oracle.Z}


def shared(layout, remat="none", **parallel):
    return case(layout, "llama", remat, SHARED, persist_below=64, **parallel)


FIRST = [shared("data 4 expert 2 tensor 2", zero=3, microbatches=2)]
MORE = [
    *(case(f"data {n} expert {e}", model=MIXTURE, zero=0) for n, e in ((2, 2), (4, 2), (4, 4), (8, 8))),
    *(shared("data 4 expert 2", remat, zero=3) for remat in ("selective", "full", "block:2")),
    shared("data 8 expert 4", zero=1, microbatches=2),
    shared("replica 2 data 4 expert 2", zero=2),
    shared("data 4 expert 2", zero=0, grad_reduce="per_layer", microbatches=2),
    shared("data 4 expert 2", zero=1, grad_reduce="per_layer"),
    shared("data 4 expert 2", zero=3, prefetch=True, microbatches=2),
    shared("data 2 expert 2 tensor 2 pipe 2", zero=3, microbatches=2),
    shared("data 2 expert 2 tensor 2 context 2", zero=2, sequence_parallel=False),
    shared("data 2 expert 2 context 2", "full", zero=3, context_attention="ulysses"),
    shared("data 4 expert 4 pipe 2", zero=2, microbatches=4, schedule="zero_bubble"),
    shared("data 2 expert 2 pipe 2 context 2", context_attention="gather", microbatches=4, vocab_over_pipe=True),
    shared("data 2 expert 2 pipe 2", idle="mask", microbatches=2),
    case("data 4 expert 2", model=SHARED | {"num_layers": 3, "unroll": True}, zero=1, microbatches=2),
    shared("replica 2 data 2 expert 2", zero=2, compress="topk:1"),  # all of it travels
    *(shared("data 2 expert 2 tensor 4", remat, zero=1, overlap_tensor=True) for remat in ("none", "full")),
    shared("data 2 expert 2 tensor 2 pipe 2", overlap_tensor=True, idle="mask", microbatches=2),
]


@pytest.mark.parametrize("case", cover(FIRST, MORE, str))
def test_layouts_equal_the_dense_oracle(case, expected):
    equals_the_oracle(case.tree(), expected)


TIGHT = MIXTURE["experts"] | {"capacity": 1.0, "balance": "loss"}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data 4 expert 2", "data 4 expert 2 tensor 2", "data 4 expert 2 pipe 2"])
def test_what_is_dropped_is_counted_and_the_same_in_every_layout(layout):
    microbatches = 2
    plain, found = (
        run(case(words, model={"experts": TIGHT}, microbatches=microbatches, zero=zero).tree(), updates=3)[1]
        for words, zero in (("data 4 expert 2", 0), (layout, 3))
    )
    for a, b in zip(plain, found, strict=True):
        assert 0 < a["train_dropped"] < 0.5
        assert b["train_dropped"] == a["train_dropped"]
        np.testing.assert_allclose(b["loss"], a["loss"], **LOSS)


@pytest.mark.long
def test_gradients_are_clipped_by_the_norm_of_all():
    clip = {"grad_clip": 0.05}
    (_, one), (_, several) = (
        run(case(words, model=MIXTURE, zero=zero).tree(optimizer=clip), updates=3)
        for words, zero in (("data 1", 0), ("data 4 expert 2 tensor 2", 3))
    )
    for a, b in zip(one, several, strict=True):
        assert a["grad_norm"] > 0.05
        np.testing.assert_allclose(b["grad_norm"], a["grad_norm"], rtol=1e-5)
        np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)


MODEL = "model.d_ff=null", "model.experts={num: 8, top_k: 2, d_ff: 32, capacity: 8, balance: bias}"


def run_of(config_file, tmp_path, *model):
    """Return a function that trains name up to a step with some keys."""

    def train(name, steps, *keys):
        folder = f"logging.dir={tmp_path}/{name}"
        assert main(config_file, folder, f"train.steps={steps}", "train.eval_every=5", *model, *keys) == 0

    return train


@pytest.mark.long
def test_a_run_resumes_bitwise_and_on_other_devices_per_expert(config_file, tmp_path, capsys):
    train = run_of(config_file, tmp_path, *MODEL)
    shares = "parallel.data=8", "parallel.expert=4", "parallel.zero=3", "parallel.persist_below=64"
    train("whole", 10, *shares)
    train("parts", 5, *shares)
    train("parts", 10, *shares)
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts"))
    assert "resumed from step 5" in capsys.readouterr().out
    train("others", 5, *shares)
    train("others", 10, "parallel.data=4", "parallel.expert=2", "parallel.zero=1")
    whole, others = (losses(tmp_path / name) for name in ("whole", "others"))
    np.testing.assert_allclose([others[i] for i in (5, 10)], [whole[i] for i in (5, 10)], **LOSS)
    for record in records(tmp_path / "whole"):
        assert record["train_dropped"] == record.get("dropped", 0) == 0 and math.isfinite(record["train_load"])


FIRST_DENSE = "model.d_ff=48", "model.num_layers=6", "data.batch_size=16"
FIRST_DENSE += ("model.experts={num: 8, top_k: 2, d_ff: 32, capacity: 8, balance: bias, first_dense: 3}",)


@pytest.mark.long
def test_a_run_with_dense_layers_first_resumes_on_other_layouts(config_file, tmp_path):
    """Dense layers are a stack of their own; on two stages the first has fewer layers than rows."""
    train = run_of(config_file, tmp_path, *FIRST_DENSE)
    shared = "parallel.data=4", "parallel.tensor=2", "parallel.expert=2", "parallel.zero=3", "parallel.persist_below=64"
    train("whole", 15, *shared)
    train("parts", 5, *shared)
    train("others", 5, *shared)
    train("parts", 15, *shared)
    same(saved_state(tmp_path / "whole"), saved_state(tmp_path / "parts"))
    train("others", 10, "parallel.pipe=2", "parallel.data=2", "parallel.zero=1", "parallel.microbatches=4")
    train("others", 15, "parallel.data=8")
    whole, others = (losses(tmp_path / name) for name in ("whole", "others"))
    np.testing.assert_allclose([others[i] for i in (5, 10, 15)], [whole[i] for i in (5, 10, 15)], **LOSS)
