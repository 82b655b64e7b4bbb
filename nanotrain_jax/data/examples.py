"""Examples as tokens, and which of them are learned. Plain numpy: one array for all tokens.

A text is encoded whole. A token is learned if its first character is in a span that is: one that begins before the span
and reaches into it is not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from nanotrain_jax.data.conversations import Example
from nanotrain_jax.data.corpus import Corpus, text_key
from nanotrain_jax.data.tokenizer import Encoded, Tokenizer, special_tokens, text_encoder

AT_ONCE = 256  # texts encoded together


class Examples(NamedTuple):
    """corpus: an example is a document, and its key a hash of its text. learned: of each token of the corpus."""

    corpus: Corpus
    learned: np.ndarray
    counts: Counts

    @property
    def fingerprint(self) -> str:
        """Identify the examples: their tokens, what of them is learned, their order."""
        content = hashlib.sha256(self.corpus.tokens.tobytes() + np.packbits(self.learned).tobytes())
        return f"{self.corpus.fingerprint} {content.hexdigest()[:16]}"

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each example."""
        return np.diff(self.corpus.ends, prepend=0)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of an example, and whether each is learned; never the first, which nothing predicts."""
        mine = slice(self.corpus.ends[i - 1] if i else 0, self.corpus.ends[i])
        return self.corpus.tokens[mine], self.learned[mine]


class Counts(NamedTuple):
    """Examples, or pairs, that were read; of them: longer than a row; with nothing to learn, which are left out. Texts
    without an end token behind what is learned; with a token that begins before a span and reaches into it.

    shortest: tokens of the shortest of the long ones. first: file and line of the first that was left out. unheeded:
    end tokens at which generated text does not stop.
    """

    read: int
    long: int
    empty: int
    endless: int
    straddling: int
    shortest: int
    first: str
    unheeded: tuple[str, ...]
    seconds: float


def encoded(examples: Iterable[Example], tokenizer: Tokenizer, seq_len: int, cuts: bool, together: int = 1) -> Examples:
    """Tokenize examples. Those longer than seq_len are left out, or cut. Raises ValueError or OSError of the reader.

    together: so many examples in a row are one, e.g. pairs: all of them are left out, or none.
    """
    masker, encode = Masker(tokenizer), text_encoder(tokenizer)
    started, read, empty, long, left_out = time.perf_counter(), 0, 0, [], []
    tokens, masks, keys = [], [], []
    for group in zip(*[_in_batches(examples, encode)] * together, strict=True):
        read += 1
        masked = [masker(example, text) for example, text in group]
        size = sum(len(ids) for ids, _ in masked)
        if size > seq_len:
            long.append(size)
        fits, has_any = cuts or size <= seq_len, all(learned[:seq_len].any() for _, learned in masked)
        empty += bool(fits and not has_any)
        if not (fits and has_any):
            left_out.append(group[0][0].place)
            continue
        tokens += [ids[:seq_len].astype(tokenizer.dtype) for ids, _ in masked]
        masks += [learned[:seq_len] for _, learned in masked]
        names = (example.text if example.key is None else example.key for example, _ in group)
        keys += [text_key(name.encode()) for name in names]
    ends = np.cumsum([len(ids) for ids in tokens], dtype=np.int64)
    joined = np.concatenate(tokens) if tokens else np.zeros(0, tokenizer.dtype)
    learned = np.concatenate(masks) if masks else np.zeros(0, bool)
    corpus = Corpus(joined, ends, np.asarray(keys, np.uint64), tokenizer.name, tokenizer.vocab_size)
    counts = Counts(
        read,
        len(long),
        empty,
        masker.endless,
        masker.straddling,
        min(long, default=0),
        next(iter(left_out), ""),
        tuple(sorted(masker.special[i] for i in masker.ends - tokenizer.stops)),
        time.perf_counter() - started,
    )
    return Examples(corpus, learned, counts)


def _in_batches(
    examples: Iterable[Example], encode: Callable[[Sequence[str]], list[Encoded]]
) -> Iterator[tuple[Example, Encoded]]:
    examples = iter(examples)
    while batch := list(islice(examples, AT_ONCE)):
        yield from zip(batch, encode([example.text for example in batch]), strict=True)


class Masker:
    """Tells which tokens of an example are learned, and counts on the way: see `Counts`. ends: that were found."""

    def __init__(self, tokenizer: Tokenizer):
        self.end, self.begun, self.special = tokenizer.end, tokenizer.begun, special_tokens(tokenizer)
        self.is_special = np.zeros(tokenizer.vocab_size, bool)
        self.is_special[list(self.special)] = True
        self.endless = self.straddling = 0
        self.ends: set[int] = set()

    def __call__(self, example: Example, text: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of an example, and whether each is learned."""
        learned, ids = np.zeros(len(text.ids), bool), text.ids
        straddles = lacks_end = False
        for first, last in example.spans:
            mine = (text.starts >= first) & (text.starts < last)
            straddles |= bool(((text.starts < first) & (text.stops > first)).any())
            at = self.end_in(example, text, np.flatnonzero(mine & self.is_special[ids]), last)
            lacks_end = at is None
            if example.trims:  # the end token is the last; without one the text is, without white space behind it
                stop = len(example.text[:last].rstrip()) if at is None else text.starts[at] + 1
                mine &= text.starts < stop
            learned |= mine
        if example.is_plain and not (len(ids) and ids[-1] == self.end):
            end = np.array([] if self.end is None else [self.end], np.int64)
            ids, learned, lacks_end = np.append(ids, end), np.append(learned, end >= 0), self.end is None
        if example.is_plain:
            ids = self.begun(ids)
            learned = np.concatenate([np.zeros(len(ids) - len(learned), bool), learned])
        learned[:1] = False
        self.endless += bool(lacks_end)
        self.straddling += straddles
        return ids, learned

    def end_in(self, example: Example, text: Encoded, found: np.ndarray, last: int) -> int | None:
        """Return which token ends a span: the last special one, if only white space follows it there."""
        if not len(found) or example.text[text.stops[found[-1]] : last].strip():
            return None
        self.ends.add(int(text.ids[found[-1]]))
        return int(found[-1])
