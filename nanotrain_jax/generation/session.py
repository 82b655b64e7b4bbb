"""Rows of tokens that grow: prompts taken in, tokens streamed as they come, a conversation without computing twice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from nanotrain_jax.generation.engine import ENDED, SMALLEST, STRIDE, Choice, Engine, Rows, chunk_of, doubled


class Speed:
    """Tokens and seconds: of prompts, and of each wait for chosen tokens, the first of which includes compiling."""

    def __init__(self) -> None:
        self.prefill, self.decode = [0, 0.0], []

    def took(self, tokens: int, seconds: float) -> None:
        """Count tokens of prompts."""
        self.prefill = [self.prefill[0] + tokens, self.prefill[1] + seconds]

    def gave(self, tokens: int, seconds: float) -> None:
        """Count tokens that were chosen."""
        self.decode.append((tokens, seconds))

    def __str__(self) -> str:
        tokens, seconds = self.prefill
        text = f"prefill {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.1f} tokens/s with compiling"
        counted = self.decode[1:] or self.decode
        if counted:
            rate = sum(n for n, _ in counted) / max(sum(s for _, s in counted), 1e-9)
            text += f"; decode {sum(n for n, _ in self.decode):,} tokens, {rate:,.1f} tokens/s"
            text += "" if len(self.decode) > 1 else " with compiling"
        return text


class Session:
    """The state of some rows. context: tokens of a row at most; a text that reaches it continues with its last half.

    shifted: True once a text continued with its last half. speed: how long all this took.
    """

    def __init__(self, engine: Engine, choice: Choice, context: int):
        self.engine, self.choice, self.context = engine, choice, context
        self.rows: Rows | None = None
        self.slot = self.slots = 0
        self.texts: list[list[int]] = []  # of each row: tokens given and chosen; those before `slot` are in the cache
        self.shifted, self.speed = False, Speed()

    def feed(self, texts: Sequence[Sequence[int]]) -> None:
        """Take in the texts of the rows, each of at least one token. One row keeps what its cache has of its text."""
        texts = [list(text) for text in texts]
        longest = max(map(len, texts))
        kept = min(_common(self.texts[0], texts[0]), self.slot, longest - 1) if self._is_one(texts) else 0
        padding = -len(texts) % self.engine.multiple
        starts = [longest - len(text) for text in texts]
        if not kept:
            self._reserve(starts + starts[-1:] * padding, longest)
        self.slot, self.texts = kept, texts
        slot = self.engine.put(np.int32(kept), PartitionSpec())
        self.rows = self.rows._replace(place=self.rows.place._replace(slot=slot))
        table = np.asarray([[0] * start + text for start, text in zip(starts, texts, strict=True)], np.int32)
        started = time.perf_counter()
        self._take(np.concatenate([table, np.repeat(table[-1:], padding, axis=0)])[:, kept:])
        jax.block_until_ready(self.rows.token_B)
        self.speed.took(sum(map(len, texts)) - kept, time.perf_counter() - started)

    def _is_one(self, texts: list) -> bool:
        return self.rows is not None and len(texts) == len(self.texts) == 1

    def _reserve(self, starts: Sequence[int], tokens: int) -> None:
        """Start empty rows with room for so many tokens."""
        self.slots = doubled(SMALLEST, tokens + STRIDE)
        self.rows = self.engine.empty(starts, self.slots)

    def _take(self, tokens_BT: np.ndarray) -> None:
        """Take in the next tokens of all rows, in chunks of a few sizes, each compiled once."""
        while tokens_BT.shape[1]:
            left = tokens_BT.shape[1]
            size = chunk_of(left)
            count = min(size, left)
            self._make_room(size)
            chunk_BT = np.pad(tokens_BT[:, :count], [(0, 0), (0, size - count)])
            self.rows = self.engine.take(self.rows, chunk_BT, count, self.choice)
            self.slot += count
            tokens_BT = tokens_BT[:, count:]

    def _make_room(self, tokens: int) -> None:
        slots = doubled(self.slots, self.slot + tokens)
        if slots > self.slots:
            self.rows, self.slots = self.engine.grown(self.rows, slots), slots

    def tokens(self, limit: int) -> Iterator[np.ndarray]:
        """Yield the next tokens[B n] of all rows as they come, at most limit of each; ENDED after the end of a row."""
        has_ended_B = np.zeros(len(self.texts), bool)
        pending, count = [self.rows.token_B], 0
        while True:
            is_last, started = count + len(pending) >= limit, time.perf_counter()
            after = [] if is_last else self._dispatch()  # computes while the host reads those before
            new_Bn = np.stack([np.asarray(x)[: len(self.texts)] for x in pending], axis=1)[:, : limit - count]
            new_Bn[has_ended_B] = ENDED
            if count:
                self.speed.gave(int((new_Bn != ENDED).sum()), time.perf_counter() - started)
            count += new_Bn.shape[1]
            for text, new in zip(self.texts, new_Bn.tolist(), strict=True):
                text += [token for token in new if token != ENDED]
            has_ended_B |= np.isin(new_Bn, [ENDED, *self.choice.stops]).any(axis=1)
            yield new_Bn
            if is_last or has_ended_B.all():
                return
            pending = after or self._shift(has_ended_B)

    def _dispatch(self) -> list:
        """Start to compute the next tokens, as many as the context has room for; [] if it is full."""
        room = min(STRIDE, self.context - self.slot)
        if room <= 0:
            return []
        self._make_room(STRIDE)
        self.rows, tokens = self.engine.next_tokens(self.rows, self.choice)
        self.slot += room
        return tokens[:room]

    def _shift(self, has_ended_B: np.ndarray) -> list:
        """Take in all texts again, those that are beyond the context by their last half, and choose the next tokens.

        Each row's own length decides, so that no row depends on the others. Of rows that have ended a token stays.
        """
        texts = [text[-1:] if has_ended else text for text, has_ended in zip(self.texts, has_ended_B, strict=True)]
        is_beyond = [len(text) > self.context for text in texts]
        self.shifted |= any(is_beyond)
        half = max(1, self.context // 2)
        self.feed([text[-half:] if is_long else text for text, is_long in zip(texts, is_beyond, strict=True)])
        return [self.rows.token_B]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two texts have in common, from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
