"""A Flax NNX model of your own under every layout: ZeRO, tensor and pipeline parallelism, remat, offload.

python -m nanotrain_jax.train --config configs/your_model.yaml
"""

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from nanotrain_jax import Config, Model, Rules, enter, initializer, leave

RULES = Rules([  # what is split over tensor; L, the layers, over pipe; ZeRO adds data
    ("attention/(query|key|value)/kernel", "L D N/tensor H"),
    ("attention/out/kernel", "L N/tensor H D"),
    ("up/kernel", "L D F/tensor"),
    ("down/kernel", "L F/tensor D"),
    ("layers/norm_./scale", "L D"),
    ("ends/embed/embedding", "V D"),
    ("ends/norm/scale", "D"),
])  # fmt: skip


class Layer(nnx.Module):
    def __init__(self, config: Config, tensor: int, rngs: nnx.Rngs):
        m, D = config.model, config.model.d_model
        sizes = {"num_heads": m.num_heads // tensor, "in_features": D, "qkv_features": D // tensor, "out_features": D}
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
    axis = "tensor" if tensor > 1 else None
    layer = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, tensor, nnx.Rngs(0))))
    ends = nnx.graphdef(nnx.eval_shape(lambda: Ends(config, nnx.Rngs(0))))

    def weights(module: nnx.Module) -> dict:
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def last(w: dict, x: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        module = nnx.merge(ends, w["ends"])
        logits = module.embed.attend(module.norm(x))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), batch["targets"])
        return losses.sum(), batch["targets"].size

    return Model(
        init=initializer(
            ends=lambda key: weights(Ends(config, nnx.Rngs(key))),
            layer=lambda key: weights(Layer(config, 1, nnx.Rngs(key))),
            num_layers=config.model.num_layers,
        ),
        first=lambda w, batch, run: nnx.merge(ends, w["ends"]).embed(batch["inputs"]),
        layer=lambda w, x: nnx.merge(layer, w)(x, axis),
        last=last,
        rules=RULES,
    )
