"""Model folders of Hugging Face: tensors by name, shape and order of dims, and the keys of config.json. Needs no JAX.

`KINDS` is read in both directions, by model_type. A row of tensors says how a stored tensor consists of arrays of ours:

    Tensor("...q_proj.weight", "(N H) D", (q_DNH,))      the array [D N H], stored as a matrix of N H rows
    Tensor("...c_attn.weight", "D (* N H)", (q, k, v))   three arrays [D N H], side by side

{} is the number of a layer, * counts the arrays. Rotary embeddings pair the first half of a head with the second, here
and there, so no row is permuted. A row whose arrays the model does not have is not stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.config import families
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import decoder_table as ours
from nanotrain_jax.models.parameters import Table

COUNT = "*"
STRIP = 64  # elements
MAX_NAMED = 3  # tensors named in an error message
Shapes = Mapping[str, tuple[int, ...]]  # name -> shape


class Tensor(NamedTuple):
    """A row: a tensor of a model folder."""

    name: str
    dims: str
    paths: tuple[str, ...]  # of our arrays (models/decoder_table.py)


class Kind(NamedTuple):
    """A model_type of config.json."""

    family: families.Name
    architecture: str
    prefix: str  # of tensors; left out in folders of the model without its head
    tensors: tuple[Tensor, ...]
    keys: Mapping[str, str]  # key of config.json -> key of the section model
    defaults: Mapping[str, Any]  # of keys that config.json may leave out, as transformers has; None: that of ours
    fixed: Mapping[str, tuple[Any, ...]]  # keys with the values that we compute; the first is written
    buffers: str  # regular expression: tensors that are no weights


def _layer(name: str, dims: str, *paths: str) -> Tensor:
    return Tensor(f"model.layers.{{}}.{name}", dims, paths)


def _block(name: str, dims: str, *paths: str) -> Tensor:
    return Tensor(f"transformer.h.{{}}.{name}", dims, paths)


LLAMA_TENSORS = (
    Tensor("model.embed_tokens.weight", "V D", (ours.EMBEDDING,)),
    _layer("input_layernorm.weight", "D", f"{ours.NORM_ATTENTION}/gain_D"),
    _layer("self_attn.q_proj.weight", "(N H) D", f"{ours.ATTENTION}/q_DNH"),
    _layer("self_attn.k_proj.weight", "(K H) D", f"{ours.ATTENTION}/k_DKH"),
    _layer("self_attn.v_proj.weight", "(K H) D", f"{ours.ATTENTION}/v_DKH"),
    _layer("self_attn.o_proj.weight", "D (N H)", f"{ours.ATTENTION}/out_NHD"),
    _layer("post_attention_layernorm.weight", "D", f"{ours.NORM_MLP}/gain_D"),
    _layer("mlp.gate_proj.weight", "F D", f"{ours.MLP}/gate_DF"),
    _layer("mlp.up_proj.weight", "F D", f"{ours.MLP}/up_DF"),
    _layer("mlp.down_proj.weight", "D F", f"{ours.MLP}/down_FD"),
    Tensor("model.norm.weight", "D", (f"{ours.NORM_LAST}/gain_D",)),
    Tensor("lm_head.weight", "V D", (ours.HEAD,)),
)
GPT2_TENSORS = (
    Tensor("transformer.wte.weight", "V D", (ours.EMBEDDING,)),
    Tensor("transformer.wpe.weight", "T D", (ours.POSITIONS,)),
    _block("ln_1.weight", "D", f"{ours.NORM_ATTENTION}/gain_D"),
    _block("ln_1.bias", "D", f"{ours.NORM_ATTENTION}/bias_D"),
    _block("attn.c_attn.weight", "D (* N H)", *(f"{ours.ATTENTION}/{name}" for name in ("q_DNH", "k_DKH", "v_DKH"))),
    _block("attn.c_attn.bias", "(* N H)", *(f"{ours.ATTENTION}/bias_{name}" for name in ("q_NH", "k_KH", "v_KH"))),
    _block("attn.c_proj.weight", "(N H) D", f"{ours.ATTENTION}/out_NHD"),
    _block("attn.c_proj.bias", "D", f"{ours.ATTENTION}/bias_out_D"),
    _block("ln_2.weight", "D", f"{ours.NORM_MLP}/gain_D"),
    _block("ln_2.bias", "D", f"{ours.NORM_MLP}/bias_D"),
    _block("mlp.c_fc.weight", "D F", f"{ours.MLP}/up_DF"),
    _block("mlp.c_fc.bias", "F", f"{ours.MLP}/bias_up_F"),
    _block("mlp.c_proj.weight", "F D", f"{ours.MLP}/down_FD"),
    _block("mlp.c_proj.bias", "D", f"{ours.MLP}/bias_down_D"),
    Tensor("transformer.ln_f.weight", "D", (f"{ours.NORM_LAST}/gain_D",)),
    Tensor("transformer.ln_f.bias", "D", (f"{ours.NORM_LAST}/bias_D",)),
    Tensor("lm_head.weight", "V D", (ours.HEAD,)),
)

LLAMA_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
LLAMA = Kind(
    family="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    tensors=LLAMA_TENSORS,
    keys=LLAMA_KEYS,
    defaults={
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    fixed={"hidden_act": ("silu",), "rope_scaling": (None,), "attention_bias": (False,), "mlp_bias": (False,)},
    buffers=r".*rotary_emb\.inv_freq",
)
KINDS: dict[str, Kind] = {
    "llama": LLAMA,
    "mistral": LLAMA._replace(
        architecture="MistralForCausalLM",
        defaults=LLAMA.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        fixed={"hidden_act": ("silu",), "rope_scaling": (None,), "sliding_window": (None,)},
    ),
    "gpt2": Kind(
        family="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        tensors=GPT2_TENSORS,
        keys={
            "n_layer": "num_layers",
            "n_embd": "d_model",
            "n_head": "num_heads",
            "n_inner": "d_ff",
            "vocab_size": "vocab_size",
            "n_positions": "max_seq_len",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
        },
        defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        buffers=r".*\.attn\.(bias|masked_bias)",
    ),
}


class Stored(NamedTuple):
    """A tensor of a folder: a row with sizes, of one layer."""

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
    def flat(self) -> list[str]:
        """The dims of ours in the order of the stored tensor."""
        return [word for group in self.groups for word in group]


def kind_of(model: Model, model_type: str | None = None) -> str:
    """Return the model_type of a model: the given one if it is of this family, else the first that is."""
    of_family = [name for name, kind in KINDS.items() if families.FAMILIES[kind.family] is model.features]
    if not of_family:
        raise ValueError(f"model.family={model.family} has no folder format; use {' or '.join(KINDS)}")
    return model_type if model_type in of_family else of_family[0]


def inventory(kind: str, model: Model) -> list[Stored]:
    """Return every tensor of a resolved model, ends first, then layer by layer. Raises ValueError if its arrays cannot
    be stored so."""
    table = ours.table(model)
    rows = [row for row in KINDS[kind].tensors if table.keys() >= {*row.paths}]
    missing = sorted(table.keys() - {path for row in rows for path in row.paths})
    unequal = [row.name.format("N") for row in rows if len({table[path].shape for path in row.paths}) > 1]
    if missing or unequal:
        what = f"{unequal[0]} holds arrays of one shape" if unequal else f"it has no tensor for {missing[0]}"
        raise ValueError(f"a model with these keys cannot be a {kind} of Hugging Face: {what}")
    ends = [_stored(row, table, None) for row in rows if "{}" not in row.name]
    layers = [_stored(row, table, layer) for layer in range(model.num_layers) for row in rows if "{}" in row.name]
    return ends + layers


def _stored(row: Tensor, table: Table, layer: int | None) -> Stored:
    first = table[row.paths[0]]
    words = tuple(word.partition("/")[0] for word in first.layout.split())
    groups = tuple(tuple((a or b).split()) for a, b in re.findall(r"\(([^)]*)\)|(\S+)", row.dims))
    sizes = dict(zip(words, first.shape, strict=True)) | {COUNT: len(row.paths)}
    return Stored(row.name.format(layer), row.paths, layer, groups, words, sizes)


def located(kind: str, model: Model, have: Shapes, origin: str) -> tuple[list[Stored], str | None]:
    """Find every tensor of a model among those of a folder -> the tensors, and the name of a stored copy of the tied
    embedding, if there is one. have: names and shapes in the folder. Raises ValueError that names what differs."""
    prefix = KINDS[kind].prefix
    is_bare = KINDS[kind].tensors[0].name.removeprefix(prefix) in have
    wanted = [x._replace(name=x.name.removeprefix(prefix)) if is_bare else x for x in inventory(kind, model)]
    head = next(row.name for row in KINDS[kind].tensors if row.paths == (ours.HEAD,))
    shapes = {x.name: x.shape for x in wanted}
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


def section(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the section model of a config.json, every size given. Raises ValueError on what we do not compute."""
    kind, config = _kind(config, origin), _plain(config)
    if config.get("quantization_config") is not None:
        raise ValueError(f"{origin}: quantization_config: weights are quantized; give a folder in bfloat16 or float32")
    for key, values in kind.fixed.items():
        value = config.get(key, kind.defaults.get(key, values[0]))
        if value not in values:
            raise ValueError(f"{origin}: {key}={value!r}: not supported; only {' or '.join(map(repr, values))} is")
    keys: dict[str, Any] = {"family": kind.family}
    for theirs, key in kind.keys.items():
        if config.get(theirs) is None and theirs not in kind.defaults:
            raise ValueError(f"{origin} has no {theirs}; give the config.json of a {config['model_type']} model")
        value = config.get(theirs, kind.defaults.get(theirs))
        keys |= {} if value is None else {key: value}
    head, heads, width = (config.get("head_dim"), keys["num_heads"], keys["d_model"])
    if isinstance(head, int) and isinstance(heads, int) and head * heads != width:
        raise ValueError(f"{origin}: head_dim={head}: not supported; only hidden_size / num_attention_heads is")
    return keys


def _kind(config: Mapping[str, Any], origin: str) -> Kind:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"{origin}: model_type={name!r} is not supported; give a model of {', '.join(KINDS)}")
    return KINDS[name]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without keys that say what is true of any model, and as transformers 4 writes it.

    Version 5 writes rope_parameters for rope_theta and rope_scaling.
    """
    plain = dict(config)
    rope = plain.pop("rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    if "rope_theta" in rope:
        plain["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        plain["rope_scaling"] = rope
    scaling = plain.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default":
        plain["rope_scaling"] = None
    return plain


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config.json names; None if it names none."""
    return config.get("dtype", config.get("torch_dtype"))


def as_json(kind: str, model: Model, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a resolved model. base: a config.json whose other keys stay, e.g. of its tokens."""
    other = {key: value for key, value in _plain(base).items() if key != "dtype"}
    keys = {theirs: getattr(model, key) for theirs, key in KINDS[kind].keys.items()}
    fixed = {key: values[0] for key, values in KINDS[kind].fixed.items() if other.get(key) not in values}
    names = {"architectures": [KINDS[kind].architecture], "model_type": kind, "torch_dtype": dtype}
    return other | names | keys | fixed
