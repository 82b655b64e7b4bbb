"""The closed forms of a mixture of experts against compiled programs: FLOPs, bytes of each collective, state."""

import math

import jax
import pytest
from cases import case
from closed_forms import has_flops_and_bytes_of_the_closed_forms
from conftest import cover, resolved

from nanotrain_jax.costs import counts, memory
from nanotrain_jax.models import decoder
from nanotrain_jax.step import build as steps

EXPERTS = {"experts": {"num": 8, "top_k": 2, "d_ff": 64, "shared": 1}}
DENSE = {"num_layers": 4, "d_ff": 96, "experts": EXPERTS["experts"] | {"first_dense": 2}}
ONE = DENSE | {"num_layers": 3, "experts": EXPERTS["experts"] | {"first_dense": 1}}
SCALARS = 64  # bytes: loss, norm of the gradients


def mixture(layout, remat="none", model=EXPERTS, **parallel):
    return case(layout, "llama", remat, model, persist_below=100, **parallel)


FIRST = [mixture("data 4 expert 2", "selective", DENSE, zero=3, microbatches=2)]
MORE = [
    mixture("data 2 expert 2 tensor 2 pipe 2", "full", DENSE, zero=3, microbatches=2),
    mixture("data 4 expert 2", "selective", zero=3, microbatches=2),
    mixture("data 2 expert 2 tensor 2 pipe 2", "full", zero=3, microbatches=2),
    mixture("data 2 tensor 2 pipe 2", "full", zero=2, microbatches=2),
    *(mixture("data 1", remat) for remat in ("none", "selective", "full", "block:2")),
    *(mixture("data 2", zero=zero) for zero in (1, 2, 3)),
    *(mixture("data 2", remat, zero=3) for remat in ("selective", "full")),
    *(mixture("tensor 2", remat) for remat in ("none", "selective", "full", "block:2")),
    mixture("tensor 2", sequence_parallel=False),
    mixture("pipe 2", microbatches=4, schedule="zero_bubble"),
    *(mixture("data 4 expert 2", remat) for remat in ("none", "selective", "full", "block:2")),
    *(mixture("data 4 expert 2", zero=zero) for zero in (1, 2, 3)),
    mixture("replica 2 data 2 expert 2", zero=3, microbatches=2),
    mixture("pipe 2 data 2 expert 2", microbatches=4, schedule="zero_bubble"),
    *(mixture("data 4 expert 2", remat, DENSE) for remat in ("none", "selective", "full", "block:2")),
    *(mixture("data 4 expert 2", model=DENSE, zero=zero) for zero in (1, 2)),
    mixture("data 4 expert 2", "block:2", DENSE, zero=3, microbatches=2),
    mixture("data 2 tensor 2", "full", DENSE, grad_reduce="per_layer"),
    mixture("tensor 2", model=DENSE, sequence_parallel=False),
    mixture("context 2 data 2", model=DENSE, context_attention="ulysses"),
    mixture("data 2 pipe 2", model=DENSE, zero=2, microbatches=4, schedule="zero_bubble"),
    mixture("data 2 context 2 pipe 2", model=DENSE, context_attention="ulysses", microbatches=2),
    mixture("data 2 tensor 2 pipe 2", "selective", DENSE, sequence_parallel=False, microbatches=2),
    mixture(
        "data 2 tensor 2 pipe 2",
        "full",
        ONE,
        zero=3,
        microbatches=2,
    ),
    mixture("data 2", model=DENSE, zero=3, prefetch=True, microbatches=2),
    *(mixture("replica 2 data 2 expert 2", compress=how, zero=2) for how in ("topk:0.01", "int8")),
    mixture("replica 2 data 4 expert 2", compress="randomk:0.1", zero=3, microbatches=2),
    mixture("data 2 pipe 2", "block:2", DENSE | {"num_layers": 6}, zero=3, microbatches=2),
    *(mixture("tensor 4", remat, DENSE, overlap_tensor=True) for remat in ("none", "selective", "full", "block:2")),
    mixture("data 2 expert 2 tensor 2", overlap_tensor=True, zero=3, microbatches=2),
    mixture("data 2 tensor 2", "block:2", overlap_tensor=True, zero=3, prefetch=True),
]


@pytest.mark.parametrize("case", cover(FIRST, MORE, str))
def test_flops_bytes_and_state_equal_the_closed_forms(case):
    config, mesh = resolved(case.tree())
    step = steps.build(config, mesh)
    has_flops_and_bytes_of_the_closed_forms(step, SCALARS)
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.state)]
    assert sum(local) == pytest.approx(sum(memory.state(config).values()), abs=SCALARS)


def test_parameters_and_flops_are_the_published_ones():
    """Mixtral 8x7B (arXiv 2401.04088): 47 billion parameters, of which 13 billion are used for a token."""
    tree = {"num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000, "d_ff": None}
    tree |= {"experts": {"num": 8, "top_k": 2, "d_ff": 14336}}
    config, _ = resolved({"model": tree, "data": {"source": "synthetic", "batch_size": 1}, "parallel": {"data": 1}})
    assert counts.parameters(config.model) == 46_702_792_704
    embedding = 32000 * 4096
    assert counts.matmul_parameters(config.model) == 12_879_925_248 - embedding - 65 * 4096  # norms
    shapes = jax.eval_shape(lambda: decoder.init(config.model, 0))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == 46_702_792_704
