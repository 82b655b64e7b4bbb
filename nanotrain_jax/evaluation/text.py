"""Loss, perplexity and bits per byte of texts longer than the context, by a sliding window.

Each token is scored once. A window has as many tokens as the context, and moves on by `stride`: in all but the first,
only the last `stride` tokens are scored, so that each has at least context - stride tokens before it. The first token
of a text is scored after the tokenizer's begin token, else after the token that ends documents; with a tokenizer that
has neither it is not scored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanotrain_jax.data import text_files
from nanotrain_jax.evaluation.samples import Record, Sample
from nanotrain_jax.evaluation.scoring import Request
from nanotrain_jax.generation.load import Loaded


def samples(pattern: str, loaded: Loaded, stride: int | None, limit: int | None) -> list[Sample]:
    """Return a sample for each file that matches a pattern. Raises ValueError or OSError.

    stride: tokens; None: half of the context. limit: files at most.
    """
    stride = max(1, loaded.context // 2) if stride is None else stride
    if stride > loaded.context:
        raise ValueError(f"--stride={stride} is more than the model's context of {loaded.context}; use at most that")
    paths = text_files.matching(pattern, f"--text={pattern!r}").paths[:limit]
    return [_sample(path, loaded, stride) for path in paths]


def _sample(path: Path, loaded: Loaded, stride: int) -> Sample:
    text = text_files.text(path)
    if not text:
        raise ValueError(f"{path} is empty; give files with text")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); give text files") from None
    (ids,) = loaded.tokenizer.encode([text])
    tokens, given = after_first(ids, loaded)
    if len(tokens) <= given:
        raise ValueError(f"{path} has fewer than two tokens: none follows another; give a longer text")
    asks = f"text {hashlib.sha256(text).hexdigest()} {stride}"
    counts = {"tokens": len(tokens) - given, "bytes": len(text)}
    return Sample(
        str(path),
        asks,
        windows(tokens, loaded.context, stride, given),
        lambda scores: {"nats": -math.fsum(score.log for score in scores)} | counts,
    )


def after_first(ids: np.ndarray, loaded: Loaded) -> tuple[list[int], int]:
    """Return the tokens of a text after the begin token, else after the one that ends documents, if there is one; and
    how many of them are not scored."""
    begin, end = loaded.tokenizer.begin, loaded.tokenizer.end
    if begin or end is None:
        return loaded.tokenizer.begun(ids).tolist(), max(len(begin), 1)
    return [end, *ids.tolist()], 1


def windows(tokens: Sequence[int], context: int, stride: int, given: int = 1) -> list[Request]:
    """Return requests that score each token but the first `given` ones once. stride: at most the context."""
    ends = [min(context + 1, len(tokens))]
    while ends[-1] < len(tokens):
        ends.append(min(ends[-1] + stride, len(tokens)))
    starts = [given, *ends]
    pairs = zip(starts, ends, strict=False)
    return [Request(tokens[max(0, end - context - 1) : end], end - start) for start, end in pairs]


def summary(records: Sequence[Record]) -> dict[str, float]:
    """Return the scores of all texts together: loss in nats per token, perplexity, bits per byte of UTF-8."""
    nats = math.fsum(record["nats"] for record in records)
    tokens, size = (sum(record[key] for record in records) for key in ("tokens", "bytes"))
    loss = nats / tokens
    return {
        "files": len(records),
        "tokens": tokens,
        "bytes": size,
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        "bits_per_byte": nats / math.log(2) / size,
    }
