"""The planner's search finds the best layout, and keeps the keys the user fixed."""

import itertools
import re
from collections import Counter

import guides
import pytest
from conftest import cover
from planning import ROOT, as_with_the_newest_compiler, small

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import hardware, memory
from nanotrain_jax.parallel.pipeline import schedule, schedule_text, slots
from nanotrain_jax.planner import choice, layouts, search
from nanotrain_jax.planner.compute_time import matmuls_time
from nanotrain_jax.planner.estimate import estimate, margin
from nanotrain_jax.planner.step_time import link, tensor_hops_time, times


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_an_outline_has_the_time_and_slots_of_its_schedule(name):
    for P, M in ((2, 4), (4, 12), (8, 32)):
        C = 2 if name == "interleaved" else 1
        table, outline = schedule.make(name, P, M, C), schedule_text.outline(name, P, M, C)
        assert outline.time(1.0 / C, 1.3 / C, 0.9 / C) == pytest.approx(schedule_text.stats(table, 1.0, 1.3, 0.9).time)
        assert outline.slots == {what: buffer.count for what, buffer in slots.buffers(table).items()}
        assert (outline.ticks, outline.weights) == (table.ticks, table.weight.shape[-1])


def test_group_size_and_devices_per_nvlink_domain():
    sizes = 2, 1, 4, 1, 1, 8  # pipe, replica, data, expert, context, tensor on 64 GPUs
    assert link(("tensor",), sizes, 8) == (8, 8)
    assert link(("data",), sizes, 8) == (4, 1)
    assert link(("data", "tensor"), sizes, 8) == (32, 8)
    assert link(("expert",), (1, 1, 4, 8, 1, 2), 8) == (8, 4)
    assert link(("data",), (1, 1, 32, 1, 1, 2), 8) == (32, 4)
    assert link(("data",), (1, 1, 32, 1, 1, 2), 72) == (32, 32)
    assert link(("tensor",), (1, 1, 8, 1, 1, 3), 8) == (3, 1)  # some groups of three span two hosts


def valid_layouts(config, gpus):
    """Yield every valid layout."""
    sizes = [d for d in range(1, gpus + 1) if gpus % d == 0]
    for pipe, replica, tensor in itertools.product(sizes, repeat=3):
        data = gpus // (pipe * replica * tensor)
        if pipe * replica * tensor * data != gpus:
            continue
        axes = {"pipe": pipe, "replica": replica, "data": data, "context": 1, "tensor": tensor}
        ways = itertools.product(range(4), schedule.SCHEDULES, (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), search.POLICIES)
        for zero, name, chunks, microbatches, remat in ways:
            keys = {"zero": zero, "schedule": name, "chunks": chunks, "microbatches": microbatches}
            try:
                yield resolve(config.replace("parallel", **keys).replace("memory", remat=remat), axes)
            except ValueError:
                continue


@pytest.mark.parametrize("case", cover([], [(4, 0.75), (8, 0.75), (8, 0.012)]))
def test_a_search_matches_an_exhaustive_search(case):
    """Within the 1% that rank as equal; the last case has little memory."""
    gpus, memory_fraction = case
    config = small()
    found = search.search(config, "h100", gpus, memory_fraction)
    limit = memory_fraction * hardware.find("h100").memory_bytes
    fitting = [c for c in valid_layouts(config, gpus) if sum(memory.peak(c)[1].values()) * (1 + margin(c)) <= limit]
    best = min(estimate(c, "h100").step_seconds for c in fitting)
    assert found.best[0].step_seconds <= 1.0101 * best
    assert all(e.fits and e.gpus == gpus for e in found.best)


def test_one_microbatch_is_tried_if_two_do_not_fit():
    """Several accumulate gradients in float32, which costs more than smaller microbatches save with few tokens."""
    config = load.load(ROOT / "configs/llama3_8b.yaml", ["data.seq_len=512"])
    fixed = {"parallel.zero": 1, "parallel.data": 8}
    best = search.search(choice.neutral(config, None), "h100", 8, fixed=fixed).best[0]
    assert (best.config.parallel.microbatches, best.fits) == (1, True)


def test_fixed_keys_are_kept():
    fixed = {"parallel.tensor": 2, "parallel.zero": 2, "memory.remat": "full", "parallel.microbatches": 4}
    found = search.search(small(), "h100", 8, fixed=fixed)
    assert found.best
    for e in found.best:
        p = e.config.parallel
        assert (p.tensor, p.zero, p.microbatches, e.config.memory.remat) == (2, 2, 4, "full")


def test_the_choice_for_llama_on_one_host_shown_in_the_guides(monkeypatch):
    as_with_the_newest_compiler(monkeypatch)
    found = search.search(choice.neutral(load.load(ROOT / "configs/llama3_8b.yaml"), None), "h100", 8)
    counts = {"tried": found.tried, "too_large": found.rejected["needs more memory than there is"]}
    guides.hold("llama3_8b", "counts", counts)
    for rank, e in enumerate(found.best[:5], 1):
        values = {"layout": search.describe(e.config), "peak_bytes": e.peak_bytes}
        guides.hold("llama3_8b", f"{rank}", values | {"step_seconds": e.step_seconds, "mfu": e.mfu})


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2_124m", "data.batch_size=256 parallel.microbatches=16"),
        ("gpt2_124m", "data.batch_size=16 parallel.microbatches=8 model.vocab_size=1000"),
        ("llama3_8b", "data.batch_size=16 parallel.microbatches=8"),
        ("llama3_8b", "data.batch_size=16 parallel.microbatches=8 data.seq_len=64 model.vocab_size=4000"),
        ("llama3_8b", "data.batch_size=16 parallel.microbatches=8 parallel.schedule=interleaved parallel.chunks=8"),
    ],
)
def test_vocab_over_pipe_is_by_default_what_the_costs_favor(name, overrides):
    keys = ["parallel.pipe=4", "parallel.data=2", *overrides.split()]
    found = {}
    for value in ("null", "true", "false"):
        config = load.load(ROOT / f"configs/{name}.yaml", [*keys, f"parallel.vocab_over_pipe={value}"])
        config = resolve(config, config.parallel.axes)
        found[value] = config.parallel.vocab_over_pipe, estimate(config, "h100").step_seconds
    assert (found["true"][0], found["false"][0]) == (True, False)
    assert found["null"][1] <= 1.01 * min(found["true"][1], found["false"][1])  # within 1% rank as equal


def test_rejected_layouts_have_reasons():
    config = small(batch=24)
    found = search.search(config, "h100", 16, 0.003)
    assert found.rejected[search.Rejection.MEMORY]
    assert found.rejected[search.Rejection.BATCH]
    assert found.rejected["parallel.tensor is larger than an NVLink domain of 8 GPUs"]
    assert found.rejected["parallel.pipe=16 exceeds model.num_layers=8: each chunk needs a layer"]


def test_as_many_devices_share_experts_as_divide_both():
    mixture, dense = (load.load(ROOT / f"configs/{name}.yaml") for name in ("mixtral_8x7b", "llama3_8b"))
    for data, inside, sizes in ((16, 8, [1, 8]), (16, 4, [1, 4, 8]), (6, 8, [1, 2]), (1, 8, [1])):
        assert layouts.expert_sizes(mixture, data, inside) == sizes
        assert layouts.expert_sizes(dense, data, inside) == [1]


def test_layouts_without_an_exchange_have_no_ragged_one():
    config = load.load(ROOT / "configs/moe_16b.yaml", ["parallel.expert_exchange=ragged", "parallel.microbatches=1"])
    found = [*layouts.meshes(choice.neutral(config, None), "h100", 64, {}, Counter())]
    assert {(mesh.parallel.expert > 1, mesh.parallel.expert_exchange) for mesh in found} == {
        (True, "ragged"),
        (False, "padded"),
    }
    layout = {"parallel": {"data": 64, "expert": 1}, "memory": {"remat": "full"}}
    assert choice.adopted(config, layout).parallel.expert_exchange == "padded"


def test_experts_take_at_least_as_long_as_their_weights_are_read():
    keys = [
        "parallel={data: 1}",
        "data.batch_size=1",
        "data.seq_len=512",
        "parallel.microbatches=1",
        "model.loss_chunk=0",
    ]
    config = resolve(load.load(ROOT / "configs/moe_16b.yaml", keys), {"data": 1})
    gpu = hardware.find("h100")
    weights = 2 * 2048 * 1408 * (64 + 2)  # bytes of w_down of a layer
    assert matmuls_time(config, gpu)["down"] > weights / gpu.memory_bandwidth


def test_activations_hop_behind_attention_and_mlps_not_behind_experts():
    sizes = {"tensor": 8, "pipe": 1, "chunks": 1, "schedule": "1f1b", "expert": 1, "data": 1}
    split = tuple(f"parallel.{key}={value}" for key, value in sizes.items())

    def behind(*keys):
        config = load.load(ROOT / "configs/mixtral_8x7b.yaml", (*split, "parallel.overlap_tensor=true", *keys))
        return tensor_hops_time(resolve(config, config.parallel.axes), hardware.find("h100"))

    plain, layers = behind(), 32
    assert behind("model.experts.d_ff=28672") == plain
    one_dense = behind("model.experts.first_dense=1", "model.d_ff=14336")
    assert plain * (1 + 1 / layers) < one_dense < plain * (1 + 8 / layers)

    def exposed(overlap):
        config = load.load(ROOT / "configs/mixtral_8x7b.yaml", (*split, f"parallel.overlap_tensor={overlap}"))
        return times(resolve(config, config.parallel.axes), hardware.find("h100"))[0]["tensor"]

    assert 1 / 3 < exposed("true") / exposed("false") < 1


def test_without_a_fit_the_error_has_the_excess_and_remedies():
    config = choice.neutral(load.load(ROOT / "configs/llama3_70b.yaml"), None)
    found = search.search(config, "h100", 8)
    assert not found.best
    text = search.why_nothing_fits(found, "h100", 8, 0.75, {})
    assert re.search(r"needs \d+\.\d GB of 63\.7, most of it .*; would fit with .*GPUs \(", text)


def test_a_batch_that_grows_may_be_searched():
    keys = "train.noise_scale=true", "train.batch_growth={batch_size: 4, every: 25}", "data.batch_size=64"
    config = load.load(ROOT / "configs/gpt2_124m.yaml", keys)
    best = search.search(choice.neutral(config, 50304), "h100", 8).best
    assert best
    for found in best:  # what train would take
        resolve(load.parse(found.config.to_dict()), found.config.parallel.axes, 50304)
        assert 4 % (found.config.data.batch_size // found.config.parallel.microbatches) == 0


@pytest.mark.parametrize("keys", [["train.noise_scale=true"], ["train.batch_schedule=[{steps: 5, batch_size: 16}]"]])
def test_a_layout_suits_the_batches_of_a_run(keys):
    config = load.load(ROOT / "configs/gpt2_124m.yaml", [*keys, "data.batch_size=64"])
    for found in search.search(choice.neutral(config, 50304), "h100", 1).best:
        resolve(load.parse(found.config.to_dict()), found.config.parallel.axes, 50304)
        assert found.config.parallel.microbatches > 1
