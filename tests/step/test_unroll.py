"""Layers written out (model.unroll): the numbers of one device, no loop over layers, the bytes of the papers."""

import re

import pytest
from cases import case
from conftest import built, compiled_text, cover, equals_the_oracle, small
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.config import load
from nanotrain_jax.config.execution import writes_layers_out

OUT = {"unroll": True}
COVER = [
    case("data 2 tensor 2", "llama", "full", OUT, zero=3, microbatches=1, persist_below=64),
]
MORE = [
    case("data 2", "gpt2", "none", OUT, zero=0, microbatches=1, grad_reduce="per_layer"),
    case("data 2", "gpt2", "block:2", OUT | {"num_layers": 4}, zero=0, microbatches=2),
    case("data 1", "llama", "none", OUT, microbatches=1),
    case("data 2", "llama", "none", OUT, zero=3, microbatches=2, persist_below=64),
    case("data 4", "gpt2", "selective", OUT, zero=2, microbatches=1, persist_below=64),
    case("tensor 4", "llama", "selective", OUT, zero=1, microbatches=2),
    case("data 2 context 2", "llama", "full", OUT, zero=3, microbatches=1, persist_below=64),
    case("data 4", "gpt2", "none", OUT, zero=1, microbatches=2, grad_reduce="per_layer"),
    case("data 2 tensor 2", "gpt2", "full", OUT, zero=2, microbatches=1, sequence_parallel=False),
]


@pytest.mark.parametrize("case", cover(COVER, MORE, str))
def test_layers_written_out_equal_the_oracle_and_move_the_bytes_of_the_papers(case, expected):
    equals_the_oracle(case.tree(), expected)
    if case.parallel.get("zero", 0) < 3:  # without loops XLA:CPU gathers once for the forward and the backward
        moves_the_bytes_of_the_papers(case.tree())


def trips(unroll):
    """How often each loop of the compiled step runs."""
    tree = case("data 2", "llama", "none", {"unroll": unroll, "num_layers": 3}, zero=1).tree()
    return re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', compiled_text(built(tree)))


def test_layers_written_out_are_in_no_loop():
    assert "3" in trips(False)
    assert "3" not in trips(True)


@pytest.mark.parametrize(
    ("platform", "keys", "is_written_out"),
    [
        ("gpu", {}, True),
        ("cpu", {}, False),
        ("cpu", {"model": {"unroll": True}}, True),
        ("gpu", {"model": {"unroll": False}}, False),
        ("gpu", {"model": {"num_layers": 49}}, False),
        ("gpu", {"model": {"d_model": 4096}}, False),
        ("gpu", {"model": {"d_model": 4096}, "parallel": {"zero": 3}}, True),
        ("gpu", {"parallel": {"pipe": 2}}, False),
        ("gpu", {"memory": {"offload_activations": "host", "remat": "full"}}, False),
    ],
)
def test_by_default_up_to_48_layers_are_written_out_on_gpus(platform, keys, is_written_out):
    tree = small(**{section: values for section, values in keys.items() if section != "model"})
    tree["model"] |= {"unroll": "auto"} | keys.get("model", {})
    assert writes_layers_out(load.parse(tree), platform) is is_written_out
