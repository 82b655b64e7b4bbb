"""A Flax model that knows nothing of this package, under plain jit: tensor parallel by rules, ZeRO-3 on top.

python scripts/shard_your_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nanotrain_jax import mesh as meshes
from nanotrain_jax import shard, specs, zero_specs
from nanotrain_jax.sharding import FLAX  # pairs of a path's end and a layout, as ("up/kernel", "D F/tensor")

V, D, T, LAYERS = 256, 64, 32, 4


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class YourModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.layers = nnx.Embed(V, D, rngs=rngs), nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def train(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> tuple[list[float], nnx.State]:
    """-> losses of three steps, and what became of params, which stay laid out as they are."""
    optimizer, places = optax.sgd(0.02), jax.tree.map(lambda p: p.sharding, params)

    def step(params: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        def loss(params: nnx.State) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return optax.apply_updates(params, optimizer.update(grads, optimizer.init(params))[0]), value

    step, losses = jax.jit(step, out_shardings=(places, None)), []
    for _ in range(3):
        params, loss = step(params, tokens)
        losses.append(float(loss))
    return losses, params


def main() -> None:
    meshes.configure(simulate=8)
    mesh = meshes.make(data=4, tensor=2)
    graph, params = nnx.split(YourModel(nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, T + 1), 0, V)
    weights, _ = zero_specs(params, mesh, stage=3, persist_below=100, specs=specs(FLAX, params, mesh))
    sharded = shard(params, mesh, weights)
    batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    for where, args in ("one device", (params, tokens)), ("8 devices", (sharded, batch)):
        losses, after = train(graph, *args)
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(after))
        print(f"{where:10}  {held:9,} bytes of parameters on the first  losses", *(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
