"""Plans of long contexts: what moves, what is chosen, how fast."""

import json
import re

import pytest
import yaml
from conftest import ROOT

from nanotrain_jax import plan
from nanotrain_jax.config import load
from nanotrain_jax.costs import hardware
from nanotrain_jax.costs.traffic import Traffic
from nanotrain_jax.planner import choice, search
from nanotrain_jax.planner.estimate import estimate, on_gpus
from nanotrain_jax.planner.overlap import last_hop
from nanotrain_jax.planner.step_time import LINK

CONFIG = ROOT / "configs" / "llama3_8b_128k.yaml"


def planned(gpus, *overrides):
    return estimate(on_gpus(load.load(CONFIG, list(overrides)), gpus, "h100"), "h100")


def attention_bytes(kind, context, kv_heads):
    keys = f"parallel.context={context}", f"parallel.context_attention={kind}", f"model.num_kv_heads={kv_heads}"
    e = planned(context, *keys, "memory.remat=selective")
    traffic = Traffic.ATTENTION, Traffic.HEADS
    return sum(t.bytes for t in e.transfers if t.what in traffic)


@pytest.mark.parametrize("kv_heads", [2, 8, 32])
def test_ulysses_moves_less_than_the_ring_with_many_devices_or_key_heads(kv_heads):
    """Forward alone: c > 1 + N / K, for c <= K. The ring's backward sends float32 gradients too."""
    for context in (2, 4, 8, 16, 32):
        ring, gather, ulysses = (attention_bytes(kind, context, kv_heads) for kind in ("ring", "gather", "ulysses"))
        assert gather < ring  # the gradients of the ring make one hop more
        if 1 + 32 / kv_heads < context <= kv_heads:
            assert ulysses < gather


def test_a_search_splits_long_rows_only():
    def best(*overrides):
        config = load.load(CONFIG, ["parallel.data=-1", *overrides])
        return search.search(choice.neutral(config, None), "h100", 8).best

    long = best()
    assert long[0].fits and long[0].config.parallel.context > 1
    stages = [e.config.parallel for e in long if e.config.parallel.pipe > 1 and e.config.parallel.context > 1]
    assert {p.context_attention for p in stages} <= {"gather", "ulysses"}
    assert {e.config.parallel.context for e in best("data.seq_len=8192")} == {1}


def test_a_chosen_context_is_written_and_plans_the_same(tmp_path):
    chosen, first, again = (tmp_path / name for name in ("chosen.yaml", "first.json", "again.json"))
    fixed = "parallel.context=8", "parallel.context_attention=ulysses"
    arguments = ["--config", str(CONFIG), "--gpus", "8", "--choose", "--write", str(chosen), "--json", str(first)]
    assert plan.main([*arguments, *fixed]) == 0
    assert plan.main(["--config", str(chosen), "--json", str(again)]) == 0
    first, again = (json.loads(file.read_text()) for file in (first, again))
    assert first["mesh"]["context"] == 8
    assert first["context_attention"] == "ulysses"
    assert {key: first[key] for key in ("mesh", "context_attention", "estimate")} == {
        key: again[key] for key in ("mesh", "context_attention", "estimate")
    }


def test_gather_beyond_the_memory_says_what_works(tmp_path, capsys):
    tree = yaml.safe_load(CONFIG.read_text())
    tree["parallel"] |= {"context_attention": "gather", "microbatches": 2}
    tree["data"] |= {"seq_len": 425_984, "batch_size": 2}
    (tmp_path / "gather.yaml").write_text(yaml.safe_dump(tree))
    assert plan.main(["--config", str(tmp_path / "gather.yaml")]) == 1
    out = capsys.readouterr().out
    assert "does not fit: peak memory" in out
    assert re.search(r"--choose finds .*\(ulysses\).*: fits in \d\d\.\d GB", out)


def test_the_ring_hides_all_but_the_last_hop_where_a_device_has_enough_tokens():
    """A hop hides if T/c >= 2 K/N FLOP/s / bytes/s: 714 tokens on NVLink at 500 TFLOP/s with 4 query heads per key."""
    for context, tokens in ((8, 131_072), (8, 8 * 2048)):
        e = planned(context, f"parallel.context={context}", f"data.seq_len={tokens}")
        (hops,) = (t for t in e.transfers if t.what is Traffic.ATTENTION)
        assert hops.exposed == pytest.approx(hops.seconds * last_hop(e.config))
    e = planned(8, "data.seq_len=2048", "model.loss_chunk=0")
    (hops,) = (t for t in e.transfers if t.what is Traffic.ATTENTION)
    assert hops.exposed > 0.5 * hops.seconds


def test_long_contexts_keep_the_flop_rate_of_short_ones():
    """NeMo's own ratio, Llama-3-8B on B200: 1,588 TFLOP/s at 128K tokens, 1,671 at 8K: 0.95 of it."""
    same_tokens = ["data.seq_len=8192", "data.batch_size=128", "parallel.context=1", "parallel.data=8"]
    short, long = planned(8, *same_tokens), planned(8)
    assert long.mfu_causal >= 0.95 * short.mfu_causal


def test_a_ring_across_hosts_waits_for_the_adapter_between_two_of_them():
    """2,048 tokens per GPU hide a hop on NVLink, not on a network of 50 GB/s, which needs 5,000."""
    network = hardware.find("h100").network
    for tokens, is_hidden in ((64 * 2048, False), (64 * 16_384, True)):
        e = planned(64, "parallel.context=64", f"data.seq_len={tokens}")
        (hops,) = (t for t in e.transfers if t.what is Traffic.ATTENTION)
        assert hops.seconds == pytest.approx(hops.bytes / (LINK * network))
        assert (hops.exposed == pytest.approx(hops.seconds * last_hop(e.config))) == is_hidden
