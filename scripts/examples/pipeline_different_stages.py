"""A pipeline of four different Flax modules, compared with jax.grad on one device.

python scripts/examples/pipeline_different_stages.py

The trainer takes the same modules (seq_len: a multiple of 4; num_layers: their number):
python -m nanotrain_jax.train --config quickstart model.factory=scripts.examples.pipeline_different_stages:build
    model.num_layers=4 parallel.pipe=4 parallel.data=2 parallel.microbatches=8 parallel.zero=3 runtime.simulate=8
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nanotrain_jax import Config, Model, as_varying, run_schedule
from nanotrain_jax.models.different_stages import model_of_stages
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.pipeline.heterogeneous import DifferentStages, StageModule

V, T, PATCH = 256, 64, 4
MICROBATCHES, BATCH = 8, 16


class Bytes(nnx.Module):
    """inputs[B T] -> x[B T 32]: embeds bytes, and sees the three before each."""

    def __init__(self, V: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, 32, rngs=rngs)
        self.conv = nnx.Conv(32, 32, kernel_size=4, padding="CAUSAL", rngs=rngs)

    def __call__(self, x: None, batch: dict) -> jax.Array:
        return nnx.gelu(self.conv(self.embed.embedding[batch["inputs"]]))


class Patches(nnx.Module):
    """x[B T 32] -> x[B T/4 96]: one wide token for four bytes; attention."""

    def __init__(self, V: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(PATCH * 32, 96, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=96, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array, batch: dict) -> jax.Array:
        x = self.up(x.reshape(x.shape[0], -1, PATCH * 32))
        return x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))


class Mlp(nnx.Module):
    """x[B T/4 96] -> {patches[B T/4 96], gate[B T/4 1]}: a stage may return several arrays."""

    def __init__(self, V: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(96, rngs=rngs)
        self.up, self.down = nnx.Linear(96, 200, rngs=rngs), nnx.Linear(200, 96, rngs=rngs)
        self.gate = nnx.Linear(96, 1, rngs=rngs)

    def __call__(self, x: jax.Array, batch: dict) -> dict:
        patches = x + self.down(nnx.gelu(self.up(self.norm(x))))
        return {"patches": patches, "gate": nnx.sigmoid(self.gate(patches))}


class Head(nnx.Module):
    """{patches, gate} -> losses[B T]: each byte sees the patch before its own, and itself."""

    def __init__(self, V: int, rngs: nnx.Rngs):
        self.down, self.embed = nnx.Linear(96, 48, rngs=rngs), nnx.Embed(V, 48, rngs=rngs)
        self.out = nnx.Linear(48, V, rngs=rngs)

    def __call__(self, x: dict, batch: dict) -> jax.Array:
        before = jnp.pad(self.down(x["patches"] * x["gate"]), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = nnx.gelu(jnp.repeat(before, PATCH, axis=1) + self.embed.embedding[batch["inputs"]])
        labels = jnp.maximum(batch["targets"], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(self.out(x).astype(jnp.float32), labels)
        return jnp.where(batch["targets"] >= 0, losses, 0.0)


def stage_of(kind: Callable, V: int) -> StageModule:
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(V, nnx.Rngs(0))))
    return StageModule(
        name=kind.__name__,
        init=lambda key: nnx.to_pure_dict(nnx.state(kind(V, nnx.Rngs(key)), nnx.Param)),
        apply=lambda weights, x, batch: nnx.merge(graph, weights)(x, batch),
    )


def modules(V: int) -> list[StageModule]:
    return [stage_of(kind, V) for kind in (Bytes, Patches, Mlp, Head)]


def build(config: Config, mesh: Mesh) -> Model:
    def loss(losses: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        return losses.sum(), (batch["targets"] >= 0).sum(dtype=jnp.int32)

    return model_of_stages(config, mesh, modules(config.model.vocab_size), loss)


def main() -> None:
    meshes.configure(simulate=8)
    mesh = meshes.make(pipe=4, data=2)
    stages = DifferentStages(modules(V))
    rows = stages.init(jax.random.key(0))  # {"weights": [4 n]}, a row for each stage
    tokens = jax.random.randint(jax.random.key(1), (MICROBATCHES, BATCH // MICROBATCHES, T + 1), 0, V)
    batch = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}

    def pipelined(rows: dict, batch: dict) -> tuple:
        rows = as_varying(rows, "data")  # else gradients are already summed over data
        model = stages.layered(rows, lambda losses, batch: losses.sum() / (BATCH * T))
        loss, (_, grads) = run_schedule("1f1b", model, batch)
        return lax.psum(loss, ("pipe", "data")), lax.psum(grads, "data")

    def one_device(weights: list) -> jax.Array:
        x, whole = None, jax.tree.map(lambda x: x.reshape(BATCH, T), batch)
        for stage, own in zip(stages.modules, weights, strict=True):
            x = stage.apply(own, x, whole)
        return x.sum() / (BATCH * T)

    run = jax.shard_map(pipelined, mesh=mesh, in_specs=(P("pipe"), P(None, "data")), out_specs=(P(), P("pipe")))
    loss, grads = jax.jit(run)(rows, batch)
    true_loss, true_grads = jax.jit(jax.value_and_grad(one_device))(stages.unpack(rows))
    print(f"{'':30} weights  one device     4 stages  largest difference")
    print(f"{'loss':37} {true_loss:11.6f} {loss:12.6f} {abs(loss - true_loss):19.1e}")
    for stage, true, found in zip(stages.modules, true_grads, stages.unpack(grads), strict=True):
        norms = f"{optax.tree.norm(true):11.6f} {optax.tree.norm(found):12.6f}"
        difference = max(jnp.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (true, found)), strict=True))
        count = sum(x.size for x in jax.tree.leaves(true))
        print(f"{'gradient of ' + stage.name:30} {count:6,} {norms} {difference:19.1e}")


if __name__ == "__main__":
    main()
