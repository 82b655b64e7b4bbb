"""Modelled scaling: efficiencies, what takes them, and the rows of the guide."""

import guides
import pytest
from conftest import cover, in_words
from planning import ROOT, as_with_the_newest_compiler, small

from nanotrain_jax.config import load
from nanotrain_jax.planner import choice, scaling, search
from nanotrain_jax.planner.estimate import estimate


def test_efficiency_is_t1_over_tn_and_its_parts_sum_to_the_rest():
    """Weak: T1 / T_N; strong: T1 / (N T_N)."""
    weak = scaling.points(small(), "h100", [(2, 8), (8, 32)])
    strong = scaling.points(small(), "h100", [(2, 8), (8, 8)])
    for found, expected in (weak, 1.0), (strong, 1 / 4):
        base, point = found
        ratio = scaling.efficiency(point, base)
        assert ratio == pytest.approx(expected * base.step_seconds / point.step_seconds)
        assert sum(scaling.losses(point, base).values()) == pytest.approx(1 - ratio)
        assert scaling.efficiency(base, base) == 1 and not any(scaling.losses(base, base).values())
    assert scaling.efficiency(strong[1], strong[0]) < scaling.efficiency(weak[1], weak[0])


def test_without_latency_a_point_is_the_planner_s_estimate(monkeypatch):
    monkeypatch.setattr(scaling, "latency", lambda e: 0.0)
    best = search.search(small(), "h100", 16).best[0]
    (point,) = scaling.points(small(), "h100", [(16, 32)])
    assert point.layout == search.describe(best.config)
    assert (point.step_seconds, point.mfu) == pytest.approx((best.step_seconds, best.mfu))


def test_latency_of_zero_3_is_that_of_a_ring_for_each_layer_and_pass():
    """16 GPUs in two hosts: 14 hops over NVLink, one over the network. 8 layers and 3 microbatches: 2 gathers and a
    scatter; the embedding and the head: a gather and a scatter of each."""
    e = estimate(small(batch=48, data=16, zero=3, microbatches=3, persist_below=0), "h100")
    moved = {(t.op, t.why): scaling.collectives(e.config, t) for t in e.transfers}
    assert moved == {
        ("all_gather", "weights, forward and backward"): 3 * (2 * 8 + 1),
        ("reduce_scatter", "gradients"): 3 * (8 + 1),
    }
    ring = 14 * 3.4e-6 + 14e-6
    assert [scaling.collective_latency(e, t) for t in e.transfers] == pytest.approx([ring, ring])
    assert 0 < scaling.latency(e) <= 3 * (3 * 8 + 2) * ring


def test_latency_of_an_all_reduce_is_that_of_a_tree_and_hardly_grows():
    def of(gpus):
        e = estimate(small(batch=gpus, data=gpus), "h100")
        (transfer,) = e.transfers
        assert (transfer.op, scaling.collectives(e.config, transfer)) == ("all_reduce", 2)  # layers, ends
        return scaling.collective_latency(e, transfer)

    assert of(8) == pytest.approx(2 * 7 * 4e-6)
    assert of(1024) - of(512) == pytest.approx(2 * 14e-6)


def test_a_model_that_fits_nowhere_is_one_line():
    config = choice.neutral(load.load(ROOT / "configs/llama3_70b.yaml"), None)
    found = scaling.points(config, "h100", [(8, 8)])
    assert not found[0].layout
    with pytest.raises(ValueError, match="no layout fits on 8 GPUs; use more"):
        scaling.base_of(found)


BATCH = 512  # of strong scaling: 4 million tokens
PER_GPU = {"llama3_8b": 2, "llama3_70b": 1}  # as in configs/
SHOWN = {"llama3_8b": (8, 64, 256, 512, 1024, 2048, 4096), "llama3_70b": (64, 256, 1024, 4096)}
ROWS = [(name, kind, gpus) for name, numbers in SHOWN.items() for kind in ("weak", "strong") for gpus in numbers]
FIRST = [("llama3_8b", "weak", 8), ("llama3_8b", "strong", 4096)]


@pytest.mark.parametrize("case", cover(FIRST, [row for row in ROWS if row not in FIRST]))
def test_modelled_scaling_shown_in_the_guides(case, monkeypatch):
    as_with_the_newest_compiler(monkeypatch)
    name, kind, gpus = case
    batch = BATCH if kind == "strong" else PER_GPU[name] * gpus
    config = choice.neutral(load.load(ROOT / f"configs/{name}.yaml"), None)
    (point,) = scaling.points(config, "h100", [(gpus, batch)])
    guides.hold("scaling", in_words(case), point._asdict())


def test_rows_and_assumptions_shown_in_the_guides():
    guides.hold_rows("scaling", [in_words(row) for row in ROWS])
    for what, value, source in scaling.assumptions("h100"):
        guides.hold("assumptions", what, {"value": value, "source": source})
    guides.hold_rows("assumptions", [what for what, _, _ in scaling.assumptions("h100")])


# MFU of GPT-3 175B with 1,152 sequences on H100s: README of Megatron-LM, which gives neither their length (here that of
# GPT-3) nor the layouts.
PUBLISHED = {96: 0.47, 4608: 0.42}


@pytest.mark.long
@pytest.mark.parametrize("gpus", PUBLISHED)
def test_strong_scaling_of_megatron_shown_in_the_guides(gpus, monkeypatch):
    as_with_the_newest_compiler(monkeypatch)
    keys = ["data.batch_size=1152", "data.seq_len=2048"]
    config = choice.neutral(load.load(ROOT / "configs/gpt3_175b.yaml", keys), None)
    (point,) = scaling.points(config, "h100", [(gpus, 1152)])
    guides.hold("megatron_scaling", f"{gpus}", point._asdict() | {"published_mfu": PUBLISHED[gpus]})
    assert 0.8 <= point.mfu / PUBLISHED[gpus] <= 1.1
