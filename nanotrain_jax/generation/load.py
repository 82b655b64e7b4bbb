"""Models for generation and evaluation, laid out over the devices that are here: of a run, or of a model folder.

Weights are read onto the mesh: a device holds its shards and reads no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.directory import latest_step
from nanotrain_jax.checkpoint.safetensors import read_json
from nanotrain_jax.config import load as configs
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.data import batches
from nanotrain_jax.data.tokenizer import TOKENIZER, Tokenizer, check_name
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.generation.engine import Engine, apart, split_up
from nanotrain_jax.models import factory
from nanotrain_jax.models.contract import LAYERS, Model
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.run import hugging_face, sources
from nanotrain_jax.step.plan import specs_over_pipe_and_tensor
from nanotrain_jax.step.state import State

GENERATION = "generation_config.json"
NOT_COMPUTED = {  # keys of that file that change the text -> the value at which they do not, besides none
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "dola_layers": None,
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "guidance_scale": 1,
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None, "force_words_ids": None, "constraints": None, "sequence_bias": None, "token_healing": False,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "forced_decoder_ids": None, "exponential_decay_length_penalty": None, "watermarking_config": None,
}  # fmt: skip


class Placement(NamedTuple):
    """Where and how a model runs.

    tensor: devices that share its heads; None: as many as divide them. dtype: of weights and cache; None: bfloat16 on
    GPUs, float32 on CPUs.
    """

    tensor: int | None = None
    dtype: str | None = None


class Loaded(NamedTuple):
    """A model ready to run.

    config: of the model on its mesh. folder: of the run or model folder, whose files say how to generate. step: of the
    run's checkpoint.
    """

    engine: Engine
    tokenizer: Tokenizer
    config: Config
    folder: Path
    step: int | None = None

    @property
    def context(self) -> int:
        """Return the tokens of a row at most."""
        return self.config.model.max_seq_len


def of_run(run: Path, step: int | None, placement: Placement) -> Loaded:
    """Load the model of a run. step: of the checkpoint; None: the newest. Raises ValueError or OSError."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"--run={str(run)!r} has no config.yaml; give the folder of a run (logging.dir)")
    saved = configs.load(run / "config.yaml")
    if saved.vision:
        raise ValueError(f"--run={str(run)!r} trained a model with pictures, which cannot generate; give another run")
    if saved.runtime.simulate:
        jax.config.update("jax_platforms", "cpu")
    tokenizer = tokenizer_of(run, saved)
    is_inside = Path(saved.checkpoint.dir) == Path(saved.logging.dir) / "checkpoints"
    moved = run / "checkpoints"  # valid also if the run's folder was moved
    is_inside = is_inside and latest_step(moved) is not None
    use = partial(_of_checkpoint, run, tokenizer, placement)
    return restore.of_run(moved if is_inside else saved.checkpoint.dir, step, use)


def _of_checkpoint(run: Path, tokenizer: Tokenizer, placement: Placement, folder: Path, step: int) -> Loaded:
    meta = restore.read_meta(folder, step)
    saved = configs.parse(meta.config)
    config, mesh, model = build(saved.model.model_dump() | {"lora": None}, placement)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {config.model.vocab_size}: it was "
            f"trained with another tokenizer; put its tokenizer.json at {run / TOKENIZER}"
        )
    check_name(tokenizer, meta.tokenizer, run)
    types = abstract(model, config, mesh)
    if saved.train.lora:
        params = sources.on_mesh(sources.of_run(folder, step), types, None)
        engine = Engine(model, mesh, split_up(model, params), config.precision.compute)
        return Loaded(engine, tokenizer, config, run, step)
    wanted = State(*[None] * len(State._fields))._replace(params=types)

    def is_padded(path: str) -> bool:  # layers too, if stages had different numbers of them
        return path.startswith(f"params/{LAYERS}/") or model.is_padded(path)

    params = restore.read_state(folder, step, wanted, is_padded).params
    return Loaded(Engine(model, mesh, split_up(model, params), config.precision.compute), tokenizer, config, run, step)


def tokenizer_of(run: Path, config: Config) -> Tokenizer:
    """Return the tokenizer that a run was trained with. Raises ValueError or OSError."""
    if config.data.kind == "synthetic":
        raise ValueError(
            f"--run={str(run)!r} was trained with data.source=synthetic, which is not text; give another run"
        )
    copy = run / TOKENIZER  # the original may have been removed
    is_bytes = config.data.tokenizer in (None, "bytes") and "tokens" not in config.data.kinds
    return load_tokenizer(str(copy)) if copy.exists() and not is_bytes else batches.tokenizer_of(config.data)


def of_folder(path: Path, placement: Placement) -> Loaded:
    """Load a model folder of Hugging Face. Raises ValueError or OSError."""
    folder = hugging_face.opened(path)
    tokenizer = load_tokenizer(str(path), key="--hf", others="a model folder")
    if tokenizer.vocab_size > folder.model.vocab_size:
        raise ValueError(
            f"{path / TOKENIZER} has {tokenizer.vocab_size} ids, but the model has {folder.model.vocab_size}: it "
            "belongs to another model; put the model's own there"
        )
    config, mesh, model = build(folder.model.model_dump(), placement)
    params = sources.on_mesh(folder, abstract(model, config, mesh), None)
    return Loaded(Engine(model, mesh, split_up(model, params), config.precision.compute), tokenizer, config, path)


def build(
    section: Mapping[str, Any], placement: Placement, devices: Sequence[jax.Device] | None = None
) -> tuple[Config, Mesh, Model]:
    """Lay a model out over devices: tensor over as many as its heads allow, data over the rest.

    section: the keys of `model`, with every size. devices: default all. Raises ValueError.
    """
    devices = devices or jax.devices()
    on_cpu = devices[0].platform == "cpu"
    tensor = placement.tensor or most_shards(section, len(devices))
    mesh = meshes.make(tensor=tensor, data=-1, devices=devices)
    tree = {
        "model": dict(section) | {"attention": "xla", "grouped_matmul": "padded"},  # of training; decoding has its own
        "parallel": {"tensor": tensor, "data": mesh.shape["data"], "sequence_parallel": False},
        "precision": {"compute": placement.dtype or ("float32" if on_cpu else "bfloat16")},
        "data": {"source": "synthetic", "seq_len": 1, "batch_size": mesh.shape["data"]},
        "train": {"lora": section.get("lora")},
    }
    config = resolve(configs.parse(tree), mesh.shape)
    model = factory.make(config, mesh)
    if model.decode is None:
        raise ValueError(
            f"model.factory={config.model.factory} gives a model without decode, which generation and evaluation need; "
            "set it (nanotrain_jax.Model.decode)"
        )
    return config, mesh, model


def most_shards(section: Mapping[str, Any], devices: int) -> int:
    """Return the most devices that can share the heads and widths of a model."""
    if section.get("factory"):
        return 1
    heads, widths = section["num_heads"], [section["d_ff"]]
    if section.get("experts"):
        widths.append(section["experts"]["d_ff"])
    kv = section.get("num_kv_heads") or heads

    def fits(tensor: int) -> bool:
        is_whole = all(size % tensor == 0 for size in (devices, heads, *widths))
        return is_whole and not (kv % tensor and tensor % kv)

    return max(filter(fits, range(1, devices + 1)))


def abstract(model: Model, config: Config, mesh: Mesh) -> Tree:
    """Return the types of the weights, with their shardings."""
    dtype = jnp.dtype(config.precision.compute)

    def place(x: jax.ShapeDtypeStruct, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, model.shapes, specs_over_pipe_and_tensor(model, mesh))


def split_types(model: Model, types: Tree) -> Tree:
    """Types of weights -> those of `engine.split_up`, for programs that are only compiled."""

    def of_one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*x.sharding.spec[1:])
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=NamedSharding(x.sharding.mesh, spec))

    return apart(model, types, of_one)


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json; {} if there is none. Raises ValueError or OSError."""
    path = folder / GENERATION
    return read_json(path) if path.is_file() else {}


def not_computed(saved: Mapping[str, Any]) -> str:
    """Return the keys of generation_config.json that would change the text, with values, as text."""
    none = None, [], {}
    active = {key: saved.get(key) for key, value in NOT_COMPUTED.items() if saved.get(key) not in (*none, value)}
    return ", ".join(f"{key}={value!r}" for key, value in active.items())
