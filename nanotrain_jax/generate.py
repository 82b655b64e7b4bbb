"""`python -m nanotrain_jax.generate --run runs/quickstart --prompt "def " [options]`: read what a trained model writes.

On one device, whatever the layout of the run was; small, not fast: each token takes a forward over the whole window.
Exit codes: 0 done; 2 the request is wrong (one line on stderr).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax import loading

    loading.announce(sys.argv[1:], sys.stderr)

import argparse
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax import lax

from nanotrain_jax import model
from nanotrain_jax.config import Config
from nanotrain_jax.parallel import remat
from nanotrain_jax.runtime import corpus, data, request
from nanotrain_jax.runtime.checkpoint import latest_step
from nanotrain_jax.runtime.restore import load_params

COLDEST = 1e-6  # a temperature below is 0
INCOMPLETE = "\ufffd"  # at the end of a text: part of a character


class Sampling(NamedTuple):
    """How tokens are chosen. temperature 0: the likeliest; else at random among the top_k likeliest."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, print the prompt and what follows; turn what is wrong into one line and exit code 2."""
    options = parse(argv)
    sampling = Sampling(options.tokens, options.temperature, options.top_k, options.seed)
    try:
        params, config, tokenizer = load(Path(options.run), options.step)
        prompt = encode(options.prompt, tokenizer)
    except (ValueError, OSError) as error:
        return request.refuse(error)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    print(options.prompt, end="", flush=True)
    for text in as_text(generate(params, config, prompt, tokenizer.vocab_size, sampling), prompt, tokenizer):
        print(text, end="", flush=True)
    print()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Exits with 2 if they are wrong."""
    parser = request.Parser(
        prog="python -m nanotrain_jax.generate", description="Continue a text with a trained model."
    )
    parser.add_argument("--run", type=request.path_argument, required=True, help="folder of the run (its logging.dir)")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=_at_least(int, 1), default=200, help="at most; default: %(default)s")
    parser.add_argument(
        "--temperature", type=_at_least(float, 0), default=0.8, help="0: the likeliest token; default: %(default)s"
    )
    parser.add_argument(
        "--top-k", type=_at_least(int, 1), default=50, help="choose among the k likeliest tokens; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=_at_least(int, 0), default=0, help="the same seed gives the same text; %(default)s"
    )
    parser.add_argument("--step", type=_at_least(int, 0), help="of the checkpoint; default: the newest")
    return parser.parse_args(argv)


def _at_least(kind: type, least: int) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < 1 << 31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {(1 << 31) - 1}")
        return value

    return number


def load(run: Path, step: int | None) -> tuple[Any, Config, corpus.Tokenizer]:
    """Load parameters (host arrays), config of the checkpoint and tokenizer. Raises ValueError or OSError."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"--run={str(run)!r} has no config.yaml; give the folder of a run (its logging.dir)")
    of_run = request.load(run / "config.yaml")
    if of_run.model.factory:
        raise ValueError(
            f"--run={str(run)!r} trained model.factory={of_run.model.factory}, and only the decoder can generate; "
            "give another run"
        )
    if of_run.runtime.simulate:
        jax.config.update("jax_platforms", "cpu")
    tokenizer = tokenizer_of(run, of_run)
    own = run / "checkpoints"  # also where the folder was moved
    params, config = load_params(own if latest_step(own) is not None else of_run.checkpoint.dir, step)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model {config.model.vocab_size}: it is another "
            f"one; put the tokenizer.json of this run at {run / data.TOKENIZER}"
        )
    return params, config, tokenizer


def tokenizer_of(run: Path, config: Config) -> corpus.Tokenizer:
    """Find the tokenizer that a run was trained with. Raises ValueError or OSError."""
    if config.data.source == "synthetic":
        raise ValueError(
            f"--run={str(run)!r} was trained with data.source=synthetic, which is no text; give another run"
        )
    kept, own = run / data.TOKENIZER, data.tokenizer_file(config.data)
    is_bytes = own is None and not config.data.source.startswith("tokens:")  # a folder of tokens may be gone by now
    path = kept if kept.exists() and not is_bytes else own
    return corpus.tokenizer(str(path or "bytes"))


def encode(prompt: str, tokenizer: corpus.Tokenizer) -> list[int]:
    """Return the token ids of a prompt. Raises ValueError if there are none."""
    (ids,) = tokenizer.encode([prompt.encode("utf-8", "surrogateescape")])
    if not len(ids):
        raise ValueError(f"--prompt={prompt!r} holds no token of this run's tokenizer; give some text to continue")
    return ids.tolist()


def as_text(ids: Iterable[int], prompt: Sequence[int], tokenizer: corpus.Tokenizer) -> Iterator[str]:
    """Yield the text of the tokens that follow a prompt as they come, until the end of a document."""
    decode = text_decoder(tokenizer)
    seen, shown = list(prompt), decode(list(prompt)).rstrip(INCOMPLETE)
    for number in ids:
        if number == tokenizer.end:
            break
        seen.append(number)
        text = decode(seen).rstrip(INCOMPLETE)
        yield text[len(shown) :]
        shown = text
    yield decode(seen)[len(shown) :]


def text_decoder(tokenizer: corpus.Tokenizer) -> Callable[[list[int]], str]:
    """Return a function from token ids to their text."""
    if tokenizer.text is None:
        return lambda ids: bytes(ids).decode("utf-8", "replace")
    return partial(tokenizers.Tokenizer.from_str(tokenizer.text).decode, skip_special_tokens=False)


def generate(params: Any, config: Config, prompt: Sequence[int], vocab_size: int, sampling: Sampling) -> Iterator[int]:
    """Yield the ids of the tokens that follow a prompt, all below vocab_size. Compiles once.

    params: of the whole model, its vocabulary possibly padded. The model sees at most the last model.max_seq_len
    tokens, as if the text began with them.
    """
    device = jax.devices()[0]
    decoder = config.model.model_copy(update={"attention": "auto"})  # that of the run may need another device
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
        tokens_1T[0, : len(window)] = window  # attention is causal: the rest is not seen
        ids.append(int(next_token(params, tokens_1T, len(window) - 1, draw)))
        yield ids[-1]


def logits(graphs: model.Graphs, params: Any, tokens_1T: jax.Array, last: jax.Array) -> jax.Array:
    """params, tokens[1 T], index of the last one that counts -> logits[V] of the token after it, in float32."""
    ends = nnx.merge(graphs.ends, params["ends"])

    def run(x_1TD: jax.Array, weights: Any) -> jax.Array:
        return nnx.merge(graphs.layer, weights)(x_1TD, 1)

    x_1TD = remat.scan(run, ends.embed(tokens_1T), params["layers"], remat.Policy())
    return ends.logits(lax.dynamic_slice_in_dim(x_1TD, last, 1, axis=1))[0, 0]


def choose(logits_V: jax.Array, sampling: Sampling, draw: jax.Array) -> jax.Array:
    """logits[V], number of the draw -> id of a token"""
    if sampling.temperature < COLDEST:
        return jnp.argmax(logits_V)
    top_K, ids_K = lax.top_k(logits_V, min(sampling.top_k, len(logits_V)))
    key = jax.random.fold_in(jax.random.key(sampling.seed), draw)
    return ids_K[jax.random.categorical(key, top_K / sampling.temperature)]


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax
    sys.exit(main())
