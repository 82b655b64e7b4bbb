"""A plain Flax model under jit with AdamW: tensor parallelism by rules, plus ZeRO-3.

python scripts/examples/shard_your_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nanotrain_jax import FLAX, describe, optimizer_specs, shard, specs, zero_specs
from nanotrain_jax.parallel import mesh as meshes

V, D, T, LAYERS = 256, 64, 32, 4
OPTIMIZER = optax.adamw(1e-3, eps=1e-4)


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


def train(graph: nnx.GraphDef, params: nnx.State, moments: optax.OptState, tokens: jax.Array) -> tuple:
    """Take three steps; -> losses, and the new params and moments with their shardings unchanged."""
    shardings = jax.tree.map(lambda x: x.sharding, (params, moments))

    def step(params: nnx.State, moments: optax.OptState, tokens: jax.Array) -> tuple:
        def loss(params: nnx.State) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    step, losses = jax.jit(step, out_shardings=(*shardings, None)), []
    for _ in range(3):
        params, moments, loss = step(params, moments, tokens)
        losses.append(float(loss))
    return losses, (params, moments)


def main() -> None:
    meshes.configure(simulate=8)
    mesh = meshes.make(data=4, tensor=2)
    graph, params = nnx.split(YourModel(nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, T + 1), 0, V)
    by_rules = specs(FLAX, params, mesh)  # rules: pairs of a path suffix and a layout, ("up/kernel", "D F/tensor")
    weights, moments = zero_specs(params, mesh, stage=3, persist_below=100, specs=by_rules)
    print(*describe(params, mesh, weights), sep="\n")
    sharded = shard(params, mesh, weights)
    state_specs = optimizer_specs(OPTIMIZER, params, moments)  # Adam's mu and nu like moments, its count replicated
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs)
    state = jax.jit(OPTIMIZER.init, out_shardings=shardings)(sharded)
    batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    for where, args in ("one device", (params, OPTIMIZER.init(params), tokens)), ("8 devices", (sharded, state, batch)):
        losses, trained = train(graph, *args)
        nbytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trained))
        print(f"{where:10}  {nbytes:9,} bytes of parameters and moments  losses", *(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
