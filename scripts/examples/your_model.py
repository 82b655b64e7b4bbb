"""A Flax NNX model of your own under every layout: python -m nanotrain_jax.train --config configs/your_model.yaml"""

import jax
from flax import nnx
from jax.sharding import Mesh

from nanotrain_jax import Config, Model, Rules, enter, initializer, leave
from nanotrain_jax.parallel.tensor.vocabulary import cross_entropy

RULES = Rules([  # dims sharded over tensor; the step shards L (layers) over pipe and adds ZeRO over data
    ("attention/(query|key|value)/kernel", "L D N/tensor H"),
    ("attention/out/kernel", "L N/tensor H D"),
    ("up/kernel", "L D F/tensor"), ("down/kernel", "L F/tensor D"),
    ("layers/norm_./scale", "L D"), ("ends/norm/scale", "D"), ("ends/embed/embedding", "V D"),
])  # fmt: skip


class Layer(nnx.Module):
    def __init__(self, config: Config, tensor: int, rngs: nnx.Rngs):
        D, N = config.model.d_model, config.model.num_heads // tensor  # heads per device
        sizes = {"num_heads": N, "in_features": D, "qkv_features": D // tensor, "out_features": D}
        self.attention = nnx.MultiHeadAttention(**sizes, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D // tensor, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * D // tensor, D, use_bias=False, rngs=rngs)
        self.norm_1, self.norm_2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x: jax.Array, axis: str | None) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + leave(self.attention(enter(self.norm_1(x), axis, False), mask=mask), axis, False)
        return x + leave(self.down(nnx.gelu(self.up(enter(self.norm_2(x), axis, False)))), axis, False)


class Ends(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.model.vocab_size, config.model.d_model, rngs=rngs)
        self.norm = nnx.RMSNorm(config.model.d_model, rngs=rngs)


def build(config: Config, mesh: Mesh) -> Model:
    tensor = mesh.shape["tensor"]
    layer = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, tensor, nnx.Rngs(0))))
    ends = nnx.graphdef(nnx.eval_shape(lambda: Ends(config, nnx.Rngs(0))))

    def last(weights: dict, x: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        module = nnx.merge(ends, weights["ends"])
        return cross_entropy(module.norm(x), module.embed.embedding[...], batch["targets"], axis=None)

    return Model(
        init=initializer(
            ends=lambda key: nnx.to_pure_dict(nnx.state(Ends(config, nnx.Rngs(key)), nnx.Param)),
            layer=lambda key: nnx.to_pure_dict(nnx.state(Layer(config, 1, nnx.Rngs(key)), nnx.Param)),
            num_layers=config.model.num_layers,
        ),
        first=lambda weights, batch, run: nnx.merge(ends, weights["ends"]).embed(batch["inputs"]),
        layer=lambda weights, x, batch: nnx.merge(layer, weights)(x, "tensor" if tensor > 1 else None),
        last=last,
        rules=RULES,
    )
