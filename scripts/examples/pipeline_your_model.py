"""A plain Flax model (its layers: shard_your_model.py) as a pipeline, compared with jax.grad on one device.

python scripts/examples/pipeline_your_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from shard_your_model import D, Layer, T, V

from nanotrain_jax import LayeredModel, as_varying, layer_order, run_schedule
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.pipeline import schedule as schedules

STAGES, CHUNKS, LAYERS, MICROBATCHES, BATCH = 4, 2, 8, 8, 16


def main() -> None:
    meshes.configure(simulate=8)
    mesh = meshes.make(pipe=STAGES, data=2)
    make_layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))
    layer_graph, layers = nnx.split(make_layers(nnx.Rngs(0)))  # weights [LAYERS ...] in model order
    embed_graph, embed = nnx.split(nnx.Embed(V, D, rngs=nnx.Rngs(1)))
    tokens = jax.random.randint(jax.random.key(1), (MICROBATCHES, BATCH // MICROBATCHES, T + 1), 0, V)

    def first(embed: nnx.State, tokens: jax.Array) -> jax.Array:
        return nnx.merge(embed_graph, embed)(tokens[:, :-1])

    def layer(weights: nnx.State, x: jax.Array, tokens: jax.Array) -> jax.Array:
        return nnx.merge(layer_graph, weights)(x)

    def last(embed: nnx.State, x: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(embed_graph, embed).attend(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).sum() / (BATCH * T)

    def one_device(embed: nnx.State, layers: nnx.State) -> jax.Array:
        rows = tokens.reshape(BATCH, T + 1)
        x, _ = lax.scan(lambda x, weights: (layer(weights, x, rows), None), first(embed, rows), layers)
        return last(embed, x, rows)

    schedule = schedules.make("interleaved", STAGES, MICROBATCHES, CHUNKS)
    order = layer_order(schedule, LAYERS)  # with chunks, a stage's layers are not contiguous

    def pipelined(embed: nnx.State, layers: nnx.State, tokens: jax.Array) -> tuple:
        embed, layers = as_varying((embed, layers), "data")  # else gradients are already summed over data
        model = LayeredModel(first, layer, last, embed, layers)
        loss, (embed_grads, layer_grads) = run_schedule(schedule, model, tokens)
        return *lax.psum((loss, embed_grads), ("pipe", "data")), lax.psum(layer_grads, "data")

    in_specs = (P(), P("pipe"), P(None, "data"))
    run = jax.jit(jax.shard_map(pipelined, mesh=mesh, in_specs=in_specs, out_specs=(P(), P(), P("pipe"))))
    loss, embed_grads, layer_grads = run(embed, jax.tree.map(lambda w: w[order], layers), tokens)
    layer_grads = jax.tree.map(lambda g: g[np.argsort(order)], layer_grads)  # back to model order

    true_loss, true_grads = jax.jit(jax.value_and_grad(one_device, argnums=(0, 1)))(embed, layers)
    print(f"{'':40}  one device  {STAGES} stages x {CHUNKS} chunks  largest difference")
    print(f"{'loss':40} {true_loss:11.6f} {loss:20.6f} {abs(loss - true_loss):19.1e}")
    leaves = zip(jax.tree.leaves_with_path(true_grads), jax.tree.leaves((embed_grads, layer_grads)), strict=True)
    for (path, true), pipelined_grad in leaves:
        name = "norm of gradient of " + jax.tree_util.keystr(path[1:-1], simple=True, separator="/")
        norms = f"{jnp.linalg.norm(true):11.6f} {jnp.linalg.norm(pipelined_grad):20.6f}"
        print(f"{name:40} {norms} {jnp.abs(pipelined_grad - true).max():19.1e}")


if __name__ == "__main__":
    main()
