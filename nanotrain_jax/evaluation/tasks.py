"""Multiple choice: which choice the model finds the most likely, by three measures of lm-evaluation-harness.

    acc        the log-likelihood of the choice, after the context
    acc_norm   that divided by the characters of the choice
    acc_bytes  that divided by its bytes in UTF-8

as `process_results` of lm_eval/api/task.py has them; standard errors are its `mean_stderr` (lm_eval/api/metrics.py). A
file has a JSON object on each line: {"context": text} or {"question": text}, which stands for the context
"Question: text\\nAnswer:"; "choices": texts; "answer": the index of one from 0, or its text. One space stands between
context and choice, unless either brings its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanotrain_jax.data import json_lines
from nanotrain_jax.data.json_lines import Row
from nanotrain_jax.evaluation.samples import Record, Sample
from nanotrain_jax.evaluation.scoring import Score, as_bytes, encoded, request
from nanotrain_jax.generation.load import Loaded

METRICS = "acc", "acc_norm", "acc_bytes"
ROW = '{"question": "text", "choices": ["a", "b"], "answer": 0}'


class Question(NamedTuple):
    """A question. place: file and line; answer: the index of the right choice."""

    place: str
    context: str
    choices: list[str]
    answer: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the context and what continues it, of each choice."""
        is_apart = not self.context or self.context[-1].isspace()
        return [(self.context, choice if is_apart or choice[0].isspace() else f" {choice}") for choice in self.choices]


def read(path: str | Path, limit: int | None = None, key: str = "--tasks") -> list[Question]:
    """Read the questions of a file, at most `limit`. key: the option or key that names it. Raises ValueError or
    OSError."""
    return [_question(row) for row in islice(json_lines.read(path, key, ROW), limit)]


def _question(given: Row) -> Question:
    place, shown, row = given
    named = [key for key in ("question", "context") if row is not None and isinstance(row.get(key), str)]
    if len(named) != 1:
        raise ValueError(f'{place}: {shown} has not one text "question" or "context"; write {ROW}')
    text, choices = row[named[0]], row.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f'{place}: "choices" must be two or more texts; write {ROW}')
    if not all(choice.strip() for choice in choices):
        raise ValueError(f"{place}: a choice is empty: {choices!r}; write each out")
    context = f"Question: {text}\nAnswer:" if named == ["question"] else text
    return Question(place, context, choices, _answer(place, choices, row.get("answer")))


def _answer(place: str, choices: list[str], answer: Any) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f'{place}: "answer" is {answer!r}, not one of the {len(choices)} choices; give its text, or its index '
            f"from 0 to {len(choices) - 1}"
        )
    return answer


def samples(questions: Sequence[Question], loaded: Loaded) -> list[Sample]:
    """Return a sample for each question. A context too long for the model is cut from the left, as in the harness.

    Raises ValueError.
    """
    parts = iter(encoded(loaded.tokenizer, [pair for question in questions for pair in question.pairs]))
    found = []
    for question in questions:
        own = [next(parts) for _ in question.choices]
        try:
            requests = [request(*pair, loaded.context) for pair in own]
        except ValueError as error:
            raise ValueError(f"{question.place}: a choice of {question.choices!r} {error}") from None
        asks = json.dumps(["task", *question[1:]])
        found.append(Sample(question.place, asks, requests, partial(record, question)))
    return found


def record(question: Question, scores: Sequence[Score]) -> Record:
    """Return what is kept of a question: the log-likelihood of each choice, and for each metric 1 if it is right."""
    logs = np.asarray([score.log for score in scores])
    lengths = {
        "acc": 1.0,
        "acc_norm": np.asarray([float(len(choice)) for choice in question.choices]),
        "acc_bytes": np.asarray([float(len(as_bytes(choice))) for choice in question.choices]),
    }
    right = {name: int(np.argmax(logs / length) == question.answer) for name, length in lengths.items()}
    return {"log_likelihoods": logs.tolist(), "answer": question.answer} | right


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the mean of each metric and its standard error; of one question there is none."""
    found: dict[str, Any] = {"questions": len(records)}
    for name in METRICS:
        values = np.asarray([record[name] for record in records], np.float64)
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        found |= {name: float(values.mean()), f"{name}_stderr": error}
    return found
