"""The config.json of a model folder of Hugging Face, read as a section model and written of one. Needs no JAX.

Where versions of transformers differ, config.json is read as any writes it, and written as version 4 reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain_jax.config import families
from nanotrain_jax.config.model import RopeScaling
from nanotrain_jax.config.schema import Model
from nanotrain_jax.models.hugging_face_kinds import KINDS, Kind

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # types of layers
ROPE = {  # type -> key of rope_scaling -> key of model.rope_scaling; all but those of yarn must be there
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_seq_len",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_seq_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
ROPE_FIXED = {"truncate": (None, True), "partial_rotary_factor": (None, 1)}  # keys of rope_scaling as `Kind.fixed`


def section(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the section model of a config.json, every size given. Raises ValueError on what we do not compute."""
    kind, config = _kind(config, origin), _plain(config)
    if config.get("quantization_config") is not None:
        raise ValueError(f"{origin}: quantization_config: weights are quantized; give a folder in bfloat16 or float32")
    for key, values in kind.fixed.items():
        _check(key, config.get(key, kind.defaults.get(key, values[0])), values, origin)
    keys: dict[str, Any] = {"family": kind.family}
    for theirs, key in kind.keys.items():
        if config.get(theirs) is None and theirs not in kind.defaults:
            raise ValueError(f"{origin} has no {theirs}; give the config.json of a {config['model_type']} model")
        value = config.get(theirs, kind.defaults.get(theirs))
        keys |= {} if value is None else {key: value}
    if kind.experts:
        keys["experts"] = {key: config.get(theirs, kind.defaults.get(theirs)) for theirs, key in kind.experts.items()}
        keys |= _dense(kind, config, keys["experts"], origin)
    sizes = keys.get("head_dim"), keys["num_heads"], keys["d_model"]
    if all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] == sizes[2]:
        del keys["head_dim"]
    if "query_pre_attn_scalar" in kind.defaults:
        head = config.get("head_dim", kind.defaults["head_dim"])
        value = config.get("query_pre_attn_scalar", kind.defaults["query_pre_attn_scalar"])
        _check("query_pre_attn_scalar", value, [head], origin)
    return keys | _rope_scaling(kind, config, origin) | _windows(kind, config, origin)


def _dense(kind: Kind, config: Mapping[str, Any], experts: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return experts and d_ff of the section model, if layers of a mixture may have an MLP in place of experts."""
    if "mlp_only_layers" not in kind.defaults:
        return {}
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or layers != [*range(len(layers))]:
        raise ValueError(f"{origin}: mlp_only_layers={layers!r}: not supported; only the first layers may be, in order")
    d_ff = config.get("intermediate_size", kind.defaults["intermediate_size"]) if layers else experts["d_ff"]
    return {"experts": {**experts, "first_dense": len(layers)}, "d_ff": d_ff}


def _kind(config: Mapping[str, Any], origin: str) -> Kind:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"{origin}: model_type={name!r} is not supported; give a model of {', '.join(KINDS)}")
    return KINDS[name]


def _check(key: str, value: Any, values: Sequence[Any], origin: str) -> None:
    if value not in values:
        raise ValueError(f"{origin}: {key}={value!r}: not supported; only {' or '.join(map(repr, values))} is")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as transformers 4 writes it.

    Version 5 writes rope_parameters for rope_theta and rope_scaling, of Gemma 3 for each type of layers; and
    num_local_experts for num_experts.
    """
    plain = dict(config)
    pattern = plain.pop("_sliding_window_pattern", None)
    if pattern is not None:
        plain.setdefault("sliding_window_pattern", pattern)
    if "num_local_experts" in plain:
        plain.setdefault("num_experts", plain["num_local_experts"])
    rope = plain.pop("rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    if not rope.keys().isdisjoint({LOCAL, GLOBAL}):
        local, rope = (rope[name] if isinstance(rope.get(name), dict) else {} for name in (LOCAL, GLOBAL))
        plain |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        plain |= {} if _rope_type(local) == "default" else {f"rope_parameters.{LOCAL}": local}
    plain |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if _rope_type(rope) != "default":
        plain["rope_scaling"] = rope
    scaling = plain.get("rope_scaling")
    if isinstance(scaling, dict) and _rope_type(scaling) == "default":
        plain["rope_scaling"] = None
    return plain


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(kind: Kind, config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return rope_scaling of the section model, if a config.json has one (modeling_rope_utils.py of transformers)."""
    for key in (f"rope_parameters.{LOCAL}", *["rope_local_base_freq"] * ("rope_local_base_freq" not in kind.keys)):
        _check(key, config.get(key), [None], origin)
    rope = config.get("rope_scaling")
    if rope is None:
        return {}
    if not isinstance(rope, dict) or "rope_theta" not in kind.keys:
        raise ValueError(f"{origin}: rope_scaling={rope!r}: not supported; leave it out")
    name = _rope_type(rope)
    _check("rope_scaling.rope_type", name, [*ROPE], origin)
    for key, values in ROPE_FIXED.items():
        _check(f"rope_scaling.{key}", rope.get(key), values, origin)
    length = config.get("max_position_embeddings", kind.defaults["max_position_embeddings"])
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or length
    rope = rope | {"original_max_position_embeddings": original}
    if name == "yarn":
        rope |= _of_yarn(rope, length, origin)
    lacking = [key for key in ROPE[name] if rope.get(key) is None]
    if lacking and name != "yarn":
        raise ValueError(f"{origin} has no rope_scaling.{lacking[0]}; {name} needs {', '.join(ROPE[name])}")
    return {"rope_scaling": {"type": name} | {ROPE[name][k]: rope[k] for k in ROPE[name] if k not in lacking}}


def _of_yarn(rope: Mapping[str, Any], length: Any, origin: str) -> dict[str, Any]:
    """Return what transformers derives where yarn has no factor, or mscale in place of attention_factor."""
    numbers = {key: rope.get(key) for key in ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")}
    for key, value in {**numbers, "max_position_embeddings": length}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{origin}: rope_scaling: {key}={value!r} must be a number above 0; correct it")
    factor, original, *scales = numbers.values()
    factor = length / original if factor is None else factor
    if rope.get("attention_factor") is not None or None in scales or factor <= 1:
        return {"factor": factor}
    above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return {"factor": factor, "attention_factor": above / below}


def _windows(kind: Kind, config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return sliding_window and global_layers of the section model, if layers of a config.json may differ in them."""
    if kind.global_layers is None:
        return {}
    layers = config["num_hidden_layers"]
    counted = "sliding_window_pattern" if kind.global_layers == "every" else "max_window_layers"
    has_window = config.get("use_sliding_window", kind.defaults.get("use_sliding_window", True))
    window = config.get("sliding_window", kind.defaults["sliding_window"]) if has_window else None
    number, types = config.get(counted, kind.defaults[counted]), config.get("layer_types")
    for key, value in {"num_hidden_layers": layers, counted: number}.items():
        if not isinstance(value, int) or value < (kind.global_layers == "every"):
            raise ValueError(f"{origin}: {key}={value!r} must be a number of layers; correct it")
    if window is None and kind.global_layers == "every":
        raise ValueError(f"{origin}: sliding_window={window}: not supported; give a number of tokens")
    if isinstance(types, list):
        number = _number(kind, types, number)
    given = f"{kind.global_layers}:{number}"
    if types is not None and types != layer_types(f"first:{layers}" if window is None else given, layers):
        which = "one in N" if kind.global_layers == "every" else "the first"
        raise ValueError(f"{origin}: layer_types: not supported; only {which} may be {GLOBAL}, all without a window")
    if window is None:
        return {}
    if kind.global_layers == "every":
        return {"sliding_window": window, "global_layers": given}
    if number >= layers:
        return {}
    return {"sliding_window": window} | ({"global_layers": given} if number else {})


def _number(kind: Kind, types: Sequence[str], number: int) -> int:
    """Return N of every:N or first:N, as types of layers have it. number: where they say nothing."""
    if kind.global_layers == "first":
        return next((i for i, name in enumerate(types) if name != GLOBAL), len(types))
    return types.index(GLOBAL) + 1 if GLOBAL in types else max(number, len(types) + 1)


def layer_types(global_layers: str, num_layers: int) -> list[str]:
    """Return the type of every layer, of a value of model.global_layers."""
    family = families.LLAMA._replace(global_layers=global_layers)
    return [LOCAL if family.is_local(layer) else GLOBAL for layer in range(num_layers)]


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config.json names; None if it names none."""
    return config.get("dtype", config.get("torch_dtype"))


def as_json(name: str, model: Model, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a resolved model, of a kind that can hold it.

    base: a config.json whose other keys stay, e.g. of its tokens.
    """
    kind = KINDS[name]
    other = {key: value for key, value in _plain(base).items() if key != "dtype"}
    keys = {theirs: getattr(model, key) for theirs, key in kind.keys.items()}
    if kind.experts:
        keys |= {theirs: getattr(model.experts, key) for theirs, key in kind.experts.items()}
        other.setdefault("intermediate_size", model.ffn_width)  # which qwen3_moe asks for, if no layer has an MLP too
    if "mlp_only_layers" in kind.defaults:
        keys["mlp_only_layers"] = [*range(model.dense_layers)]
        keys |= {"intermediate_size": model.d_ff} if model.dense_layers else {}
    if "head_dim" in keys:
        keys["head_dim"] = model.head_width
    if "rope_local_base_freq" in keys:
        keys["rope_local_base_freq"] = model.features.rope_local_theta
    if "query_pre_attn_scalar" in kind.defaults:
        keys["query_pre_attn_scalar"] = model.head_width
    if "rope_theta" in keys:
        keys["rope_scaling"] = _rope_json(model.rope_scaling)
    fixed = {key: values[0] for key, values in kind.fixed.items() if other.get(key) not in values}
    names = {"architectures": [kind.architecture], "model_type": name, "torch_dtype": dtype}
    return other | names | keys | _windows_json(kind, model) | fixed


def _rope_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {theirs: getattr(scaling, key) for theirs, key in ROPE[scaling.type].items()}
    return {"rope_type": scaling.type} | {key: value for key, value in keys.items() if value is not None}


def _windows_json(kind: Kind, model: Model) -> dict[str, Any]:
    """Return the keys that say which layers have a window, where they may differ."""
    if kind.global_layers is None:
        return {}
    layers, window, given = model.num_layers, model.sliding_window, model.features.global_layers
    number = int(given.partition(":")[2] or 0)
    if kind.global_layers == "every":
        types = layer_types(given, layers)
        return {"sliding_window": window, "sliding_window_pattern": number, "layer_types": types}
    number = number if window else layers
    types = layer_types(given if window else f"first:{layers}", layers)
    windows = {"use_sliding_window": bool(window), "sliding_window": window, "max_window_layers": number}
    return windows | {"layer_types": types}
