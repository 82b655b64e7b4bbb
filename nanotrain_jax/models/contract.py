"""The model contract: what the training step needs of a model. Our decoder is one instance, a user's model another.

A model is a stack of identical layers, with a computation before and one after it:

    batch = batch | encode(ends, batch, run)            optional: an encoder of images, ...
    x = first(ends, batch, run)                         embedding
    x = layer(weights[i], x, batch) for i in 0 .. L-1   x keeps its shapes and dtypes, a tree of floats
    sum of losses, count = last(ends, x, batch)         norm, head, loss

The functions run inside `shard_map` (check_vma=True) on this device's shards and one of its microbatches, in the dtype
of precision.compute. batch is {"inputs", "targets"}, both int32 [B T]; negative targets are ignored (padding of
evaluation, the first token of another document). The sum of losses is a float32 scalar; training divides it by the
number of targets of the global batch. `cross_entropy` of parallel/tensor/vocabulary.py does all of this. With
data.attend_across_documents=false batch has also {"starts"}: int32 [B T], for each token the position in its row of its
document's first token; under parallel.context of the whole row, in natural order. A layer that mixes tokens must not
look further back, and positions count from there. Functions are pure: weights are their only state; no random numbers
(dropout), no running means.

The step handles ZeRO, remat, offload, pipeline stages and the optimizer. remat=selective saves values that
`jax.ad_checkpoint.checkpoint_name` names with one of `parallel.remat.SAVED`. The model handles tensor parallelism: its
rules shard weights over tensor, and it computes with `column`, `row`, `enter`, `leave`.

An encoder returns a dict of arrays [B ...]: floats for `first` alone, integers for `layer` and `last` too. In pipelines
all stages share its work (step/encoded.py).

Weights are a dict. Under "layers" every array has a leading dim L. All other keys are `ends`: nested dicts of arrays,
for `first` and `last`. Further stacks of layers, e.g. an encoder, have their own keys beside "layers" and a leading dim
too; `first` runs one with x = run("encoder", layer, x), layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nanotrain_jax.models.parameters import ENDS, LAYERS
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import Rules


def split_layers(weights: Tree) -> tuple[Tree, Tree]:
    """Split weights, or a tree like them -> ends (all but the layers), layers."""
    return {key: tree for key, tree in weights.items() if key != LAYERS}, weights[LAYERS]


def join_layers(ends: Tree, layers: Tree) -> Tree:
    """The inverse of `split_layers`."""
    return ends | {LAYERS: layers}


class Place(NamedTuple):
    """Where the next T tokens of all rows go: slots of the cache from `slot` on.

    slot: int32 scalar, of the first of them. starts[B]: the slot of each row's first token, int32; slots before it hold
    nothing. Tokens may be followed by padding: what is stored of it is overwritten by the tokens that come next.
    """

    slot: jax.Array
    starts_B: jax.Array

    def after(self, tokens: jax.Array | int) -> Place:
        """Return the place after so many tokens."""
        return self._replace(slot=self.slot + tokens)

    def positions(self, tokens: int) -> jax.Array:
        """Return the position in its row of each token, int32 [B T]; below 0 before a row's first token."""
        return (self.slot + jnp.arange(tokens))[None] - self.starts_B[:, None]

    def seen(self, tokens: int, slots: int, window: jax.Array | int | None) -> jax.Array:
        """Return which slots each token attends to, bool [B T S]. window: how many at most, with its own; None: all."""
        slot_1S, own_T1 = jnp.arange(slots)[None], (self.slot + jnp.arange(tokens))[:, None]
        seen_TS = slot_1S <= own_T1
        if window is not None:
            seen_TS &= slot_1S > own_T1 - window
        return seen_TS[None] & (slot_1S >= self.starts_B[:, None])[:, None]


class Decode(NamedTuple):
    """The functions of a model for the next T tokens of each row, with a cache of what is before them.

    cache     cache(B, S, dtype) -> types of the arrays of a layer's cache, for B rows and S slots: {name: [B ...]}
    layouts   how devices share them: name -> layout, as "M/data,tensor S H"
    first     first(ends, tokens[B T], place) -> x[B T D]
    layer     layer(weights of a layer, x, cache, place) -> x, the cache with these tokens
    last      last(ends, x[B T D]) -> logits[B T V], float32, of the whole vocabulary without padding
    transposed   matrices that `layer` also takes `Transposed` (parallel/transposed.py), as it is given them on one CPU,
              which then reads them faster: name -> how many of its dims, the first ones, are summed over
    """

    cache: Callable[[int, int, jnp.dtype], dict[str, jax.ShapeDtypeStruct]]
    layouts: Mapping[str, str]
    first: Callable[[Tree, jax.Array, Place], jax.Array]
    layer: Callable[[Tree, jax.Array, Tree, Place], tuple[jax.Array, Tree]]
    last: Callable[[Tree, jax.Array], jax.Array]
    transposed: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Model:
    """A model for the training step.

    further_inputs   arrays of a batch beside inputs and targets (data.source=arrays): name -> shape, dtype of one row
    encode      encode(ends, batch, run) -> arrays with the leading dim B, which are added to the batch before `first`;
                run as in `first`. None: nothing is added
    token_losses   token_losses(ends, x, batch) -> the loss of each target in nats, float32 [B T], 0 for those that are
                ignored (`vocabulary.losses_of_tokens`): what objectives are made of. None: train.objective is refused
    count       count(batch) -> over how many the loss of a batch is the mean, as a scalar; None: its targets
    of_rows     of_rows(ends, x, batch) -> float32 [B ...], of each row, the same along tensor and context:
                `Step.of_rows` returns it, without gradients. None: there is no such function
    measures    name -> shape of further sums, float32, which `last` then returns by name as a third value, instead of
                `correct`: steps and evaluations log their means over what it counts
    report      report(means of measures, of a batch or evaluation) -> what is logged of them, scalars; None: the means
    details     details(means of measures) -> further scalars that evaluations alone log. None: there are none
    adjust      adjust(layers, measures) -> layers, after an update that was not skipped: constants that follow from
                what was measured, not from gradients. layers: this device's rows of layers; measures: those with a
                leading dim of layers, of these rows. None: nothing is adjusted
    penalty     penalty(x, count) -> a further sum of losses, float32 scalar, of what layers bring out (x, a tree, as
                `last` takes it); count: what `last` returned. Training's gradients are of both sums; the loss that is
                logged, and that of evaluations, is the first alone. None: there is none
    correct     correct(ends, x, batch) -> number of targets whose most likely token is the right one, as a scalar, for
                evaluations (`parallel.accuracy.correct`); uses the same ends as `last`. None: not counted
    init        init(seed, order=None, put=None) -> weights in float32; the same seed gives the same values on every
                mesh. order: the layer of each row of the stacked weights; None: model order. put: applied to each
                layer's weights before they are stacked. See `initializer`
    rules       the dims of weights that are sharded over tensor: ("up/kernel", "L D F/tensor"). The step shards the
                dim L of layers over pipe, and with ZeRO another dim over data and context
    stacks      keys of further stacks of layers
    used_by_first, used_by_last, used_by_encode   select from a tree like `ends` (without stacks) what each uses.
                Hand-written layer loops gather the selected weights there, once for each
    is_decayed  tree path of a weight -> True if weight decay applies; default: all but biases and scales
    has_partial_gradient   tree path of a weight that is replicated over tensor -> True if its gradient on each device
                is a partial sum: then it is summed once per step. If False, JAX sums it at each use
    constants   patterns of paths of weights that never train, as of train.freeze
    is_padded   path of a weight ("params/ends/head_VD") -> True if its rows are padded to a multiple of tensor
    splits_context   True if the model works on the tokens of one device along context: its attention is one of
                `parallel.context`, and positions are those of `own_positions` of parallel/context/context.py
    splits_documents   True if the model heeds batch["starts"]
    decode      its functions for generation and evaluation; None: `generate` and `evaluate` refuse the model
    splits_vocab   True if all pipeline stages run first and last together, each with its part of the ends
                (`LayeredModel.split_ends`); rules may shard ends over pipe. Equal to parallel.vocab_over_pipe
    """

    init: Callable[..., Tree]
    first: Callable[[Tree, Tree, Callable], jax.Array]
    layer: Callable[[Tree, jax.Array, Tree], jax.Array]
    last: Callable[[Tree, jax.Array, Tree], tuple]
    rules: Rules
    encode: Callable[[Tree, Tree, Callable], dict[str, jax.Array]] | None = None
    stacks: tuple[str, ...] = ()
    used_by_first: Callable[[Tree], Tree] = lambda ends: ends
    used_by_last: Callable[[Tree], Tree] = lambda ends: ends
    used_by_encode: Callable[[Tree], Tree] = lambda ends: ends
    further_inputs: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    correct: Callable[[Tree, jax.Array, Tree], jax.Array] | None = None
    token_losses: Callable[[Tree, jax.Array, Tree], jax.Array] | None = None
    count: Callable[[Tree], jax.Array] | None = None
    of_rows: Callable[[Tree, jax.Array, Tree], jax.Array] | None = None
    measures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    report: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] | None = None
    details: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] | None = None
    penalty: Callable[[Tree, jax.Array], jax.Array] | None = None
    adjust: Callable[[Tree, dict[str, jax.Array]], Tree] | None = None
    decode: Decode | None = None
    is_decayed: Callable[[tuple], bool] = lambda path: path[-1].key not in ("bias", "scale")
    has_partial_gradient: Callable[[tuple], bool] = lambda path: False
    constants: tuple[str, ...] = ()
    is_padded: Callable[[str], bool] = lambda path: False
    splits_context: bool = False
    splits_documents: bool = False
    splits_vocab: bool = False

    @cached_property
    def shapes(self) -> Tree:
        """ShapeDtypeStructs of the weights."""
        return jax.eval_shape(lambda: self.init(0))


def initializer(
    ends: Callable[[jax.Array], Tree],
    layer: Callable[[jax.Array], Tree],
    num_layers: int,
    stacks: Mapping[str, tuple[Callable[[jax.Array], Tree], int]] | None = None,
) -> Callable[..., Tree]:
    """Return `Model.init`. ends(key) -> weights outside of layers; layer(key) -> weights of one layer, without dim L.

    stacks: key -> (function like layer, number of layers) of each further stack.
    """

    def init(seed: int, order: Sequence[int] | None = None, put: Callable | None = None) -> Tree:
        end_key, layer_key, stack_key = jax.random.split(jax.random.key(seed), 3)
        keys = jax.random.split(layer_key, num_layers)
        keys = keys if order is None else keys[jnp.asarray(order)]
        layers = jax.vmap(layer)(keys) if put is None else jax.lax.map(lambda key: put(layer(key)), keys)
        weights = {ENDS: ends(end_key)}
        for i, (name, (stack_layer, count)) in enumerate((stacks or {}).items()):
            weights[name] = jax.vmap(stack_layer)(jax.random.split(jax.random.fold_in(stack_key, i), count))
        return join_layers(weights, layers)

    return init
