"""Log-likelihoods of tokens given those before them, of many rows, in batches of like lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from nanotrain_jax.data.tokenizer import Tokenizer
from nanotrain_jax.generation.engine import SMALLEST, Engine, chunk_of, doubled


class Request(NamedTuple):
    """A row whose last tokens are scored.

    tokens: at least two, one more than the context at most. count: how many are scored. is_cut: there were more.
    """

    tokens: Sequence[int]
    count: int
    is_cut: bool = False


class Score(NamedTuple):
    """Of the scored tokens: the sum of their log-probabilities, natural, and whether each was the most likely one."""

    log: float
    is_greedy: bool


def request(before: Sequence[int], scored: Sequence[int], context: int) -> Request:
    """Return the request of tokens after others; of too many before them only the last are kept.

    Raises ValueError if there are none to score, none before them, or more than the context.
    """
    if not len(scored) or not len(before):
        raise ValueError("gives no tokens of its own with this model's tokenizer; write more text")
    if len(scored) > context:
        raise ValueError(f"has {len(scored)} tokens, but the model's context is {context}; shorten it")
    tokens = [*before, *scored]
    return Request(tokens[-(context + 1) :], len(scored), len(tokens) > context + 1)


def encoded(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each context, and of the text that continues it, as lm-evaluation-harness has them.

    Both are encoded as one text and cut after as many tokens as the context alone has; spaces that end a context belong
    to the continuation. Both begin with the begin token, if the tokenizer has one. An empty context is that token, else
    the one that ends documents (`TemplateLM` of lm_eval/api/model.py, `HFLM.tok_encode`).
    """
    cut = [(context.rstrip(), context[len(context.rstrip()) :] + text) for context, text in pairs]
    wholes = tokenizer.encode([as_bytes(context + text) for context, text in cut])
    contexts = tokenizer.encode([as_bytes(context) for context, _ in cut])
    found = []
    for whole, before in zip(map(tokenizer.begun, wholes), map(tokenizer.begun, contexts), strict=True):
        ids, count = whole.tolist(), len(before)
        if not count and tokenizer.end is not None and ids[:1] != [tokenizer.end]:
            ids.insert(0, tokenizer.end)
        found.append((before.tolist() if count else ids[:1], ids[max(count, 1) :]))
    return found


def as_bytes(text: str) -> bytes:
    """Return a text in UTF-8; what is no character is a question mark."""
    return text.encode("utf-8", "replace")


def scores(engine: Engine, requests: Sequence[Request], rows: int) -> Iterator[tuple[int, Score]]:
    """Score requests, at most `rows` together, the longest first -> pairs of index and score as they come."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        yield from zip(chosen, _together(engine, [requests[i] for i in chosen]), strict=True)


def _together(engine: Engine, requests: Sequence[Request]) -> list[Score]:
    """Score requests as rows of one batch, padded on the right."""
    rows, inputs = doubled(engine.multiple, len(requests)), max(len(r.tokens) for r in requests) - 1
    chunk = chunk_of(inputs)
    tokens = -(-inputs // chunk) * chunk
    table = np.zeros((rows, tokens + 1), np.int32)
    for row, r in zip(table, requests, strict=False):
        row[: len(r.tokens)] = r.tokens
    since = min(len(r.tokens) - 1 - r.count for r in requests)
    slots, found = SMALLEST, []
    cache = engine.empty([0] * rows, slots)
    for slot in range(0, tokens, chunk):
        end = slot + chunk
        if end > slots:
            slots = doubled(slots, end)
            cache = engine.grown(cache, slots)
        after = table[:, slot + 1 : end + 1] if end > since else None
        cache, parts = engine.score(cache, slot, table[:, slot:end], after)
        zero = np.zeros((rows, chunk))
        found.append([np.concatenate(part, axis=1) for part in zip(*map(on_host, parts), strict=True)] or [zero, zero])
    log_BT, is_top_BT = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    ends = [slice(len(r.tokens) - 1 - r.count, len(r.tokens) - 1) for r in requests]
    return [
        Score(float(log_T[own].sum(dtype=np.float64)), bool(is_top_T[own].all()))
        for own, log_T, is_top_T in zip(ends, log_BT, is_top_BT, strict=False)
    ]


def on_host(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Return arrays of the mesh, whole, in every process."""
    is_here = all(x.is_fully_addressable for x in arrays)
    return [np.asarray(x) for x in (arrays if is_here else multihost_utils.process_allgather(arrays, tiled=True))]
