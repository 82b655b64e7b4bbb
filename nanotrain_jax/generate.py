"""Generate text with a trained model: `python -m nanotrain_jax.generate --run DIR --prompt TEXT [options]`

Runs on one device, whatever the layout of the training run. Short rather than fast: there is no key/value cache, so
each token takes a forward over the whole window. Exit codes: 0 done; 2 invalid request (one line on stderr).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin()
    shell.announce(sys.argv[1:], sys.stderr)

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from nanotrain_jax.checkpoint.directory import latest_step
from nanotrain_jax.checkpoint.read import load_params
from nanotrain_jax.config.load import Parser, at_least, path_argument, refuse
from nanotrain_jax.config.load import load as load_config
from nanotrain_jax.config.schema import Config
from nanotrain_jax.data import batches
from nanotrain_jax.data.tokenizer import TOKENIZER, Tokenizer, text_decoder
from nanotrain_jax.data.tokenizer import load as load_tokenizer
from nanotrain_jax.models import decoder as model
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.parallel import remat
from nanotrain_jax.run import shell

MIN_TEMPERATURE = 1e-6  # below: greedy
INCOMPLETE = "\ufffd"  # at the end of a text: part of a multi-byte character


class Sampling(NamedTuple):
    """Sampling options. temperature 0: greedy; else sample from the top_k most likely tokens."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; an invalid request gives one line on stderr and exit code 2."""
    options = parse(argv)
    meshes.pin()
    sampling = Sampling(options.tokens, options.temperature, options.top_k, options.seed)
    try:
        params, config, tokenizer = load(Path(options.run), options.step)
        prompt = encode(options.prompt, tokenizer)
    except (ValueError, OSError) as error:
        return refuse(error)
    sys.stdout.reconfigure(errors="replace")  # the terminal encoding may lack a character
    print(options.prompt, end="", flush=True)
    for text in as_text(generate(params, config, prompt, tokenizer.vocab_size, sampling), prompt, tokenizer):
        print(text, end="", flush=True)
    print()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 on an error."""
    parser = Parser(prog="python -m nanotrain_jax.generate", description="Generate text with a trained model.")
    parser.add_argument("--run", type=path_argument, required=True, metavar="DIR", help="folder of a run (logging.dir)")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="generate at most so many (default: 200)")
    parser.add_argument("--temperature", type=at_least(0, float), default=0.8, help="0: greedy (default: 0.8)")
    parser.add_argument("--top-k", type=at_least(1), default=50, help="sample from the k most likely (default: 50)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="random seed of the sampling (default: 0)")
    parser.add_argument("--step", type=at_least(0), help="step of the checkpoint to load (default: the newest)")
    return parser.parse_args(argv)


def load(run: Path, step: int | None) -> tuple[Any, Config, Tokenizer]:
    """Load parameters (as host arrays), config and tokenizer of a run. Raises ValueError or OSError."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"--run={str(run)!r} has no config.yaml; give the folder of a run (logging.dir)")
    saved = load_config(run / "config.yaml")
    if not saved.is_decoder:
        kind = "vision" if saved.vision else f"model.factory={saved.model.factory}"
        raise ValueError(f"--run={str(run)!r} trained {kind}: only the built-in decoder can generate; give another run")
    if saved.runtime.simulate:
        jax.config.update("jax_platforms", "cpu")
    tokenizer = tokenizer_of(run, saved)
    is_inside = Path(saved.checkpoint.dir) == Path(saved.logging.dir) / "checkpoints"
    moved = run / "checkpoints"  # valid also if the run's folder was moved
    is_inside = is_inside and latest_step(moved) is not None
    params, config = load_params(moved if is_inside else saved.checkpoint.dir, step)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {config.model.vocab_size}: it was "
            f"trained with another tokenizer; put its tokenizer.json at {run / TOKENIZER}"
        )
    return params, config, tokenizer


def tokenizer_of(run: Path, config: Config) -> Tokenizer:
    """Return the tokenizer that a run was trained with. Raises ValueError or OSError."""
    if config.data.source == "synthetic":
        raise ValueError(
            f"--run={str(run)!r} was trained with data.source=synthetic, which is not text; give another run"
        )
    copy = run / TOKENIZER  # the original may have been removed
    is_bytes = config.data.tokenizer in (None, "bytes") and not config.data.source.startswith("tokens:")
    return load_tokenizer(str(copy)) if copy.exists() and not is_bytes else batches.tokenizer_of(config.data)


def encode(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt. Raises ValueError if there are none."""
    (ids,) = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
    if not len(ids):
        raise ValueError(f"--prompt={prompt!r} gives no tokens with the tokenizer of this run; give some text")
    return ids.tolist()


def as_text(ids: Iterable[int], prompt: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of generated tokens as they arrive, until a token that ends a text."""
    decode = text_decoder(tokenizer)
    seen = list(prompt)
    printed = decode(seen).rstrip(INCOMPLETE)
    for token in ids:
        if token in tokenizer.stops:
            break
        seen.append(token)
        text = decode(seen).rstrip(INCOMPLETE)
        yield text[len(printed) :]
        printed = text
    yield decode(seen)[len(printed) :]


def generate(params: Any, config: Config, prompt: Sequence[int], vocab_size: int, sampling: Sampling) -> Iterator[int]:
    """Yield the ids of generated tokens, all below vocab_size. Compiles once.

    params: unsharded, with a possibly padded vocabulary. The model sees at most the last model.max_seq_len tokens, at
    positions from 0.
    """
    device = jax.devices()[0]
    decoder = config.model.model_copy(update={"attention": "auto"})  # the run's kernel may need another device
    kernel = model.attention_kernel(decoder, jnp.dtype(config.precision.compute), device)
    graphs, _ = model.abstract(decoder.model_copy(update={"attention": kernel}))
    params = jax.device_put(params, device)

    @jax.jit
    def next_token(params: Any, tokens_1T: jax.Array, last: jax.Array, draw: jax.Array) -> jax.Array:
        return choose(logits(graphs, params, tokens_1T, last)[:vocab_size], sampling, draw)

    ids, length = list(prompt), min(decoder.max_seq_len, len(prompt) + sampling.tokens)
    for draw in range(sampling.tokens):
        window = ids[-length:]
        tokens_1T = np.zeros((1, length), np.int32)
        tokens_1T[0, : len(window)] = window  # attention is causal: padding after it has no effect
        ids.append(int(next_token(params, tokens_1T, len(window) - 1, draw)))
        yield ids[-1]


def logits(graphs: model.Graphs, params: Any, tokens_1T: jax.Array, last: jax.Array) -> jax.Array:
    """params, tokens[1 T], index of the last valid token -> float32 logits[V] of the next token"""
    ends = nnx.merge(graphs.ends, params["ends"])

    def run(x_1TD: jax.Array, weights: Any) -> jax.Array:
        return nnx.merge(graphs.layer, weights)(x_1TD, 1)

    x_1TD = remat.scan(run, ends.embed(tokens_1T), params["layers"], remat.Policy())
    return ends.logits(lax.dynamic_slice_in_dim(x_1TD, last, 1, axis=1))[0, 0]


def choose(logits_V: jax.Array, sampling: Sampling, draw: jax.Array) -> jax.Array:
    """logits[V], index of the draw -> token id"""
    if sampling.temperature < MIN_TEMPERATURE:
        return jnp.argmax(logits_V)
    top_K, ids_K = lax.top_k(logits_V, min(sampling.top_k, len(logits_V)))
    key = jax.random.fold_in(jax.random.key(sampling.seed), draw)
    return ids_K[jax.random.categorical(key, top_K / sampling.temperature)]


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax
    sys.exit(shell.run(main))
