"""Rows to train on of conversations and completions: `data.source=chat:GLOB`, or of pairs: `pairs:GLOB`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanotrain_jax.config.schema import Data
from nanotrain_jax.config.values import with_message
from nanotrain_jax.data import chat_template, conversations, corpus, examples, pairs
from nanotrain_jax.data.chat_template import OF_TRAINING, Template
from nanotrain_jax.data.examples import Examples
from nanotrain_jax.data.packing import Packed
from nanotrain_jax.data.tokenizer import CHAT_TEMPLATE, Tokenizer


class Chat(NamedTuple):
    """Training and held-out rows. fingerprint identifies their tokens, masks and order; notes: lines for people."""

    train: Packed
    val: Packed
    fingerprint: str
    notes: tuple[str, ...]


def template_of(config: Data, tokenizer: Tokenizer) -> Template | None:
    """Return the chat template of the data; None if there is none. Raises ValueError or OSError."""
    files, origin = dict(tokenizer.files), config.tokenizer or "bytes"
    if config.chat_template:
        origin = config.chat_template
        try:
            files[CHAT_TEMPLATE] = Path(origin).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"data.chat_template={origin!r} is not UTF-8 text; give a file with a template") from None
        except OSError as error:
            text = f"data.chat_template={origin!r} cannot be read ({error.strerror}); give a file with a template"
            raise with_message(error, text) from None
    found = chat_template.of_files(files, origin)
    return found and found._replace(date=OF_TRAINING)


def load(config: Data, tokenizer: Tokenizer) -> Chat:
    """Read, tokenize and pack data.source=chat:GLOB, pairs:GLOB. Raises ValueError (one line: value, rule, remedy) or
    OSError."""
    source, packing, template = f"data.source={config.source!r}", config.packing, template_of(config, tokenizer)
    of_row, kinds, rows = partial(conversations.of_row, loss_on=config.loss_on), conversations.ROW, Packed
    if config.is_pairs:
        of_row, kinds, rows = pairs.of_row, pairs.ROW, pairs.Pairs
    paths = corpus.matching(config.source.partition(":")[2], source)
    read = conversations.read(paths, partial(of_row, template=template), kinds)
    found = examples.encoded(read, tokenizer, config.seq_len, config.too_long == "cut", rows.together)
    if not found.counts.read:
        raise ValueError(f"{source} has no rows; write one to a line: {kinds}")
    check(found, config, source)
    sides = found.corpus.split(config.val_fraction, least_held_out(found, config) if config.val_fraction else 0)
    if not len(sides[0]):
        unit = "prompts" if config.is_pairs else "examples"
        raise ValueError(
            f"data.val_fraction={config.val_fraction} holds out all {len(np.unique(found.corpus.keys))} {unit} of "
            f"{source}; use more {unit}, or 0 for no validation"
        )
    train, val = (rows(found, side, config.seq_len, packing == "best_fit") for side in sides)
    keys = f"val_fraction {config.val_fraction} seq_len {config.seq_len} pack {packing} 2 seed {config.seed}"
    return Chat(train, val, f"{found.fingerprint} {keys}", tuple(notes(found, (train, val), config)))


def least_held_out(found: Examples, config: Data) -> int:
    """Return how many tokens to hold out at least: those of the largest example; of the prompt with most, of pairs."""
    sizes = found.sizes
    if config.is_pairs:
        sizes = np.bincount(np.unique(found.corpus.keys, return_inverse=True)[1], sizes)
    return int(sizes.max())


def check(found: Examples, config: Data, source: str) -> None:
    """Raise ValueError unless there is something to learn."""
    counts, unit = found.counts, "pairs" if config.is_pairs else "examples"
    if len(found.sizes):
        return
    if counts.long == counts.read and config.too_long == "drop":
        remedy = "" if config.is_pairs else ", or data.too_long=cut"
        raise ValueError(
            f"{source}: each of the {counts.read} {unit} is longer than data.seq_len={config.seq_len} (the shortest "
            f"has {counts.shortest} tokens; the first is {counts.first}); use a longer one{remedy}"
        )
    dropped = f", {counts.long} are longer than data.seq_len={config.seq_len}" if counts.long else ""
    remedy = "" if config.is_pairs else "data.loss_on=all, or "
    raise ValueError(
        f"{source}: {counts.empty} of {counts.read} {unit} have nothing to learn with data.loss_on={config.loss_on}"
        f"{dropped} (the first is {counts.first}); use {remedy}a longer data.seq_len"
    )


def notes(found: Examples, sides: tuple[Packed, Packed], config: Data) -> Iterator[str]:
    """Yield lines about the examples, and what people should know of them."""
    counts, tokens, rows = found.counts, len(found.corpus.tokens), sum(map(len, sides))
    unit, (train, val) = "pairs" if config.is_pairs else "examples", (len(x.members) // x.together for x in sides)
    learned, loss_on = int(found.learned.sum()), "" if config.is_pairs else f", data.loss_on={config.loss_on}"
    fate = "dropped" if config.too_long == "drop" else "cut"
    left_out = [f"{counts.long:,} longer than data.seq_len {fate} (data.too_long)"] if counts.long else []
    left_out += [f"{counts.empty:,} with nothing to learn dropped"] if counts.empty else []
    yield "; ".join(
        [
            f"{counts.read:,} {unit} read, {counts.read / max(counts.seconds, 1e-9):,.0f} per second",
            *left_out,
            f"{train:,} to train on and {val:,} held out",
            f"{learned:,} of {tokens:,} tokens are learned ({learned / tokens:.0%}{loss_on})",
            f"rows are {tokens / (rows * config.seq_len):.0%} full (data.pack={config.packing})",
        ]
    )
    if counts.endless:
        yield (
            f"warning: without an end token behind the answer, so that nothing teaches to stop: {counts.endless:,} "
            "of the examples; use a chat template that ends turns with a special token, or set data.end_token"
        )
    if counts.unheeded:
        ends = ", ".join(counts.unheeded)
        yield (
            f"warning: answers end with {ends}, at which generated text does not stop: the tokenizer's files do not "
            f"name it; set data.end_token='{counts.unheeded[0]}'"
        )
    if counts.straddling:
        yield (
            "warning: a token begins before the answer and reaches into it, and is not learned: in "
            f"{counts.straddling:,} of the examples; end prompts without a space, begin answers with it"
        )
