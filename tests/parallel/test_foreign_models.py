"""Foreign models, sharded by rules, train as on one device."""

import importlib.util
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT, cover
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nanotrain_jax import FLAX, HUGGING_FACE_LLAMA, Rules, as_varying, column, optimizer_specs, shard, specs, zero_specs
from nanotrain_jax.parallel import mesh as meshes

V, D, F, N, T = 64, 32, 64, 4, 8

# Three models independent of this package: a Linen transformer, an NNX one with Hugging Face's names, a dict of arrays.


def causal(q, k, v):  # [B T N H] -> [B T D]
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*q.shape[:2], D)


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(V, D)(tokens)
        for i in range(2):
            h = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=N)(h, mask=linen.make_causal_mask(tokens))
            h = linen.Dense(F, name=f"up_{i}")(linen.LayerNorm()(x))
            x = x + linen.Dense(D, name=f"down_{i}")(jax.nn.gelu(h))
        return linen.Dense(V, use_bias=False, name="lm_head")(linen.LayerNorm()(x))


class SelfAttention(nnx.Module):
    def __init__(self, rngs):
        linears = (nnx.Linear(D, D, use_bias=False, rngs=rngs) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears

    def __call__(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], N, D // N) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(causal(q, k, v))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.gate_proj, self.up_proj = (nnx.Linear(D, F, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.input_layernorm, self.post_attention_layernorm = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.self_attn, self.mlp = SelfAttention(rngs), Mlp(rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NnxLlama(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens, self.norm = nnx.Embed(V, D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def linen_model():
    model = LinenTransformer()
    return model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32)), model.apply, FLAX


def nnx_model():
    graph, params = nnx.split(NnxLlama(nnx.Rngs(0)))
    return params, lambda params, tokens: nnx.merge(graph, params)(tokens), HUGGING_FACE_LLAMA


def plain_model():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return 0.1 * jax.random.normal(next(keys), shape)

    blocks = [{"qkv": normal(3, D, N, D // N), "w1": normal(D, F), "w2": normal(F, D)} for _ in range(2)]

    def apply(params, tokens):
        x = params["table"][tokens]
        for block in params["blocks"]:
            x = x + causal(*jnp.einsum("BTD,iDNH->iBTNH", x, block["qkv"]))
            x = x + jnp.tanh(x @ block["w1"]) @ block["w2"]
        return params["scale"] * x @ params["table"].T

    rules = Rules(
        [
            ("table", "V/tensor D"),
            ("qkv", "three D N/tensor H"),
            ("blocks/[0-9]+/w1", "D F/tensor"),
            ("w2", "F/tensor D"),
        ]
    )
    return {"table": normal(V, D), "blocks": blocks, "scale": jnp.ones(())}, apply, rules


def three_steps(params, apply, placed=None, batch_on=None):
    """-> losses, and parameters after three steps of SGD with momentum under plain jax.jit."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    tokens = jax.random.randint(jax.random.key(1), (3, 8, T + 1), 0, V)

    def step(params, opt, tokens):
        def mean_loss(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, tokens[:, :-1]), tokens[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    losses, out = [], placed and (*placed, None)
    opt = jax.jit(optimizer.init, out_shardings=placed and placed[1])(params)
    step = jax.jit(step, out_shardings=out)
    for batch in tokens:
        params, opt, loss = step(params, opt, jax.device_put(batch, batch_on))
        losses.append(float(loss))
    return losses, params, opt


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("model", cover([nnx_model], [plain_model, linen_model], attrgetter("__name__")))
def test_a_foreign_model_trains_on_eight_devices_as_on_one(model):
    params, apply, rules = model()
    expected = three_steps(params, apply)

    mesh = meshes.make(data=4, tensor=2)
    by_rules = specs(rules, params, mesh)
    weights, shards = zero_specs(params, mesh, 3, persist_below=100, specs=by_rules)
    opt = optimizer_specs(optax.sgd(0.1, momentum=0.9), params, shards)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (weights, opt))
    found = three_steps(shard(params, mesh, weights), apply, placed, NamedSharding(mesh, P("data")))

    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[1], expected[1])
    for tree in found[1:]:  # weights and momentum of large arrays are sharded in eighths
        for x in jax.tree.leaves(tree):
            if x.size >= 1000:
                assert x.addressable_shards[0].data.size == x.size // 8


@pytest.mark.long
def test_the_example_that_shards_a_foreign_model_runs(capsys):
    path = ROOT / "scripts" / "examples" / "shard_your_model.py"
    spec = importlib.util.spec_from_file_location("shard_your_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        script.main()
    alone, together = (line.split() for line in capsys.readouterr().out.splitlines() if "losses" in line)
    np.testing.assert_allclose([float(x) for x in alone[-3:]], [float(x) for x in together[-3:]], rtol=1e-4)
    held = [int(line[2].replace(",", "")) for line in (alone, together)]  # parameters and moments
    assert held[0] > 3 * 4 * 200_000
    assert held[1] < held[0] / 7  # all but norms and biases are sharded in eighths


OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3))),
    "every second": optax.MultiSteps(optax.adamw(1e-3), 2),
    "two": optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)}, {"w": "a", "b": "b"}),
    "masked": optax.masked(optax.adamw(1e-3), {"w": True, "b": False}),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "factored": optax.adafactor(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_moments_of_any_optimizer_have_zero_specs(optimizer):
    mesh, params = meshes.make(data=4, tensor=2), {"w": jnp.ones((256, 128)), "b": jnp.ones(4)}
    _, moments = zero_specs(params, mesh, 1, specs={"w": P(None, "tensor"), "b": P()})
    found = optimizer_specs(optimizer, params, moments)
    shapes = jax.eval_shape(optimizer.init, params)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), found)
    state = jax.jit(optimizer.init, out_shardings=placed)(params)  # the specs fit the tree, and each of its shapes
    expected = {(256, 128): P("data", "tensor")}
    for spec, x in zip(jax.tree.leaves(found), jax.tree.leaves(shapes), strict=True):
        assert spec == expected.get(x.shape, P())
    assert any(x.shape == (256, 128) for x in jax.tree.leaves(state)) or optimizer is OPTIMIZERS["factored"]


@pytest.mark.long
def test_gradients_of_replicated_parameters_are_summed_inside_shard_map():
    """As the docstring of `column` says: summing again would multiply each device's part by the size of data."""
    x, w = jnp.arange(32.0).reshape(8, 1, 4), jnp.ones((4, 6))
    mesh = meshes.make(data=4, tensor=2)

    def loss(w, x):
        return jnp.square(column(x, w)).sum()

    found = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(P(None, "tensor"), P("data")), out_specs=P(None, "tensor"), check_vma=True
    )(w, x)
    np.testing.assert_allclose(found, jax.grad(loss)(w, x), rtol=1e-6)

    def summed_once(w, x):
        return jax.lax.psum(jax.grad(loss)(as_varying(w, "data"), x), "data")

    found = jax.shard_map(summed_once, mesh=mesh, in_specs=(P(None, "tensor"), P("data")), out_specs=P(None, "tensor"))
    np.testing.assert_allclose(found(w, x), jax.grad(loss)(w, x), rtol=1e-6)
