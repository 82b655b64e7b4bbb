"""FLOPs and bytes of the closed forms against programs for H100s, of layers that are in no loop.

XLA:CPU drops optimization barriers before it merges equal computations: where forward and backward of a layer are in
one computation, as of a single layer or layers written out, it gathers inputs over tensor once where other programs do
twice, and computes scores once where `selective` does twice.
"""

import pytest
from cases import case
from conftest import cover, needs_cuda_compiler

from nanotrain_jax.config import load
from nanotrain_jax.costs import communication, flops
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import on_gpus

SIZES = {"d_model": 256, "d_ff": 512, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024}
EXPERTS = {"num": 4, "top_k": 2, "d_ff": 256, "balance": "none", "first_dense": 1, "capacity": 4.0}
ONE_DENSE = {"num_layers": 5, "experts": EXPERTS}
OUT = {"unroll": True}
LORA = {"rank": 16}  # matmuls on GPUs pad ranks to a multiple of 8
OF_ATTENTION, OF_MLP = (LORA | {"targets": names} for names in (["q", "k", "v", "out"], ["up", "down"]))
SCALARS = 64  # bytes: loss, norm of the gradients


def stages(remat, **keys):
    return case("pipe 2 data 2 tensor 2", "llama", remat, ONE_DENSE, microbatches=4, **keys)


CASES = [
    (case("data 2 tensor 2", model=OUT), OF_MLP),
    (case("data 2 tensor 2", model=OUT), LORA),
    (case("data 2 tensor 2", "llama", "selective", OUT), OF_MLP),
    (case("data 2 tensor 2", "llama", "selective", {"num_layers": 1}), LORA),
    (case("data 2 tensor 2", model=OUT, overlap_tensor=True), OF_MLP),
    (case("data 2", zero=3, persist_below=64), LORA),
    (stages("none"), None),
    (stages("none"), OF_ATTENTION),
    (stages("selective"), OF_ATTENTION),
    (stages("none", schedule="zero_bubble"), OF_ATTENTION),
]


def in_words(case):
    layout, lora = case
    return f"{layout} {','.join((lora or {'targets': ['no adapters']}).get('targets', ['all']))}"


@needs_cuda_compiler
@pytest.mark.parametrize("layout_and_lora", cover([], CASES, in_words))
def test_flops_and_bytes_equal_the_closed_forms(layout_and_lora):
    layout, lora = layout_and_lora
    tree = layout.tree(train={"lora": lora}, precision={"compute": "bfloat16"}, data={"seq_len": 512})
    tree["model"] = SIZES | {
        key: tree["model"][key] for key in ("num_layers", "experts", "unroll") if key in tree["model"]
    }
    config = load.parse(tree)
    config = on_gpus(config, 0, "h100")
    program = compile_step(config, "h100")
    assert program["flops"] == pytest.approx(flops.step_flops(config), rel=1e-9)
    theory = {}
    for row in communication.communication(config):
        key = row["axis"], row["op"]
        theory[key] = theory.get(key, 0.0) + row["bytes_per_device"]
    found = {(row["axis"], row["op"]): row["bytes_per_device"] for row in program["collectives"]}
    for key in theory.keys() | found.keys():
        assert found.get(key, 0) == pytest.approx(theory.get(key, 0), abs=SCALARS), key
