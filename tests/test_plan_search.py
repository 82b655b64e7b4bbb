"""The planner's search misses nothing, and holds what the user gave."""

import itertools
import re

import pytest
from planning import ROOT, small

from nanotrain_jax import plan
from nanotrain_jax.audit import hardware, memory
from nanotrain_jax.parallel import chart, schedule
from nanotrain_jax.planner import search
from nanotrain_jax.planner.estimate import estimate, link, margin
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_an_outline_takes_as_long_and_keeps_as_much_as_its_schedule(name):
    for P, M in ((2, 4), (4, 12), (8, 32)):
        C = 2 if name == "interleaved" else 1
        table, outline = schedule.make(name, P, M, C), chart.outline(name, P, M, C)
        assert outline.time(1.0 / C, 1.3 / C, 0.9 / C) == pytest.approx(chart.stats(table, 1.0, 1.3, 0.9).time)
        assert outline.slots == {what: buffer.count for what, buffer in schedule.buffers(table).items()}
        assert (outline.ticks, outline.weights) == (table.ticks, table.weight.shape[-1])


def test_links_are_those_that_a_group_of_devices_has():
    sizes = 2, 1, 4, 1, 8  # pipe, replica, data, context, tensor on 64 GPUs
    assert link(("tensor",), sizes, 8) == (8, 8)
    assert link(("data",), sizes, 8) == (4, 1)
    assert link(("data", "tensor"), sizes, 8) == (32, 8)
    assert link(("data",), (1, 1, 32, 1, 2), 8) == (32, 4)
    assert link(("data",), (1, 1, 32, 1, 2), 72) == (32, 32)
    assert link(("tensor",), (1, 1, 8, 1, 3), 8) == (3, 1)  # some groups of three lie on two hosts


def everything(config, gpus):
    """Every layout that can be asked for."""
    sizes = [d for d in range(1, gpus + 1) if gpus % d == 0]
    for pipe, replica, tensor in itertools.product(sizes, repeat=3):
        data = gpus // (pipe * replica * tensor)
        if pipe * replica * tensor * data != gpus:
            continue
        axes = {"pipe": pipe, "replica": replica, "data": data, "context": 1, "tensor": tensor}
        ways = itertools.product(range(4), schedule.SCHEDULES, (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), search.POLICIES)
        for zero, name, chunks, pieces, remat in ways:
            keys = {"zero": zero, "schedule": name, "chunks": chunks, "microbatches": pieces}
            try:
                yield resolve(config.replace("parallel", **keys).replace("memory", remat=remat), axes)
            except ValueError:
                continue


@pytest.mark.parametrize("taken", [0.75, 0.012])
def test_a_search_finds_what_trying_everything_finds(taken):
    """Within the 1% that count as equal; the second time little memory is left."""
    config = small()
    found = search.search(config, "h100", 8, taken)
    limit = taken * hardware.find("h100").memory_bytes
    fitting = [c for c in everything(config, 8) if sum(memory.peak(c)[1].values()) * (1 + margin(c)) <= limit]
    best = min(estimate(c, "h100").step_seconds for c in fitting)
    assert found.best[0].step_seconds <= 1.0101 * best
    assert all(e.fits and e.gpus == 8 for e in found.best)


def test_one_microbatch_is_tried_where_two_do_not_fit():
    """Several need float32 sums of the gradients, which few tokens do not make up for."""
    config = request.load(ROOT / "configs/llama3_8b.yaml", ["data.seq_len=512"])
    fixed = {"parallel.zero": 1, "parallel.data": 8}
    best = search.search(plan.neutral(config, None), "h100", 8, fixed=fixed).best[0]
    assert (best.config.parallel.microbatches, best.fits) == (1, True)


def test_what_the_user_gave_is_held():
    fixed = {"parallel.tensor": 2, "parallel.zero": 2, "memory.remat": "full", "parallel.microbatches": 4}
    found = search.search(small(), "h100", 8, fixed=fixed)
    assert found.best
    for e in found.best:
        p = e.config.parallel
        assert (p.tensor, p.zero, p.microbatches, e.config.memory.remat) == (2, 2, 4, "full")


def test_the_readme_shows_what_is_chosen_for_llama_on_one_host():
    found = search.search(plan.neutral(request.load(ROOT / "configs/llama3_8b.yaml"), None), "h100", 8)
    readme = (ROOT / "README.md").read_text()
    assert f"{found.tried} layouts estimated" in readme
    for e in found.best[:3]:
        assert f"{e.peak_bytes / 1e9:.1f}   {e.step_seconds:.3f}  {e.mfu:.1%}" in readme
    assert f"{found.rejected['needs more memory than there is']}  needs more memory" in readme


def test_rejected_layouts_have_reasons():
    config = small(batch=24)
    found = search.search(config, "h100", 16, 0.003)
    assert found.rejected["needs more memory than there is"]
    assert found.rejected["data.batch_size is not divisible by replica x data"]
    assert found.rejected["parallel.tensor over more than the 8 GPUs that NVLink joins"]
    assert found.rejected["parallel.pipe=16 does not divide model.num_layers=8"]


def test_what_fits_nowhere_is_told_by_how_much_and_what_would_help():
    config = plan.neutral(request.load(ROOT / "configs/llama3_70b.yaml"), None)
    found = search.search(config, "h100", 8)
    assert not found.best
    text = search.why_nothing_fits(found, "h100", 8, 0.75, {})
    assert re.search(r"needs \d+\.\d GB of 63\.7, most of it .*; what would do: .*GPUs \(", text)
