"""A Flax Linen model with an encoder before its layers, for model.factory."""

import jax.numpy as jnp
from flax import linen as nn

from nanotrain_jax import Model, Rules, enter, initializer, leave
from nanotrain_jax.parallel.tensor.vocabulary import cross_entropy

RULES = Rules([
    ("attention/(query|key|value)/kernel", "L D N/tensor H"),
    ("attention/out/kernel", "L N/tensor H D"),
    ("up/kernel", "L D F/tensor"),
    ("down/kernel", "L F/tensor D"),
    ("(encoder|layers)/.*/scale", "L D"), ("ends/norm/scale", "D"), ("ends/embed/embedding", "V D"),
])  # fmt: skip


class Layer(nn.Module):
    """x[B T D] -> x[B T D]; heads (0: no attention) and width on this device."""

    heads: int
    head_dim: int
    width: int
    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        sizes = {"qkv_features": self.heads * self.head_dim, "out_features": x.shape[-1], "use_bias": False}
        if self.heads:
            h = enter(nn.RMSNorm()(x), self.axis, False)
            h = nn.SelfAttention(self.heads, name="attention", **sizes)(h, mask=nn.make_causal_mask(x[..., 0]))
            x = x + leave(h, self.axis, False)
        h = enter(nn.RMSNorm()(x), self.axis, False)
        h = nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(nn.Dense(self.width, False, name="up")(h)))
        return x + leave(h, self.axis, False)


def build(config, mesh):
    m, t, D = config.model, mesh.shape["tensor"], config.model.d_model
    axis, head_dim, example = "tensor" if t > 1 else None, D // m.num_heads, jnp.zeros((1, 2, D))
    layer, encoder = Layer(m.num_heads // t, head_dim, 2 * D // t, axis), Layer(0, 0, 2 * D // t, axis)
    embed, norm = nn.Embed(m.vocab_size, D), nn.RMSNorm()

    def ends(key):
        return {"embed": embed.init(key, jnp.zeros(1, int))["params"], "norm": norm.init(key, example)["params"]}

    def last(w, x, batch):
        x = norm.apply({"params": w["ends"]["norm"]}, x)
        return cross_entropy(x, w["ends"]["embed"]["embedding"], batch["targets"], axis=None)

    def first(w, batch, run):
        x = embed.apply({"params": w["ends"]["embed"]}, batch["inputs"])
        return run("encoder", lambda weights, x: encoder.apply({"params": weights}, x), x)

    whole = [Layer(heads, head_dim, 2 * D) for heads in (m.num_heads, 0)]
    init_layer, init_encoder = (lambda key, one=one: one.init(key, example)["params"] for one in whole)
    init = initializer(ends, init_layer, m.num_layers, {"encoder": (init_encoder, 3)})
    return Model(init, first, lambda w, x, batch: layer.apply({"params": w}, x), last, RULES, stacks=("encoder",))
