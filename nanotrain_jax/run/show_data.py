"""Show training rows as tokens, and what of them is learned: `train --show-data N`. Nothing is trained or written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, groupby, islice
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.training_stages import of_span, spans
from nanotrain_jax.data import batches
from nanotrain_jax.data.pairs import SIDES
from nanotrain_jax.data.tokenizer import Tokenizer, special_tokens, text_decoder

INCOMPLETE = "\ufffd"  # at the end of a text: part of a multi-byte character
CONTEXT = 4  # tokens before a piece of text that decide how it is written
# By (learned, special): two shades each, so that neighbouring tokens are told apart.
STYLES = {
    (False, False): ("dim", "dim underline"),
    (True, False): ("black on green", "black on bright_green"),
    (False, True): ("dim magenta", "dim magenta underline"),
    (True, True): ("bold magenta on green", "bold magenta on bright_green"),
}


class Row(NamedTuple):
    """A training row as the step gets it. tokens, learned, starts: of each position, and of the last target; padding:
    positions behind the last example."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    padding: int


class Piece(NamedTuple):
    """A token as text."""

    text: str
    learned: bool
    special: bool


def show(config: Config, count: int, console: Console) -> int:
    """Print the first rows of training; -> exit code 0. Raises ValueError or OSError."""
    config = of_span(config, spans(config)[0])
    dataset = batches.load(config.data, config.model.vocab_size)
    if dataset.tokenizer is None:
        raise ValueError(f"--show-data with data.source={config.data.origin!r}, which is not text; use other data")
    tokenizer = batches.tokenizer_of(config.data)
    for line in dataset.notes:
        console.print(line, markup=False)
    marks = console.color_system is None or console.no_color
    names = SIDES if config.data.is_pairs else ("",)
    for number, row in enumerate(rows(dataset.train, config, count), 1):
        console.print(Text(headline(number, row, len(names)), style="bold"))
        for text in examples(row, tokenizer, marks, names):
            console.print(text)
    console.print(legend(marks))
    return 0


def rows(source: batches.Source, config: Config, count: int) -> Iterator[Row]:
    """Yield the rows that training reads first."""
    names = dict.fromkeys(["inputs", "targets"] + ["starts"] * (not config.data.attend_across_documents))
    for sequence in islice(batches.in_order(source, names, config.data.seed), count):
        batch = batches.rows_of(_batched(sequence), None)
        tokens, targets = batch["inputs"][0], batch["targets"][0]
        starts = batch["starts"][0] if "starts" in batch else np.zeros_like(tokens)
        ends = bool(targets[-1] >= 0)  # the target of the last position is no input
        learned = np.concatenate([[False], targets >= 0])[: len(tokens) + ends]
        tokens = np.concatenate([tokens, targets[-1:]])[: len(learned)]
        starts = np.concatenate([starts, starts[-1:]])[: len(learned)]
        is_padded = isinstance(sequence, dict) and (targets[starts[-1] :] < 0).all()
        padding = len(tokens) - int(starts[-1]) if is_padded else 0
        yield Row(tokens, learned, starts, padding)


def _batched(sequence: Any) -> Any:
    return {name: x[None] for name, x in sequence.items()} if isinstance(sequence, dict) else sequence[None]


def headline(number: int, row: Row, together: int) -> str:
    """Return a line of counts. together: examples of a pair, else 1."""
    count = len(row.tokens) - row.padding
    documents = len(np.unique(row.starts[:count])) // together
    unit = "pair" if together > 1 else "example"
    return (
        f"row {number}: {documents} {unit}{'s' * (documents > 1)}, {count} tokens, {int(row.learned.sum())} learned, "
        f"{row.padding} of padding"
    )


def examples(row: Row, tokenizer: Tokenizer, marks: bool, names: Sequence[str]) -> Iterator[Text]:
    """Yield each example of a row. marks: [[ ]] around what is learned, for output without colour. names: of examples,
    in turn."""
    special, count = special_tokens(tokenizer), len(row.tokens) - row.padding
    for start, name in zip(np.unique(row.starts[:count]), cycle(names), strict=False):
        mine = np.flatnonzero(row.starts[:count] == start)
        pieces = of_tokens(row.tokens[mine].tolist(), row.learned[mine].tolist(), tokenizer, special)
        yield Text(f"--- {start}{name and f' {name}'}: ").append_text(_marked(pieces) if marks else _coloured(pieces))


def _marked(pieces: Iterable[Piece]) -> Text:
    runs = ((learned, "".join(piece.text for piece in run)) for learned, run in groupby(pieces, lambda p: p.learned))
    return Text("".join(f"[[{text}]]" if learned else text for learned, text in runs))


def _coloured(pieces: Iterable[Piece]) -> Text:
    styled = ((piece.text, STYLES[piece.learned, piece.special][i % 2]) for i, piece in enumerate(pieces))
    return Text().append_tokens(styled)


def of_tokens(
    tokens: Sequence[int], learned: Sequence[bool], tokenizer: Tokenizer, special: dict[int, str]
) -> Iterator[Piece]:
    """Yield the text of each token; of tokens that are one character, together."""
    decode, first = text_decoder(tokenizer), 0
    for last in range(1, len(tokens) + 1):
        before = max(0, first - CONTEXT)
        text = decode(tokens[before:last])[len(decode(tokens[before:first])) :]
        is_whole = not text.endswith(INCOMPLETE) or last - first > CONTEXT or last == len(tokens)
        if tokens[last - 1] in special:
            yield Piece(special[tokens[last - 1]], learned[last - 1], True)
        elif is_whole or learned[last] != learned[last - 1]:
            yield Piece(printable(text), learned[last - 1], False)
        else:
            continue
        first = last


def printable(text: str) -> str:
    """Return text whose line ends are seen, and whose control characters do nothing."""
    return "".join(
        "\u21b5\n" if c == "\n" else c if c.isprintable() or c == INCOMPLETE else ascii(c)[1:-1] for c in text
    )


def legend(marks: bool) -> Text:
    """Return what the marks or colours mean."""
    lines = "\u21b5: the end of a line; --- 17: an example from position 17 on"
    if marks:
        return Text(f"[[learned]], the rest is only read; {lines}")
    names = ("learned", (True, False)), ("only read", (False, False)), ("special", (False, True))
    text = Text(" ").join(Text(name, style=STYLES[kind][0]) for name, kind in names)
    return text.append(f"; shades tell tokens apart; {lines}")
