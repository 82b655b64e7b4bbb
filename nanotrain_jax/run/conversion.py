"""Convert weights between a model folder of Hugging Face and the folder of a run, layer by layer, and check the result.

Memory: one array of one layer, or the embedding, on the way in; one file (`checkpoint.safetensors.SHARD`) on the way
out; one layer in float32 for the comparison of logits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import yaml
from flax import nnx

from nanotrain_jax.checkpoint import by_layer, checksums, compatibility, durable, safetensors
from nanotrain_jax.checkpoint import read as restore
from nanotrain_jax.checkpoint.directory import CHECKPOINTS, latest_step
from nanotrain_jax.config import load as configs
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config, Model
from nanotrain_jax.config.values import with_message
from nanotrain_jax.data import corpus
from nanotrain_jax.data.tokenizer import NAMES_BEGIN, Tokenizer, check_name
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.models import decoder, hugging_face, hugging_face_config
from nanotrain_jax.models.hugging_face import Stored
from nanotrain_jax.models.parameters import DENSE, ENDS, LAYERS
from nanotrain_jax.run import sources
from nanotrain_jax.run.hugging_face import Folder, opened
from nanotrain_jax.run.model_config import CONFIG, ONE_DEVICE, TOKENIZER

# Files that come in and go out as they are, beside config.json.
FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template*", "generation_config.json",
)  # fmt: skip
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
PROMPT = 16  # tokens of the prompt whose logits are compared
ROOM = 1 << 26  # bytes beside weights
TRAINED_TOKENS = 2048  # data.seq_len of a run, at most
Read = Callable[[str, int | None], np.ndarray]  # path, layer -> one of our arrays


def to_run(source: Folder, run: Path, checks: bool) -> Iterator[str]:
    """Write the folder of a run that holds the weights of a model folder at step 0; yield lines about it.

    Raises ValueError or OSError; then nothing is left.
    """
    tokenizer = load_tokenizer(str(source.path)) if (source.path / TOKENIZER).is_file() else None
    config = _config_of_run(source, run, tokenizer)
    meta = compatibility.Meta(
        config=config.to_dict(),
        tokenizer=tokenizer and tokenizer.name,
        data=compatibility.Position(position=0, fingerprint=""),
        tokens=0,
        weights_only=True,
    )
    nbytes = sum(int(np.prod(shape)) for shape in source.shapes.values()) * source.dtype.itemsize
    with _new_folder(run, nbytes) as partial:
        copy_files(source.path, partial)
        durable.write(partial / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False).encode())
        folder = partial / CHECKPOINTS
        folder.mkdir()
        by_layer.create(folder, 0, source.shapes, source.dtype, meta.model_dump())
        weights = by_layer.Weights(folder, 0)
        for path, layer in source.paths:
            weights.write(path, layer, source.read(path, layer))
        if checks:
            weights = by_layer.Weights(folder, 0)
            _compare(source, weights.read)
        by_layer.seal(folder, 0)
    parameters = nbytes // source.dtype.itemsize - len(source.constants)
    yield f"wrote {run}: {source.kind}, {parameters:,} parameters in {source.dtype}, step 0"
    if checks:
        yield f"checked: {len(source.paths)} arrays, {nbytes:,} bytes, read back equal"
    if tokenizer is None:
        yield f"{source.path} has no {TOKENIZER}: the run has none, and cannot read text"


def _config_of_run(source: Folder, run: Path, tokenizer: Tokenizer | None) -> Config:
    """Return the resolved config of a run with these weights. Raises ValueError."""
    compute = str(source.dtype)
    tree = {
        "model": source.model.model_dump(exclude={"attention", "loss_chunk", "factory"}),
        "precision": {"compute": compute} | ({"loss_scale": "dynamic"} if compute == "float16" else {}),
        "data": {"seq_len": min(source.model.max_seq_len, TRAINED_TOKENS)},
        "logging": {"dir": str(run)},
        "checkpoint": {"dir": str(run / CHECKPOINTS)},
    }
    tree["data"] |= {"tokenizer": str(run / TOKENIZER)} if tokenizer else {"source": "synthetic"}
    return resolve(configs.parse(tree), ONE_DEVICE, tokenizer and tokenizer.vocab_size)


def _plain(config: Config) -> dict[str, Any]:
    """Return a config for config.yaml, without a layout: the run takes that of its devices."""
    tree = config.to_dict()
    del tree["parallel"]
    return tree


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _compare(source: Folder, read: Read) -> None:
    """Raise OSError unless all arrays read back as they are in a model folder."""
    for path, layer in source.paths:
        if not _same_bits(source.read(path, layer), read(path, layer)):
            where = path if layer is None else f"{path} of layer {layer}"
            raise OSError(f"{where} does not read back as it was written; check the disk")


def checkpoint_of(run: Path, step: int | None) -> tuple[Path, int]:
    """Return the folder and step of the newest intact checkpoint of a run, or of that step. Raises ValueError."""
    folder, file = run, run / "config.yaml"
    if latest_step(run / CHECKPOINTS) is None and file.is_file():
        folder = Path(configs.load(file).checkpoint.dir)
    return restore.of_run(folder, step, lambda folder, number: (folder, number))


class Export:
    """The weights of a checkpoint as tensors of a model folder. dtype: None: the dtype in which the run computes."""

    def __init__(self, checkpoints: Path, step: int, run: Path, dtype: str | None = None):
        meta = restore.read_meta(checkpoints, step)
        config, self.tokenizer = configs.parse(meta.config), meta.tokenizer
        if not config.is_decoder:
            kind = "vision" if config.vision else f"model.factory={config.model.factory}"
            raise ValueError(f"{run} trained {kind}: only the built-in decoder has a format; give another run")
        self.run, self.model = run, config.model.model_copy(update={"lora": None})
        self.base = safetensors.read_json(run / CONFIG) if (run / CONFIG).is_file() else {}
        self.kind = hugging_face.kind_of(self.model, self.base.get("model_type"))
        self.dtype = jnp.dtype(dtype or config.precision.compute)
        inventory = hugging_face.inventory(self.kind, self.model)
        self.stored = {name: x for x in inventory for name in x.pieces}
        self.shapes = {name: shape for x in inventory for name, shape in x.shapes.items()}
        self.latest: tuple[Stored, np.ndarray] | None = None  # of experts, all of a layer
        self.weights = sources.of_run(checkpoints, step, is_exact=self.dtype == jnp.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values()) * self.dtype.itemsize

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """Return one of our arrays, without padding, in the dtype of the folder."""
        return self.weights.read(path, layer).astype(self.dtype)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor of the model folder."""
        stored = self.stored[name]
        if self.latest is None or self.latest[0] != stored:
            self.latest = stored, hugging_face.joined(stored, [self.read(path, stored.layer) for path in stored.paths])
        expert = stored.pieces[name]
        return self.latest[1] if expert is None else self.latest[1][expert]

    def write(self, folder: Path) -> None:
        """Write the files of a model into a folder that exists. Raises OSError."""
        copy_files(self.run, folder)
        base = self.base or self._tokens(folder)
        config = hugging_face_config.as_json(self.kind, self.model, str(self.dtype), base)
        safetensors.write_json(folder / CONFIG, config)
        if not (folder / GENERATION).exists():
            safetensors.write_json(folder / GENERATION, {key: config[key] for key in TOKEN_IDS if key in config})
        safetensors.write(folder, self.shapes, self.dtype, self.tensor)
        checksums.seal(folder)

    @property
    def summary(self) -> str:
        """What the folder holds, in words."""
        return f"{self.kind}, {self.nbytes // self.dtype.itemsize:,} parameters in {self.dtype}"

    def check(self, folder: Path) -> str:
        """Compare the logits of a prompt, of the run and of the written folder -> what was found. Raises OSError if
        they differ."""
        return _checked(self, opened(folder))

    def _tokens(self, folder: Path) -> dict[str, Any]:
        """Return the token ids for config.json of a run that did not start from one; write tokenizer_config.json.

        Every id is given: readers take the family's for those that are left out.
        """
        ids = dict.fromkeys(TOKEN_IDS)
        if (folder / TOKENIZER).exists():
            tokenizer = load_tokenizer(str(folder))
            others = sorted(tokenizer.stops - {tokenizer.end})
            ids["eos_token_id"] = [tokenizer.end, *others] if others else tokenizer.end
            known = tokenizers.Tokenizer.from_str(tokenizer.files[TOKENIZER])
            named = {} if tokenizer.end is None else {"eos_token": known.id_to_token(tokenizer.end)}
            if tokenizer.begin:
                ids["bos_token_id"] = tokenizer.begin[0]
                named[NAMES_BEGIN] = known.id_to_token(tokenizer.begin[0])
            keys = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.model.max_seq_len}
            if not (folder / TOKENIZER_CONFIG).exists():
                safetensors.write_json(folder / TOKENIZER_CONFIG, keys | named)
        return ids


class Written(Protocol):
    """What `to_folder` writes: a model, or adapters."""

    run: Path
    tokenizer: str | None  # name of the one that the checkpoint was trained with
    nbytes: int
    summary: str

    def write(self, folder: Path) -> None:
        """Write its files into a folder that exists."""

    def check(self, folder: Path) -> str:
        """Compare the files with the run."""


def replace(export: Written, folder: Path) -> None:
    """Write a model folder, in the place of an older one. Raises ValueError or OSError."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    with _new_folder(folder, export.nbytes) as partial:
        export.write(partial)
    shutil.rmtree(old, ignore_errors=True)


def to_folder(export: Written, folder: Path, checks: bool) -> Iterator[str]:
    """Write the folder of a model or of adapters; yield lines about it. Raises ValueError or OSError; then nothing is
    left."""
    if (export.run / TOKENIZER).exists():
        check_name(load_tokenizer(str(export.run)), export.tokenizer, export.run)
    with _new_folder(folder, export.nbytes) as partial:
        export.write(partial)
        found = export.check(partial) if checks else None
    yield f"wrote {folder}: {export.summary}"
    if found:
        yield f"checked: {found}"
    if not (folder / TOKENIZER).exists():
        yield f"{export.run} has no {TOKENIZER}: the folder has none"


def _checked(export: Export, written: Folder) -> str:
    tokens = np.random.default_rng(0).integers(export.model.vocab_size, size=min(PROMPT, export.model.max_seq_len))
    ours, theirs = (
        logits(model, read, tokens) for model, read in ((export.model, export.read), (written.model, written.read))
    )
    if not np.array_equal(ours, theirs, equal_nan=True):
        difference = np.abs(ours - theirs).max()
        raise OSError(f"logits of the written folder differ from the run's by {difference:.3g}; check the disk")
    largest = np.abs(ours).max()
    return f"logits of {len(tokens)} tokens (up to {largest:.3g}), of the run and of the folder as read back, are equal"


def logits(model: Model, read: Read, tokens_T: np.ndarray) -> np.ndarray:
    """Return logits [T V] in float32, of weights that are read layer by layer."""
    model = model.model_copy(update={"attention": "xla"})
    graphs, shapes = decoder.abstract(model)

    def weights(part: str, layer: int | None = None) -> Any:
        def one(path: tuple, _: Any) -> jax.Array:
            return jnp.asarray(read("/".join([part, *(key.key for key in path)]), layer).astype(np.float32))

        return jax.tree_util.tree_map_with_path(one, shapes[part])

    @jax.jit
    def run(weights: Any, x_1TD: jax.Array) -> jax.Array:
        return nnx.merge(graphs.of_layer(weights), weights)(x_1TD, 1)[0]

    ends = nnx.merge(graphs.ends, weights(ENDS))
    x_1TD = ends.embed(jnp.asarray(tokens_T, jnp.int32)[None])
    for stack, count in {DENSE: model.dense_layers, LAYERS: model.main_layers}.items():
        for layer in range(count):
            x_1TD = run(weights(stack, layer), x_1TD)
    return np.asarray(ends.logits(x_1TD)[0])


def copy_files(source: Path, target: Path) -> None:
    """Copy the config.json of a model folder and the files of its tokenizer, as they are. Raises OSError."""
    copy_tokenizer(source, target)
    if (source / CONFIG).exists():
        shutil.copyfile(source / CONFIG, target / CONFIG)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer as they are, with what says how to generate. Raises OSError."""
    for path in sorted({path for name in FILES for path in source.glob(name)}):
        if path.is_dir():  # chat_templates/
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)


@contextmanager
def _new_folder(folder: Path, nbytes: int) -> Iterator[Path]:
    """Yield a folder that appears whole or not at all. nbytes: of weights. Raises ValueError, or OSError if the disk is
    full."""
    parent = next(path for path in (folder.absolute().parent, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes + ROOM:
        raise OSError(f"{folder} needs {nbytes + ROOM:,} bytes, {free:,} are free; free disk space, or choose another")
    try:
        with corpus.new_folder(folder) as partial:
            yield partial
    except OSError as error:
        if error.strerror is None:
            raise
        raise with_message(error, f"{folder} cannot be written ({error.strerror}); choose another folder") from None
