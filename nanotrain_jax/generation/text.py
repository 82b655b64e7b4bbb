"""Tokens of a row as text, as they come: complete characters only, up to a stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from nanotrain_jax.data.tokenizer import Tokenizer, text_decoder
from nanotrain_jax.generation.engine import ENDED

INCOMPLETE = "\ufffd"  # at the end of a text: part of a multi-byte character


class Text:
    """The text after a prompt. It ends at a token that ends texts, or before the first of the stop texts.

    ids: tokens after the prompt, without those that begin texts and the one that ended it, up to the one that completes
    a stop text. text: after the prompt. is_ended: nothing more comes.
    """

    def __init__(self, prompt: Sequence[int], tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.prompt, self.tokenizer, self.stops = list(prompt), tokenizer, [stop for stop in stops if stop]
        self.ids: list[int] = []
        self.decode = text_decoder(tokenizer)
        self.start = len(self._whole().rstrip(INCOMPLETE))
        self.text, self.shown, self.is_ended = "", 0, False

    def _whole(self, count: int | None = None) -> str:
        return self.decode([*self.prompt, *self.ids[:count]])

    def _complete(self, count: int | None = None) -> str:
        """Return the text of the first count tokens after the prompt, without part of a character at its end."""
        return self._whole(count)[self.start :].rstrip(INCOMPLETE)

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens -> what can be shown now: no part of a character or of a stop text."""
        if self.is_ended:
            return ""
        before, tokens = len(self.ids), [*tokens]
        kept = [*takewhile(self._continues, tokens)]
        self.ids += [token for token in kept if token not in self.tokenizer.begin]  # what begins texts is none
        self.text = self._complete()
        found = [(at + len(stop), at) for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            end, at = min(found)  # the one that is complete first, whichever tokens came together
            counts = range(before + 1, len(self.ids) + 1)
            self.ids = self.ids[: next(count for count in counts if len(self._complete(count)) >= end)]
            self.text, self.is_ended = self.text[:at], True
            return self._show(at)
        if len(kept) < len(tokens):
            return self.close()
        return self._show(len(self.text) - max((_overlap(self.text, stop) for stop in self.stops), default=0))

    def _continues(self, token: int) -> bool:
        return token != ENDED and token not in self.tokenizer.stops

    def close(self) -> str:
        """End the text -> the rest of it."""
        if not self.is_ended:
            self.text, self.is_ended = self._whole()[self.start :], True
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        new, self.shown = self.text[self.shown : end], max(end, self.shown)
        return new


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text with which stop begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
