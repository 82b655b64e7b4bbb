"""Compiled functions that continue rows of tokens, on a mesh.

The batch is sharded over data, heads and vocabulary over tensor (`models/decode.py`). The next tokens of each row move
two all-reduces of B T D per layer, and one all-gather of the logits of one token, over tensor; nothing over data.
Caches are donated and updated in place.

Layers are separate arrays, and no loop runs over them: a loop would copy each layer's weights before it multiplies with
them, three times the traffic of what is bound by reading weights once. Either one program has all layers and many
tokens (GPUs), or a program has a few layers and is called again for the next ones: it compiles in seconds however many
layers there are (CPUs, where a call costs little beside a layer; and everywhere for prompts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.generation.sampling import Sampling, choose
from nanotrain_jax.models.contract import LAYERS, Model, Place, split_layers
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import layout
from nanotrain_jax.parallel.transposed import Transposed, transposed
from nanotrain_jax.step.build import on_mesh
from nanotrain_jax.step.plan import specs_over_pipe_and_tensor

ROWS, TOKENS, ACTIVATIONS = layout("B/data"), layout("B/data T"), layout("B/data T D")
PLACE = Place(PartitionSpec(), ROWS)
CHUNKS = 16, 64, 256  # tokens of each row that are taken in at once; each is compiled once
SMALLEST = 256  # slots of a cache, which grows by doubling
STRIDE = 16  # tokens between two looks of the host
BLOCK = 16  # layers in one program, at most, where it does not have all
SLICE = 64  # tokens of each row whose logits exist at a time, when tokens are scored
ENDED = -1  # in place of a token, after the end of a row
NONE = -2  # in place of a token, where none has been chosen


class Rows(NamedTuple):
    """Rows of tokens on devices.

    caches: of each layer. place: of the token after those in the caches. token[B]: that token, already chosen; ENDED
    after a token that ends a row.
    """

    caches: list
    place: Place
    token_B: jax.Array


class Choice(NamedTuple):
    """How the next token is chosen, and which tokens end a row."""

    sampling: Sampling
    stops: tuple[int, ...]


def chosen(model: Model, choice: Choice, ends: Tree, x_BTD: jax.Array, at: jax.Array, rows: Rows) -> Rows:
    """Choose the token after index `at` of x[B T D], the output of the last layer. rows: before these tokens."""
    x_B1D = lax.dynamic_slice_in_dim(x_BTD, at, 1, axis=1)
    place = rows.place.after(at + 1)
    token_B = choose(model.decode.last(ends, x_B1D)[:, 0], choice.sampling, place.positions(1)[:, 0])
    has_ended_B = jnp.isin(rows.token_B, jnp.asarray([ENDED, *choice.stops], jnp.int32))
    return rows._replace(place=place, token_B=jnp.where(has_ended_B, ENDED, token_B))


def scored(model: Model, ends: Tree, x_BTD: jax.Array, next_BT: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
    """Score `SLICE` tokens next[B T], those after the tokens whose output of the last layer is x[B T D], from `at` on.

    -> their log-probability, float32 [B t], and whether each is the most likely token, bool [B t].
    """
    size = min(SLICE, x_BTD.shape[1])
    x_BtD, next_Bt = (lax.dynamic_slice_in_dim(x, at, size, axis=1) for x in (x_BTD, next_BT))
    logits_BtV = model.decode.last(ends, x_BtD)
    chosen_Bt = jnp.take_along_axis(logits_BtV, next_Bt[..., None], axis=-1)[..., 0]
    log_Bt = chosen_Bt - jax.nn.logsumexp(logits_BtV, axis=-1)
    return log_Bt, jnp.argmax(logits_BtV, axis=-1) == next_Bt


def block(model: Model, layers: Sequence[Tree], x: jax.Array, caches: Sequence[Tree], place: Place) -> tuple:
    """Run x[B T D] through layers, alike or not -> x, their caches with these tokens."""
    after = []
    for weights, cache in zip(layers, caches, strict=True):
        x, cache = model.decode.layer(weights, x, cache, place)
        after.append(cache)
    return x, after


def embedded(model: Model, ends: Tree, rows: Rows) -> jax.Array:
    """Return the chosen tokens as x[B 1 D]; of rows that have ended, some token."""
    return model.decode.first(ends, jnp.maximum(rows.token_B, 0)[:, None], rows.place)


def turn(model: Model, choice: Choice, ends: Tree, x_BTD: jax.Array, at: jax.Array, rows: Rows) -> tuple:
    """Choose a token, as `chosen` -> rows, and that token as x[B 1 D]."""
    rows = chosen(model, choice, ends, x_BTD, at, rows)
    return rows, embedded(model, ends, rows)


def loop(model: Model, choice: Choice, params: Tree, caches: list, rows: Rows) -> tuple[Rows, jax.Array]:
    """Continue each row by `STRIDE` tokens -> rows, tokens[n B]. caches: of the rows, which come without them."""
    ends, layers = split_layers(params)

    def one(rows: Rows, _: None) -> tuple[Rows, jax.Array]:
        x_B1D = embedded(model, ends, rows)
        x_B1D, caches = block(model, layers, x_B1D, rows.caches, rows.place)
        rows = chosen(model, choice, ends, x_B1D, jnp.int32(0), rows._replace(caches=caches))
        return rows, rows.token_B

    return lax.scan(one, rows._replace(caches=caches), None, length=STRIDE)


class Engine:
    """A model on a mesh that continues rows of tokens.

    params: {..., "layers": [weights of a layer]} on the mesh (`split_up`), those of further stacks first. dtype: of the
    caches. Rows come in multiples of `multiple`.
    """

    def __init__(self, model: Model, mesh: Mesh, params: Tree, dtype: jnp.dtype):
        self.model, self.mesh, self.params, self.dtype = model, mesh, params, jnp.dtype(dtype)
        self.is_looped = mesh.devices.flat[0].platform != "cpu"
        # Simulated devices share few threads: those of many programs in flight would wait for each other.
        self.waits = mesh.size > 1 and not self.is_looped
        # XLA:GPU multiplies a single row by elementwise kernels, which write all products to memory.
        self.multiple = mesh.shape["data"] * (2 if self.is_looped else 1)
        end_specs, self.layer_specs = split_layers(param_specs(model, mesh))
        self.cache_specs = {name: layout(text) for name, text in model.decode.layouts.items()}
        self.end_specs, self.row_specs = end_specs, Rows([], PLACE, ROWS)
        self.first = self._jit(model.decode.first, (end_specs, TOKENS, PLACE), ACTIVATIONS)
        embedded_in = end_specs, self.row_specs
        self.embedded = self._jit(partial(embedded, model), embedded_in, ACTIVATIONS)
        self.programs: dict[Any, Callable] = {}
        self.blocks = [(own, self._block(own)) for own in blocks(self.layer_specs)]
        scores_in = end_specs, ACTIVATIONS, TOKENS, PartitionSpec()
        self.scored = self._jit(partial(scored, model), scores_in, (TOKENS, TOKENS))

    def _block(self, own: slice) -> Callable:
        """Return the compiled function of some layers; blocks that are alike have the same."""
        specs = self.layer_specs[own]
        key = str(specs)
        if key not in self.programs:
            outputs = ACTIVATIONS, [self.cache_specs] * len(specs)
            run = partial(block, self.model)
            self.programs[key] = self._jit(run, (specs, *outputs, PLACE), outputs, donate=(1, 2))
        return self.programs[key]

    def _jit(self, function: Callable, inputs: Tree, outputs: Tree, donate: Sequence[int] = ()) -> Callable:
        return jax.jit(on_mesh(self.mesh, function, inputs, outputs), donate_argnums=donate)

    def program(self, kind: str, choice: Choice) -> Callable:
        """Return a compiled function of this choice: choose or loop."""
        if (kind, choice) not in self.programs:
            ends, rows = self.end_specs, self.row_specs
            if kind == "choose":
                inputs = ends, ACTIVATIONS, PartitionSpec(), rows
                made = self._jit(partial(turn, self.model, choice), inputs, (rows, ACTIVATIONS))
            else:
                caches, params = [self.cache_specs] * len(self.layer_specs), ends | {LAYERS: self.layer_specs}
                outputs = rows._replace(caches=caches), layout("n B/data")
                made = self._jit(partial(loop, self.model, choice), (params, caches, rows), outputs, donate=(1,))
            self.programs[kind, choice] = made
        return self.programs[kind, choice]

    def empty(self, starts: Sequence[int], slots: int) -> Rows:
        """Return rows without tokens. starts: the slot of each row's first token."""
        types = self.cache_types(len(starts), slots)

        def zeros() -> dict:
            return {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in types.items()}

        caches = [zeros() for _ in self.layer_specs]
        starts_B = self.put(np.asarray(starts, np.int32), ROWS)
        return Rows(caches, Place(self.put(np.int32(0), PartitionSpec()), starts_B), jnp.zeros_like(starts_B))

    def cache_types(self, rows: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of a layer's cache, with their shardings."""
        types = self.model.decode.cache(rows, slots, self.dtype)
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, self.cache_specs[name]))
            for name, x in types.items()
        }

    def put(self, x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """Move an array to the mesh."""
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def take(self, rows: Rows, tokens_BT: np.ndarray, count: int, choice: Choice) -> Rows:
        """Take in the first count of the next tokens of each row, and choose the one after them."""
        at = self.put(np.int32(count - 1), PartitionSpec())
        rows = rows._replace(token_B=jnp.full_like(rows.token_B, NONE))  # no row has ended
        return self._advance(rows, self.embed(rows, tokens_BT), at, choice)[0]

    def embed(self, rows: Rows, tokens_BT: np.ndarray) -> jax.Array:
        """Return the next tokens of each row as x[B T D]."""
        ends, _ = split_layers(self.params)
        return self.first(ends, self.put(tokens_BT.astype(np.int32), TOKENS), rows.place)

    def _advance(self, rows: Rows, x: jax.Array, at: jax.Array, choice: Choice) -> tuple[Rows, jax.Array]:
        """Run x[B T D] through the layers, and choose the token after index `at` -> rows, x[B 1 D] of that token."""
        x, caches = self.through_layers(rows, x)
        ends, _ = split_layers(self.params)
        after, x = self.program("choose", choice)(ends, x, at, rows._replace(caches=[]))
        return after._replace(caches=caches), x

    def through_layers(self, rows: Rows, x: jax.Array) -> tuple[jax.Array, list]:
        """Return the output of the last layer, x[B T D], and the caches with these tokens."""
        _, layers = split_layers(self.params)
        caches = []
        for own, run in self.blocks:
            x, after = run(layers[own], x, rows.caches[own], rows.place)
            caches += jax.block_until_ready(after) if self.waits else after
        return x, caches

    def score(self, rows: Rows, slot: int, tokens_BT: np.ndarray, next_BT: np.ndarray | None) -> tuple[Rows, list]:
        """Take in the next tokens of each row, from a slot on, and score the token after each, next[B T].

        -> rows, for each `SLICE` of tokens: what `scored` returns. next: None: nothing is scored.
        """
        rows = rows._replace(place=rows.place._replace(slot=self.put(np.int32(slot), PartitionSpec())))
        x, caches = self.through_layers(rows, self.embed(rows, tokens_BT))
        rows = rows._replace(caches=caches)
        if next_BT is None:
            return rows, []
        next_BT, (ends, _) = self.put(next_BT.astype(np.int32), TOKENS), split_layers(self.params)
        found = []
        for at in range(0, tokens_BT.shape[1], SLICE):
            scores = self.scored(ends, x, next_BT, self.put(np.int32(at), PartitionSpec()))
            found.append(jax.block_until_ready(scores) if self.waits else scores)
        return rows, found

    def next_tokens(self, rows: Rows, choice: Choice) -> tuple[Rows, list[jax.Array]]:
        """Continue each row by `STRIDE` tokens -> rows, the tokens[B] one after another. Does not wait for them."""
        if self.is_looped:
            rows, tokens_nB = self.program("loop", choice)(self.params, rows.caches, rows._replace(caches=[]))
            return rows, list(tokens_nB)
        at, tokens = self.put(np.int32(0), PartitionSpec()), []
        x = self.embedded(split_layers(self.params)[0], rows._replace(caches=[]))
        for _ in range(STRIDE):
            rows, x = self._advance(rows, x, at, choice)
            tokens.append(rows.token_B)
        return rows, tokens

    def grown(self, rows: Rows, slots: int) -> Rows:
        """Return rows with room for more tokens."""
        types = self.cache_types(len(rows.token_B), slots)
        longer = jax.jit(partial(padded, types), out_shardings={name: x.sharding for name, x in types.items()})
        return rows._replace(caches=[longer(cache) for cache in rows.caches])


@partial(jax.jit, static_argnames="inputs")
def layer_of(stack: jax.Array, index: jax.Array, inputs: int | None = None) -> jax.Array | Transposed:
    """x[L ...] -> x[...], of one layer. inputs: as of `transposed`, to store it so; None: as it is"""
    weights = lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return weights if inputs is None else transposed(weights, inputs)


def chunk_of(tokens: int) -> int:
    """Return the size of the chunk in which the next of so many tokens are taken in."""
    return next((size for size in CHUNKS if size >= tokens), CHUNKS[-1])


def doubled(size: int, needed: int) -> int:
    """Return size, doubled until it is at least needed."""
    while size < needed:
        size *= 2
    return size


def padded(types: Tree, arrays: Tree) -> Tree:
    """Return arrays of these types: with zeros at the end of each dim."""

    def one(kind: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, new - old) for new, old in zip(kind.shape, x.shape, strict=True)])

    return jax.tree.map(one, types, arrays)


def param_specs(model: Model, mesh: Mesh) -> Tree:
    """Return PartitionSpecs of weights whose layers are apart: {..., "layers": [of a layer]}."""
    return apart(model, specs_over_pipe_and_tensor(model, mesh), lambda spec: PartitionSpec(*spec[1:]))


def apart(model: Model, tree: Tree, of_layer: Callable) -> Tree:
    """A tree like the weights -> {..., "layers": [of a layer]}, the stacks in the order in which they run.

    of_layer(leaf of a stack) -> of a layer.
    """
    stacks, layers = (*model.stacks, LAYERS), []
    for stack in stacks:
        count = len(jax.tree.leaves(model.shapes[stack])[0])
        layers += [jax.tree.map(of_layer, tree[stack])] * count
    return {key: part for key, part in tree.items() if key not in stacks} | {LAYERS: layers}


def blocks(layers: Sequence[Tree]) -> list[slice]:
    """Return the layers of each program: as many as divide those that are alike, at most `BLOCK`."""
    found, at = [], 0
    for _, alike in groupby(layers, str):
        count = len(list(alike))
        size = max(size for size in range(1, BLOCK + 1) if count % size == 0)
        found += [slice(start, start + size) for start in range(at, at + count, size)]
        at += count
    return found


def split_up(model: Model, params: Tree) -> Tree:
    """{..., "layers": stacked} -> {..., "layers": [weights of a layer]}; the stacks are freed one by one.

    On one CPU the matrices that the model names in `Decode.transposed` are stored so, in float32: XLA:CPU converts
    those of 16 bits first, and is slower with them transposed.
    """
    names, some = (*model.stacks, LAYERS), jax.tree.leaves(params)[0]
    on_one_cpu = len(some.devices()) == 1 and next(iter(some.devices())).platform == "cpu"
    inputs = model.decode.transposed if on_one_cpu and some.dtype == jnp.float32 else {}
    layers = [weights for name in names for weights in _split_stack(params[name], inputs)]
    return {key: part for key, part in params.items() if key not in names} | {LAYERS: layers}


def _split_stack(stack: Tree, inputs: Mapping[str, int]) -> list[Tree]:
    """inputs: name of a matrix -> how many of its dims, for those to be stored `Transposed`."""
    arrays, tree = jax.tree_util.tree_flatten_with_path(stack)
    of_layers = []
    while arrays:
        path, array = arrays.pop(0)
        of_layers.append([layer_of(array, i, inputs.get(path[-1].key)) for i in range(len(array))])
        jax.block_until_ready(of_layers[-1])
        array.delete()
    return [tree.unflatten(weights) for weights in zip(*of_layers, strict=True)]
