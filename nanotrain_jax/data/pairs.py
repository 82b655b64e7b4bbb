"""Pairs of completions of one prompt, a chosen and a rejected one: `data.source=pairs:GLOB`, for train.objective.

    {"prompt", "chosen", "rejected"}   three texts, taken as they are, or three lists of messages
    {"chosen", "rejected"}             two conversations; the prompt is the messages with which both begin

Other keys are not read, nor is a prompt of text beside two conversations. A pair is two examples of
data/conversations.py, the chosen one first: each the prompt, which is not learned, and a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from nanotrain_jax.data.chat_template import Message, Template
from nanotrain_jax.data.conversations import Example, checked, completed, conversation
from nanotrain_jax.data.examples import Examples
from nanotrain_jax.data.packing import Packed

ROW = '{"prompt": ..., "chosen": ..., "rejected": ...}, or {"chosen": [messages], "rejected": [messages]}'
SIDES = "chosen", "rejected"
REFERENCE = "reference"  # the array of a batch


def of_row(row: dict[str, Any], template: Template | None) -> list[Example]:
    """Return the two examples of a row. Raises ValueError."""
    prompt, sides = row.get("prompt"), [row.get(side) for side in SIDES]
    for side, said in zip(SIDES, sides, strict=True):
        if said is None or said == [] or (isinstance(said, str) and not said.strip()):
            raise ValueError(f"{side} is missing or empty; write {ROW}, or leave the line out")
    if all(isinstance(said, str) for said in (prompt, *sides)):
        pair = [completed(prompt, said) for said in sides]
    elif all(isinstance(said, list) for said in sides) and isinstance(prompt, list | str | None):
        pair = _conversations(prompt if isinstance(prompt, list) else None, sides, template)
    else:
        raise ValueError(
            f"prompt, chosen and rejected must all be texts, or chosen and rejected both lists of messages; write {ROW}"
        )
    if pair[0].text == pair[1].text:
        raise ValueError("chosen and rejected are the same text: there is nothing to prefer; leave the line out")
    asked = pair[0].text[: pair[0].spans[0][0]]
    return [example._replace(key=asked) for example in pair]


def _conversations(prompt: list | None, sides: Sequence[list], template: Template | None) -> list[Example]:
    """Return the examples of two conversations. prompt: None: the messages with which both begin. Raises ValueError."""
    if prompt is None:
        whole = [checked(said, side) for side, said in zip(SIDES, sides, strict=True)]
        first = _common(*whole)
    else:
        before = checked(prompt, "prompt")
        first = len(before)
        whole = [before + checked(said, side, before) for side, said in zip(SIDES, sides, strict=True)]
    for side, messages in zip(SIDES, whole, strict=True):
        if messages[first]["role"] != "assistant":
            apart = "the prompt is given apart, so" if prompt is not None else f"they part at messages[{first}], where"
            raise ValueError(
                f"{side}: {apart} the assistant must speak, not {messages[first]['role']}; give the prompt of both in "
                "messages, or leave it out where chosen and rejected begin with it"
            )
    return [conversation(messages, template, first, learns_all=False) for messages in whole]


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return with how many messages both begin. Raises ValueError unless there are some, and both go on."""
    least = min(len(chosen), len(rejected))
    count = next((i for i in range(least) if chosen[i] != rejected[i]), least)
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same: there is nothing to prefer; leave the line out")
    if not count:
        raise ValueError("chosen and rejected have no common prompt: their first messages differ; begin both alike")
    if count == least:
        side = SIDES[len(rejected) == least]
        raise ValueError(f"{side} says nothing of its own: the other conversation begins with all of it; end it before")
    return count


class Pairs(Packed):
    """Random access to rows of pairs: as `Packed`, with "reference", float32 [most pairs of a row, 2]: what the frozen
    model says of the completions of each pair of the row, in their order (`with_reference`); zeros behind them."""

    together = 2

    def __init__(self, examples: Examples, chosen: np.ndarray, seq_len: int, packs: bool):
        super().__init__(examples, chosen, seq_len, packs)
        self.reference = np.zeros((len(examples.sizes) // 2, 2), np.float32)

    def with_reference(self, reference: np.ndarray) -> Pairs:
        """Return the same rows with float32 [pairs 2]: of all pairs of `examples`."""
        other = copy(self)
        other.reference = reference
        return other

    def pairs_of_row(self, i: int) -> np.ndarray:
        """Return the indices of the pairs of a row."""
        return self.of_row(i)[::2] // 2

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        own = self.reference[self.pairs_of_row(i)]
        reference = np.zeros((self.seq_len // 4, 2), np.float32)
        reference[: len(own)] = own
        return super().__getitem__(i) | {REFERENCE: reference}
