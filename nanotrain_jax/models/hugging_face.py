"""Tensors of model folders of Hugging Face: which a model has, and our arrays as parts of them. Needs no JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.config.experts import FIXED
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import decoder_table as ours
from nanotrain_jax.models import hugging_face_config
from nanotrain_jax.models.hugging_face_kinds import KINDS, Tensor
from nanotrain_jax.models.parameters import DENSE, ENDS, LAYERS, Table

COUNT, EXPERT = "*", "{expert}"
STRIP = 64  # elements
MAX_NAMED = 3  # tensors named in an error message
SIZES = (  # keys of model, which the decoder reads
    "num_layers", "d_model", "num_heads", "head_width", "d_ff", "vocab_size", "max_seq_len", "norm_eps",
    "tie_embeddings",
)  # fmt: skip
FEATURES = (
    "centered_norms", "learned_positions", "gated_mlp", "activation", "biases", "qkv_bias", "qk_norm", "norms_after",
    "gains_from_one", "scaled_embeddings",
)  # fmt: skip
STACKS = ENDS, DENSE, LAYERS
Shapes = Mapping[str, tuple[int, ...]]  # name -> shape


class Stored(NamedTuple):
    """A tensor of a folder, or those of all experts as one: a row with sizes, of one layer."""

    name: str
    paths: tuple[str, ...]
    layer: int | None  # None: outside the layers
    groups: tuple[tuple[str, ...], ...]  # for each dim the dims of ours that it joins
    words: tuple[str, ...]  # dims of our arrays, in their order
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        return tuple(prod(self.sizes[word] for word in group) for group in self.groups)

    @property
    def pieces(self) -> dict[str, int | None]:
        """Name of each tensor of the folder -> its expert, first dim of this one; of one without experts None."""
        if EXPERT not in self.name:
            return {self.name: None}
        return {self.name.replace(EXPERT, str(expert)): expert for expert in range(self.shape[0])}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the folder, by name."""
        return {name: self.shape if expert is None else self.shape[1:] for name, expert in self.pieces.items()}

    @property
    def flat(self) -> list[str]:
        """The dims of ours in the order of the stored tensor."""
        return [word for group in self.groups for word in group]


def kind_of(model: Model, model_type: str | None = None) -> str:
    """Return the model_type of a resolved model, without its adapters: the first that can hold it of the given one, its
    family's, and others. Raises ValueError if none can.
    """
    model = model.model_copy(update={"lora": None})
    alike = [(name, kind) for name, kind in KINDS.items() if bool(kind.experts) == bool(model.experts)]
    of_family = {kind.family: name for name, kind in reversed(alike)}  # the first
    names = [name for name in (model_type, of_family.get(model.family), *KINDS) if name in KINDS]
    problems = {name: _misfit(name, model) for name in dict.fromkeys(names)}
    found = next((name for name, problem in problems.items() if problem is None), None)
    if found is None:
        raise ValueError(f"a model with these keys cannot be a {names[0]} of Hugging Face: {problems[names[0]]}")
    return found


def _misfit(kind: str, model: Model) -> str | None:
    """Say why a model_type cannot hold a resolved model; None: it can."""
    if KINDS[kind].experts and not model.experts:
        return "its layers are mixtures of experts"
    table = ours.table(model)
    rows = [row for stack in STACKS for row in _rows(kind, model, stack)]
    missing = sorted(_stored_paths(model) - {path for row in rows for path in row.paths})
    unequal = [row.name.format("N") for row in rows if len({table[path].shape for path in row.paths}) > 1]
    if missing or unequal:
        return f"{unequal[0]} holds arrays of one shape" if unequal else f"it has no tensor for {missing[0]}"
    try:
        read = Model(**hugging_face_config.section(hugging_face_config.as_json(kind, model, "float32", {}), kind))
    except ValueError as error:
        return str(error)
    computed, stored = _computed(model), _computed(read)
    return next((f"it has no {key}" for key, value in computed.items() if stored[key] != value), None)


def _computed(model: Model) -> dict[str, Any]:
    """Return what a decoder computes: keys of the section model -> value, or value of each layer."""
    features, rope = model.features, (model.rope_theta, model.rope_scaling)
    is_local = [features.is_local(layer) for layer in range(model.num_layers)]
    has_own = features.has_local_layers and features.rope_local_theta is not None
    ropes = [(features.rope_local_theta, None) if has_own and local else rope for local in is_local]
    return {f"model.{key}": getattr(model, key) for key in SIZES} | {
        "model.num_kv_heads": model.num_kv_heads or model.num_heads,
        "model.experts so": model.experts and model.experts.model_dump(include={*FIXED}),
        "features of that family": [getattr(features, name) for name in FEATURES],
        "model.sliding_window in these layers": [model.sliding_window if local else None for local in is_local],
        "model.rope_theta and model.rope_scaling so": [] if features.learned_positions else ropes,
    }


def _stored_paths(model: Model) -> set[str]:
    """Return the paths of our arrays that folders have: all but constants."""
    return {path for path in ours.table(model) if not path.endswith(f"/{ours.IS_LOCAL}")}


def constants(model: Model) -> dict[tuple[str, int], np.ndarray]:
    """Return our arrays that no folder has, as they follow from the model: path and layer -> float32."""
    if not model.features.has_local_layers:
        return {}
    path = f"{ours.ATTENTION}/{ours.IS_LOCAL}"
    found = {}
    for i in range(model.num_layers):
        place = (ours.of_dense(path), i) if i < model.dense_layers else (path, i - model.dense_layers)
        found[place] = np.full(1, model.features.is_local(i), np.float32)
    return found


def inventory(kind: str, model: Model) -> list[Stored]:
    """Return every tensor of a resolved model that a kind can hold, ends first, then layer by layer."""
    table, of_stacks = ours.table(model), {stack: _rows(kind, model, stack) for stack in STACKS}
    stored = [_stored(row, table, None) for row in of_stacks[ENDS]]
    for i in range(model.num_layers):
        stack, layer = (DENSE, i) if i < model.dense_layers else (LAYERS, i - model.dense_layers)
        stored += [_stored(row._replace(name=row.name.format(i)), table, layer) for row in of_stacks[stack]]
    return stored


def _rows(kind: str, model: Model, stack: str) -> list[Tensor]:
    """Return the tensors of the ends, or of a layer of a stack, with the paths of our arrays there."""
    table, rows = ours.table(model), KINDS[kind].tensors
    if stack == DENSE:
        rows = [row._replace(paths=tuple(map(ours.of_dense, row.paths))) for row in rows]
    return [row for row in rows if table.keys() >= {*row.paths} and table[row.paths[0]].part == stack]


def _stored(row: Tensor, table: Table, layer: int | None) -> Stored:
    first = table[row.paths[0]]
    words = tuple(word.partition("/")[0] for word in first.layout.split())
    groups = tuple(tuple((a or b).split()) for a, b in re.findall(r"\(([^)]*)\)|(\S+)", row.dims))
    sizes = dict(zip(words, first.shape, strict=True)) | {COUNT: len(row.paths)}
    return Stored(row.name, row.paths, layer, groups, words, sizes)


def located(kind: str, model: Model, have: Shapes, origin: str) -> tuple[list[Stored], str | None]:
    """Find every tensor of a model among those of a folder -> the tensors, and the name of a stored copy of the tied
    embedding, if there is one. have: names and shapes in the folder. Raises ValueError that names what differs."""
    prefix = KINDS[kind].prefix
    is_bare = KINDS[kind].tensors[0].name.removeprefix(prefix) in have
    wanted = [x._replace(name=x.name.removeprefix(prefix)) if is_bare else x for x in inventory(kind, model)]
    head = next(row.name for row in KINDS[kind].tensors if row.paths == (ours.HEAD,))
    shapes = {name: shape for x in wanted for name, shape in x.shapes.items()}
    copy = head if head in have and head not in shapes else None
    left = [name for name in have if name not in shapes and not re.fullmatch(KINDS[kind].buffers, name)]
    problems = {
        "lacks": [f"{name} {[*shape]}" for name, shape in shapes.items() if name not in have],
        "has, beside a model of its config.json,": [f"{name} {[*have[name]]}" for name in left if name != copy],
        "has another shape than its config.json says:": [
            f"{name} {[*have[name]]}, not {[*shape]}"
            for name, shape in shapes.items()
            if have.get(name, shape) != shape
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise ValueError(f"{origin} {problem} {', '.join(names[:MAX_NAMED])}{more}; give a whole {kind} model")
    return wanted, copy


def read(stored: Stored, get: Callable[[str, tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    """Return a block of a stored tensor. get(name, index) -> that block of a tensor of the folder."""
    if EXPERT not in stored.name:
        return get(stored.name, index)
    names = [*stored.pieces][index[0]]
    return np.stack([get(name, index[1:]) for name in names])


def part(
    stored: Stored, path: str, index: Sequence[slice], get: Callable[[tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """Return a part of one of our arrays. index: a slice for each of its dims; get(index) -> that block of the stored
    tensor. Asks only for blocks that it returns."""
    chosen = {word: range(*s.indices(stored.sizes[word])) for word, s in zip(stored.words, index, strict=True)}
    number = stored.paths.index(path)
    chosen[COUNT] = range(number, number + 1)
    ranges = [_ranges([(stored.sizes[word], chosen[word]) for word in group]) for group in stored.groups]
    x = _blocks(ranges, get).reshape([len(chosen[word]) for word in stored.flat])
    flat = stored.flat
    if COUNT in flat:
        x = x.squeeze(flat.index(COUNT))
        flat.remove(COUNT)
    return _contiguous(x.transpose([flat.index(word) for word in stored.words]))


def _ranges(dims: Sequence[tuple[int, range]]) -> list[slice]:
    """Return the contiguous slices of a dim that joins others. dims: size and chosen range of each."""
    (_, outer), *inner = dims
    size = prod(size for size, _ in inner)
    if all(len(chosen) == size for size, chosen in inner):
        return [slice(outer.start * size, outer.stop * size)]
    return [slice(i * size + s.start, i * size + s.stop) for i in outer for s in _ranges(inner)]


def _blocks(ranges: Sequence[Sequence[slice]], get: Callable, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Return the blocks of all combinations of slices, put together."""
    if len(index) == len(ranges):
        return get(index)
    blocks = [_blocks(ranges, get, (*index, s)) for s in ranges[len(index)]]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=len(index))


def joined(stored: Stored, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a stored tensor, contiguous, from our arrays of its paths: the inverse of `part`."""
    flat = stored.flat
    order = [stored.words.index(word) for word in flat if word != COUNT]
    arrays = [_contiguous(x.transpose(order)) for x in arrays]
    x = np.stack(arrays, axis=flat.index(COUNT)) if COUNT in flat else arrays[0]
    return x.reshape(stored.shape)


def _contiguous(view: np.ndarray) -> np.ndarray:
    """Return a transposed array as contiguous. Copied in strips: at once, NumPy takes up to three times as long."""
    if view.flags.c_contiguous:
        return view
    copy = np.empty(view.shape, view.dtype)
    for start in range(0, view.shape[-1], STRIP):
        copy[..., start : start + STRIP] = view[..., start : start + STRIP]
    return copy
