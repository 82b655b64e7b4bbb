"""A mixture of experts in every layout: loss, gradients and state of the dense oracle, which masks all experts, and
adds the losses that balance them."""

import oracle
import pytest
from cases import case
from conftest import cover, equals_the_oracle

MIXTURE = {"experts": {"num": 4, "top_k": 2, "d_ff": 64, "balance": "none"}}
SHARED = {"experts": {"num": 8, "top_k": 3, "d_ff": 64, "shared": 1, "router": "sigmoid"}}
SHARED["experts"] |= {"balance_weight": oracle.BALANCE, "z_loss": oracle.Z}

DENSE = {"num_layers": 4, "d_ff": 96, "experts": SHARED["experts"] | {"first_dense": 2}}
MANY_DENSE = {"num_layers": 9, "d_ff": 96, "experts": SHARED["experts"] | {"first_dense": 4}}

CASES = [
    case("data 2 tensor 2 pipe 2", model=DENSE, zero=3, microbatches=2, persist_below=64),
    case("data 2 tensor 2 pipe 2", model=SHARED, zero=3, microbatches=2, persist_below=64),
    case("data 2 context 2 tensor 2", remat="selective", model=MIXTURE, zero=2, sequence_parallel=False),
    *(case(f"data {n}", model=MIXTURE, zero=zero, persist_below=64) for n, zero in ((1, 0), (8, 0), (4, 1), (2, 3))),
    *(case("data 2", model=SHARED, remat=remat, zero=3) for remat in ("selective", "full", "block:2")),
    case("replica 2 data 2", model=SHARED, zero=1, grad_reduce="per_layer", microbatches=2),
    case("data 2", model=SHARED, zero=3, prefetch=True, microbatches=2),
    case("tensor 4", model=SHARED, remat="full"),
    case("tensor 2 context 2", model=SHARED, context_attention="ulysses"),
    case("pipe 2 tensor 2", model=MIXTURE, schedule="zero_bubble", microbatches=4, zero=0),
    case("pipe 2 data 2", model=SHARED, schedule="gpipe", microbatches=4, zero=2, remat="full"),
    case("pipe 2 context 2 data 2", model=SHARED, context_attention="gather", microbatches=4, vocab_over_pipe=True),
    case("pipe 2", model=SHARED, idle="mask", microbatches=2),
    *(case("data 2", model=DENSE, remat=remat, zero=3) for remat in ("none", "selective", "full", "block:2")),
    case("data 4 expert 2", model=DENSE | {"experts": DENSE["experts"] | {"capacity": 8.0}}, zero=1),
    case("data 2 context 2 tensor 2", model=DENSE, zero=2, sequence_parallel=False),
    case("data 2", model=DENSE, zero=1, grad_reduce="per_layer", microbatches=2),
    case("data 2", model=DENSE, zero=3, prefetch=True, microbatches=2),
    case("pipe 2 data 2", model=DENSE, schedule="zero_bubble", microbatches=4, zero=2),
    case("pipe 2 data 2", model=DENSE, schedule="1f1b", microbatches=4, grad_reduce="per_layer"),
    case("pipe 2", model=DENSE, idle="mask", microbatches=2),
    case("pipe 4", model=MANY_DENSE, microbatches=4),  # the first stage has no layer of the mixture
    case("pipe 2 data 2", model=MANY_DENSE, schedule="zero_bubble", microbatches=4, zero=3),
]


@pytest.mark.parametrize("case", cover([], CASES, str))
def test_layouts_equal_the_dense_oracle(case, expected):
    equals_the_oracle(case.tree(), expected)


@pytest.mark.parametrize("case", cover([], [case("data 2 pipe 2", model=MIXTURE, microbatches=2)], str))
def test_documents_are_kept_apart(case, expected):
    equals_the_oracle(case.tree(data={"attend_across_documents": False}), expected)
