"""The config of a run whose model is that of a model folder of Hugging Face: checkpoint.resume=hf:FOLDER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanotrain_jax.checkpoint.compatibility import SAME_RESULT
from nanotrain_jax.checkpoint.safetensors import read_json
from nanotrain_jax.config import load as configs
from nanotrain_jax.config.experts import fixed
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.config.values import HUGGING_FACE, expanded
from nanotrain_jax.models import hugging_face_config

CONFIG, TOKENIZER = "config.json", "tokenizer.json"  # files of a model folder
ONE_DEVICE = {"pipe": 1, "replica": 1, "data": 1, "context": 1, "tensor": 1}
PLANNED_TOKENS = 4096  # data.seq_len without a config, at most


def folder_of(resume: str | None) -> Path | None:
    """Return the folder of a value hf:FOLDER of checkpoint.resume; None for others."""
    is_one = isinstance(resume, str) and resume.startswith(HUGGING_FACE)
    return Path(expanded(resume.removeprefix(HUGGING_FACE))) if is_one else None


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Load a config as `config.load.load`, with the model of checkpoint.resume=hf:FOLDER. path: as of `read`."""
    return configs.finish(read(path, overrides), path)


def read(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a config as `config.load.read`, with the model of checkpoint.resume=hf:FOLDER.

    path: a YAML file, hf:FOLDER or a config.json: then training starts from the weights of the folder.
    """
    source = Path(path) if Path(path).name == CONFIG else folder_of(path)
    if source is None:
        return _completed(configs.read(path, overrides))
    folder = source.parent if source.name == CONFIG else source
    model = hugging_face_config.section(read_json(folder / CONFIG), str(folder / CONFIG))
    tokens = min(resolved_model(model).max_seq_len, PLANNED_TOKENS)
    tree = {"model": model, "data": {"seq_len": tokens}, "checkpoint": {"resume": f"{HUGGING_FACE}{folder}"}}
    return _completed(configs.nested(overrides, tree))


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a config with the model that checkpoint.resume=hf:FOLDER has, and its tokenizer.

    Raises ValueError if a key of model contradicts it.
    """
    checkpoint, model = tree.get("checkpoint") or {}, tree.get("model") or {}
    if not (isinstance(checkpoint, dict) and isinstance(model, dict)):
        return tree  # `parse` says what is wrong
    folder = folder_of(checkpoint.get("resume"))
    if folder is None:
        return tree
    known = hugging_face_config.section(read_json(folder / CONFIG), str(folder / CONFIG))
    given = {key: value for key, value in model.items() if value is not None}
    check_model(given, resolved_model(known), folder)
    whole = {key: value | given.get(key, {}) for key, value in known.items() if isinstance(value, dict)}
    return tree | {"model": known | given | whole, "data": _with_tokenizer(tree.get("data"), folder)}


def check_model(given: Mapping[str, Any], model: Model, folder: Path) -> None:
    """Raise ValueError if a key of a section model contradicts the model of a folder."""
    free = SAME_RESULT | {"lora"} | (set() if model.features.learned_positions else {"max_seq_len"})
    for key, value in given.items():
        theirs = model.model_dump().get(key, value)
        both = isinstance(value, dict) and isinstance(theirs, dict)
        whole = theirs | value if both else value
        is_same = fixed(whole) == fixed(theirs) if both and key == "experts" else whole == theirs
        if key not in free and not is_same:
            raise ValueError(
                f"model.{key}={value}, but {folder / CONFIG} says {theirs}; leave model.{key} out, or start from "
                "other weights (checkpoint.resume)"
            )


def _with_tokenizer(data: Any, folder: Path) -> Any:
    """Return the section data with the tokenizer of a folder, if it names none and reads text."""
    keys = data or {}
    if not isinstance(keys, dict) or keys.get("tokenizer") is not None or not (folder / TOKENIZER).is_file():
        return data
    is_text = str(keys.get("source", "stdlib")).partition(":")[0] in ("stdlib", "text", "chat", "pairs")
    return keys | {"tokenizer": str(folder / TOKENIZER)} if is_text else data


def resolved_model(section: Mapping[str, Any]) -> Model:
    """Return a section model with every size. Raises ValueError."""
    return resolve(configs.parse({"model": section, "data": {"seq_len": 1}}), ONE_DEVICE).model
