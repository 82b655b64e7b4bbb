"""The decoder: published sizes, initialization of the papers, causality, float32 where it matters."""

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import LOSS, resolved, small
from flax import nnx

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import counts, flops
from nanotrain_jax.models import decoder as model
from nanotrain_jax.models import decoder_table, device_kernels
from nanotrain_jax.models.parameters import LAYERS

AXES = {"pipe": 1, "replica": 1, "data": 1, "context": 1, "tensor": 1}
GPT2 = {"family": "gpt2", "vocab_size": 50257, "max_seq_len": 1024}
LLAMA3 = {"family": "llama", "vocab_size": 128256, "num_kv_heads": 8, "rope_theta": 500000.0}
MISTRAL = {"family": "mistral", "vocab_size": 32000, "num_kv_heads": 8}
NEMO = {"vocab_size": 131072, "num_layers": 40, "d_model": 5120, "num_heads": 32, "head_dim": 128, "d_ff": 14336}
QWEN2_7B = {"vocab_size": 152064, "num_heads": 28, "num_kv_heads": 4, "d_ff": 18944}
QWEN3 = {"family": "qwen3", "vocab_size": 151936, "num_kv_heads": 8, "head_dim": 128}
GEMMA3_1B = {"family": "gemma3", "num_layers": 26, "d_model": 1152, "num_heads": 4, "num_kv_heads": 1}
GEMMA3_1B |= {"head_dim": 256, "d_ff": 6912, "sliding_window": 512}
QWEN3_06B = {"d_model": 1024, "num_layers": 28, "num_heads": 16, "tie_embeddings": True}
PUBLISHED = {  # Radford et al. 2019 as released; Llama 3, arXiv 2407.21783, as released; others: their model cards
    "GPT-2": (124_439_808, GPT2 | {"num_layers": 12, "d_model": 768, "num_heads": 12}),
    "GPT-2 medium": (354_823_168, GPT2 | {"num_layers": 24, "d_model": 1024, "num_heads": 16}),
    "GPT-2 large": (774_030_080, GPT2 | {"num_layers": 36, "d_model": 1280, "num_heads": 20}),
    "GPT-2 XL": (1_557_611_200, GPT2 | {"num_layers": 48, "d_model": 1600, "num_heads": 25}),
    "Llama-3-8B": (
        8_030_261_248,
        LLAMA3 | {"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 14336},
    ),
    "Llama-3-70B": (
        70_553_706_496,
        LLAMA3 | {"num_layers": 80, "d_model": 8192, "num_heads": 64, "d_ff": 28672},
    ),
    "Llama-3-405B": (
        405_853_388_800,
        LLAMA3 | {"num_layers": 126, "d_model": 16384, "num_heads": 128, "d_ff": 53248},
    ),
    "Mistral-7B": (7_241_732_096, MISTRAL | {"num_layers": 32, "d_model": 4096, "num_heads": 32}),
    "Mistral-Nemo": (12_247_782_400, MISTRAL | NEMO),
    "Qwen2-7B": (7_615_616_512, {"family": "qwen2", "num_layers": 28, "d_model": 3584} | QWEN2_7B),
    "Qwen3-0.6B": (596_049_920, QWEN3 | QWEN3_06B),
    "Gemma-3-1B": (999_885_952 + 26, GEMMA3_1B | {"vocab_size": 262144}),  # and which of 26 layers are local
    "Qwen3-8B": (8_190_735_360, QWEN3 | {"d_model": 4096, "num_layers": 36, "num_heads": 32}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    count, keys = PUBLISHED[name]
    config = resolve(load.parse({"model": keys}), AXES).model
    _, params = model.abstract(config)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) == count
    assert counts.parameters(config) == count


def test_matmul_parameters_and_flops_follow_the_formulas():
    config, _ = resolved(small("gpt2"))
    _, params = model.abstract(config.model)
    names = "q_DNH", "k_DKH", "v_DKH", "out_NHD", "up_DF", "down_FD", "embedding_VD"
    matmul = sum(p.size for path, p in jax.tree_util.tree_leaves_with_path(params) if path[-1].key in names)
    assert counts.matmul_parameters(config.model) == matmul
    per_token = flops.flops_per_token(config)
    assert per_token == {"full": 6 * matmul + 12 * 2 * 32 * 16, "causal": 6 * matmul + 6 * 2 * 32 * 16}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_initialization_is_normal_with_smaller_residual_projections(family):
    config, _ = resolved(small(family, model={"d_model": 128, "d_ff": 256, "num_layers": 8}))
    for path, p in jax.tree_util.tree_leaves_with_path(model.init(config.model, 0)):
        name = path[-1].key
        if name.startswith(("gain", "bias")):
            np.testing.assert_array_equal(p, 1.0 if name.startswith("gain") else 0.0)
        else:
            std = 0.02 / math.sqrt(2 * 8) if name in ("out_NHD", "down_FD") else 0.02
            assert float(p.std()) == pytest.approx(std, rel=0.05)
            assert abs(float(p.mean())) < 5 * std / math.sqrt(p.size)
            if path[0].key == "layers":
                assert not np.array_equal(p[0], p[1])  # layers have different values


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_decoder_has_the_parameters_of_its_table(family, tensor):
    config, _ = resolved(small(family))
    _, params = model.abstract(config.model, model.Split(size=tensor))
    shapes = {"/".join(k.key for k in path): p.shape for path, p in jax.tree_util.tree_leaves_with_path(params)}
    rows = decoder_table.table(config.model, tensor)
    assert shapes == {path: (2,) * (row.part == LAYERS) + row.shape for path, row in rows.items()}


def test_rows_of_the_table_with_the_same_name_have_the_same_rules():
    rules = {}
    for path, row in decoder_table.every_parameter().items():
        rules.setdefault(path.rpartition("/")[2], set()).add((row.decay, row.is_padded, row.is_partial))
    assert all(len(found) == 1 for found in rules.values())


def decoder(family, **keys):
    config, _ = resolved(small(family, model=keys))
    params = model.init(config.model, 0)
    return nnx.merge(graph(config), params), params


def graph(config):
    return nnx.split(nnx.eval_shape(lambda: model.Decoder(config.model, nnx.Rngs(0))), nnx.Param)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_equal_the_oracle(family):
    module, params = decoder(family)
    tokens = np.random.default_rng(0).integers(61, size=(2, 16))
    np.testing.assert_allclose(module(tokens), oracle.logits(params, tokens), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_position_sees_a_later_token(family):
    module, _ = decoder(family)
    tokens = np.random.default_rng(0).integers(61, size=(1, 16))
    changed = tokens.copy()
    changed[0, 9] = (tokens[0, 9] + 1) % 61
    one, two = module(tokens), module(changed)
    np.testing.assert_array_equal(one[:, :9], two[:, :9])
    assert not np.allclose(one[:, 9:], two[:, 9:])


def test_tied_embeddings_are_one_array():
    for tied in True, False:
        _, params = decoder("llama", tie_embeddings=tied)
        assert ("head_VD" in params["ends"]) is not tied


@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_bfloat16_logits_norms_and_loss_are_float32(family):
    config, _ = resolved(small(family))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model.init(config.model, 0))
    tokens = jnp.zeros((2, 16), jnp.int32)
    module = nnx.merge(graph(config), params)
    assert module(tokens).dtype == jnp.float32
    assert module.ends.embed(tokens).dtype == jnp.bfloat16
    assert module.ends.loss(module.ends.embed(tokens), tokens)[0].dtype == jnp.float32
    text = str(jax.make_jaxpr(module)(tokens))
    for operation in "exp", "rsqrt":  # of the softmax and of the norms
        lines = [line for line in text.splitlines() if re.search(rf"= {operation}\b", line)]
        assert lines
        assert all("f32[" in line.split("=")[0] for line in lines), lines


def test_loss_ignores_negative_targets():
    module, _ = decoder("llama")
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    targets = np.random.default_rng(0).integers(61, size=(2, 16)).astype(np.int32)
    log_p = np.asarray(jax.nn.log_softmax(module.ends.logits(x)))
    expected = -np.take_along_axis(log_p, targets[..., None], axis=-1)[0].sum()
    targets[1] = -1
    total, count = module.ends.loss(x, targets)
    assert int(count) == 16
    np.testing.assert_allclose(total, expected, **LOSS)


class Device(NamedTuple):
    platform: str
    compute_capability: str | None = None


@pytest.mark.parametrize(
    ("keys", "dtype", "device", "kernel"),
    [
        ({}, "bfloat16", Device("gpu", "9.0"), "cudnn"),
        ({}, "bfloat16", Device("cuda"), "cudnn"),
        ({}, "bfloat16", Device("gpu", "7.5"), "xla"),
        ({}, "bfloat16", Device("cpu"), "xla"),
        ({}, "float32", Device("gpu", "9.0"), "xla"),
        ({"num_heads": 1, "d_model": 256, "num_kv_heads": 1}, "bfloat16", Device("gpu", "9.0"), "xla"),
        ({"attention": "xla"}, "bfloat16", Device("gpu", "9.0"), "xla"),
    ],
)
def test_the_attention_kernel_is_chosen_by_its_requirements(keys, dtype, device, kernel):
    config, _ = resolved(small(model=keys))
    assert device_kernels.of_attention(config.model, jnp.dtype(dtype), device) == kernel


@pytest.mark.parametrize(
    ("seq_len", "multiple", "keys"),
    [
        (45, 2, {}),
        (50, 4, {"data": {"attend_across_documents": False}}),
        (52, 8, {"parallel": {"context": 2}}),
        (54, 2, {"parallel": {"context": 2, "context_attention": "ulysses"}}),
        (54, 2, {}),
    ],
)
def test_rows_that_flash_attention_cannot_cut_are_refused(seq_len, multiple, keys):
    """What XLA's compiler says for each, with jax 0.10.2: Unsupported sequence length Q 45, KV 45."""
    config = load.parse({**keys, "data": {"seq_len": seq_len} | keys.get("data", {})})
    if seq_len % multiple == 0:
        device_kernels.check_flash_rows(config)
        return
    with pytest.raises(ValueError, match=f"data.seq_len={seq_len} must be a multiple of {multiple} for flash"):
        device_kernels.check_flash_rows(config)


def test_layers_are_one_loop_for_any_number():
    sizes = []
    for layers in 2, 12:
        config, _ = resolved(small(model={"num_layers": layers}))
        _, params = model.abstract(config.model)
        structure = graph(config)

        def run(params, tokens, structure=structure):
            return nnx.merge(structure, params)(tokens)

        sizes.append(str(jax.make_jaxpr(run)(params, jnp.zeros((1, 16), jnp.int32))).count("\n"))
    assert sizes[0] == sizes[1]
