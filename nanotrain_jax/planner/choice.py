"""Choose a layout: what a search may change and where it starts; `parallel: auto`, for the devices that are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from nanotrain_jax.config.load import read
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import hardware
from nanotrain_jax.data import corpus, token_folder, tokenizer
from nanotrain_jax.planner import layouts, search, training_stages
from nanotrain_jax.planner.estimate import MEMORY_FRACTION, Estimate

# Searched keys of parallel -> default; a layout is written without those that have it.
DEFAULTS = {"pipe": 1, "replica": 1, "expert": 1, "context": 1, "tensor": 1, "zero": 0, "chunks": 1, "schedule": "1f1b"}
DEFAULTS |= {"microbatches": 1, "context_attention": "ring"}


def keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the searched keys in nested data: "section.key" -> value."""
    flat = {f"{section}.{key}": value for section, part in tree.items() for key, value in (part or {}).items()}
    return {key: value for key, value in flat.items() if key in search.SEARCHED}


def beside_auto(config: Config) -> dict[str, Any]:
    """Return the searched keys that are given beside `parallel: auto`, which stay as they are."""
    given = {f"parallel.{key}": getattr(config.parallel, key) for key in config.parallel.model_fields_set}
    return {key: value for key, value in given.items() if key in search.SEARCHED and value != -1}


def layout_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the searched keys of a config that has a layout, as nested data, without defaults."""
    p = config.parallel
    layout = {key.split(".")[1]: getattr(p, key.split(".")[1]) for key in search.SEARCHED if key.startswith("parallel")}
    if p.pipe == 1:
        del layout["vocab_over_pipe"]
    tree = {"parallel": {key: value for key, value in layout.items() if DEFAULTS.get(key) != value}}
    tree["memory"] = {"remat": config.memory.remat}
    return tree | ({"model": {"loss_chunk": config.model.loss_chunk}} if config.model.loss_chunk else {})


def check_searched(parallel: Mapping[str, Any]) -> None:
    """Raise ValueError for what a search would drop. parallel: the keys that are given for it."""
    if parallel.get("prefetch") or parallel.get("grad_reduce", "after_backward") == "per_layer":
        name = "prefetch" if parallel.get("prefetch") else "grad_reduce"
        raise ValueError(f"parallel.{name} is not searched; remove it, and try it with the chosen layout")


def for_devices(config: Config, devices: Sequence[jax.Device]) -> Estimate:
    """Return the best layout of a config with `parallel: auto` on devices of one kind.

    Raises ValueError if the planner does not know the devices or the model, or if nothing fits.
    """
    check_supported(config, chooses=True)
    check_searched(config.parallel.model_dump())
    kind = devices[0].device_kind
    gpu = hardware.SIMULATED if devices[0].platform == "cpu" else hardware.name_of(kind)
    if gpu is None:
        raise ValueError(
            f"parallel: auto: the planner does not know {kind}; give the sizes of the mesh, e.g. "
            f"parallel.data={len(devices)}"
        )
    of_stage = training_stages.config_of(config, None)
    return best(of_stage, gpu, len(devices), MEMORY_FRACTION, beside_auto(config)).best[0]


def best(config: Config, gpu: str, gpus: int, memory_fraction: float, fixed: Mapping[str, Any]) -> search.SearchResult:
    """Search the layouts of a config. fixed: as in `search.search`. Raises ValueError if nothing fits."""
    found = search.search(neutral(config, vocabulary(config)), gpu, gpus, memory_fraction, fixed)
    if not found.best:
        raise ValueError(search.why_nothing_fits(found, gpu, gpus, memory_fraction, fixed))
    return found


def adopted(config: Config, layout: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a config with the searched keys of a layout (nested data; a key left out has its default)."""
    p = {"data": 1, "vocab_over_pipe": False} | DEFAULTS | dict(layout["parallel"])
    p = {key: value for key, value in p.items() if f"parallel.{key}" in search.SEARCHED}
    p |= {"expert_exchange": layouts.exchange(config, p["expert"])}
    config = config.replace("parallel", auto=False, **p).replace("memory", remat=layout["memory"]["remat"])
    return config.replace("model", loss_chunk=layout.get("model", {}).get("loss_chunk", 0))


def as_yaml(layout: Mapping[str, Any]) -> str:
    """Return a layout as one line of YAML per section."""
    return yaml.safe_dump(dict(layout), default_flow_style=None, sort_keys=False, width=1000).rstrip()


def check_supported(config: Config, chooses: bool) -> None:
    """Raise ValueError unless there are closed forms of the config; chooses: also of other layouts of it."""
    if not config.is_built_in:
        raise ValueError(
            "model.factory: the planner supports only the built-in models; remove model.factory, or train without a "
            "plan"
        )
    if config.optimizer.factory:
        raise ValueError(
            f"optimizer.factory={config.optimizer.factory}: the size of its state is not known; plan with "
            "optimizer.factory=null, which counts the two moments of AdamW"
        )
    if config.vision:
        check_vision(config, chooses)


def check_vision(config: Config, chooses: bool) -> None:
    """Raise ValueError for what has no closed form with an encoder of pictures."""
    if chooses:
        raise ValueError(
            "vision: layouts of an encoder of pictures are not searched; give the sizes of the mesh, e.g. "
            "parallel.data=8, and leave --choose out"
        )
    for key in ("offload_optimizer", "offload_params", "offload_activations"):
        if getattr(config.memory, key) != "none":
            raise ValueError(
                f"vision with memory.{key}={getattr(config.memory, key)}: offload with an encoder has no closed form; "
                f"plan with memory.{key}=none"
            )


def kind_of_gpu(name: str | None, config: Config) -> str:
    """Return the name of the GPU; a YAML file is first added to hardware.GPUS. Raises ValueError, OSError."""
    if name is None:
        return hardware.SIMULATED if config.runtime.simulate else "h100"
    if Path(name).suffix not in (".yaml", ".yml"):
        return name
    hardware.add(Path(name).stem, read(name, option="--gpu"))
    return Path(name).stem


def vocabulary(config: Config) -> int | None:
    """Return the tokenizer's vocabulary size if known without reading the data. Raises ValueError, OSError."""
    sources = [part.source for part in config.data.parts] or [config.data.source]
    kind, _, folder = next((s for s in sources if s.startswith("tokens:")), sources[0]).partition(":")
    if kind == "tokens" and Path(folder).exists():
        if token_folder.is_sharded(Path(folder)):
            return token_folder.read_header(Path(folder), f"data.source={config.data.source!r}").vocab_size
        return corpus.read(folder, verify=False).vocab_size
    if kind not in ("stdlib", "text", "chat", "pairs"):
        return None
    return tokenizer.load(config.data.tokenizer or "bytes", config.data.end_token, config.data.begin_token).vocab_size


def neutral(config: Config, vocab: int | None) -> Config:
    """Return the config on one device with the default layout and offload as configured: where a search starts."""
    plain = {"auto": False, "microbatches": 1, "chunks": 1, "schedule": "1f1b", "prefetch": False}
    plain |= {"grad_reduce": "after_backward", "expert_exchange": "padded"}
    one = dict.fromkeys(config.parallel.axes, 1)
    on_device = {"offload_params": "none", "offload_activations": "none"}  # they require ZeRO 3 and a remat policy
    together = {"sync_every": 0, "compress": "none", "full_sync_steps": 0}  # they require several replicas
    plainest = config.replace("parallel", **plain, **together).replace("memory", remat="none", **on_device)
    plainest = plainest.replace("train", **layouts.OF_MICROBATCHES)
    resolved = resolve(plainest.replace("model", loss_chunk=0), one, vocab)
    kept = {key: getattr(config.parallel, key) for key in (*together, "expert_exchange")}
    resolved = resolved.replace("parallel", **kept)
    resolved = resolved.replace("train", **{key: getattr(config.train, key) for key in layouts.OF_MICROBATCHES})
    return resolved.replace("memory", **{key: getattr(config.memory, key) for key in on_device})
