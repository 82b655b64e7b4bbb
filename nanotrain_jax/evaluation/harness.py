"""Models for lm-evaluation-harness, which is imported here and nowhere else (extra `eval`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from nanotrain_jax.evaluation import scoring, text
from nanotrain_jax.evaluation.scoring import Request, Score
from nanotrain_jax.generation import prompts
from nanotrain_jax.generation.engine import Choice
from nanotrain_jax.generation.load import Loaded
from nanotrain_jax.generation.prompts import Prompt
from nanotrain_jax.generation.sampling import Sampling
from nanotrain_jax.generation.session import Session

TOKENS = 256  # generated at most, where a task does not say how many


class Adapter(LM):
    """A model as lm-evaluation-harness takes one. rows: requests that run together; begin(count) -> called for each."""

    def __init__(self, loaded: Loaded, rows: int, begin: Callable[[int], Callable[[], None]]):
        super().__init__()
        self.loaded, self.rows, self.begin = loaded, rows, begin

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Score what continues each context: its log-likelihood, and whether each token is the most likely one."""
        pairs = scoring.encoded(self.loaded.tokenizer, [one.args for one in requests])
        return [(score.log, score.is_greedy) for score in self._scores([self._request(*pair) for pair in pairs])]

    def _request(self, before: list[int], scored: list[int]) -> Request:
        try:
            return scoring.request(before, scored, self.loaded.context)
        except ValueError as error:
            raise ValueError(f"a continuation of the task {error}") from None

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        found, done = {}, self.begin(len(requests))
        for i, score in scoring.scores(self.loaded.engine, requests, self.rows):
            found[i] = score
            done()
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Score whole texts, of any length, in windows that move on by the context."""
        context = self.loaded.context
        texts = self.loaded.tokenizer.encode([scoring.as_bytes(one.args[0]) for one in requests])
        found = [text.after_first(ids, self.loaded) for ids in texts]
        rows = [text.windows(tokens, context, context, given) for tokens, given in found]
        scores = iter(self._scores([one for own in rows for one in own]))
        return [math.fsum(next(scores).log for _ in own) for own in rows]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continue each context until a stop text, greedily unless the task samples."""
        found, done = {}, self.begin(len(requests))
        asked = [one.args for one in requests]
        for how in {repr(sorted(how.items())): how for _, how in asked}.values():
            own = [i for i, one in enumerate(asked) if one[1] == how]
            for i, answer in zip(own, self._answers([asked[i][0] for i in own], how), strict=True):
                found[i] = answer
                done()
        return [found[i] for i in range(len(asked))]

    def _answers(self, contexts: list[str], how: dict[str, Any]) -> list[str]:
        """Continue contexts. A context that leaves no room for the answer is cut from the left, as in the harness."""
        loaded, stops = self.loaded, how.get("until") or []
        limit = next((how[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in how), TOKENS)
        if not 0 < limit < loaded.context:
            raise ValueError(f"the task generates {limit} tokens, but the model's context is {loaded.context}")
        session = Session(loaded.engine, Choice(sampling(how), tuple(loaded.tokenizer.stops)), loaded.context)
        encoded = loaded.tokenizer.encode([scoring.as_bytes(context) for context in contexts])
        end = [] if loaded.tokenizer.end is None else [loaded.tokenizer.end]
        given = [Prompt(loaded.tokenizer.begun(ids).tolist()[limit - loaded.context :] or end, {}) for ids in encoded]
        found = {}
        for rows in prompts.batches(given, self.rows):
            stop_texts = [stops] if isinstance(stops, str) else list(stops)
            answers = prompts.answers(session, loaded, [given[i] for i in rows], limit, stop_texts)
            found |= {i: answer.text for i, answer in zip(rows, answers, strict=True)}
        return [found[i] for i in range(len(given))]


def sampling(how: dict[str, Any]) -> Sampling:
    """Return how tokens are chosen, by the harness's keys: greedily, unless do_sample or temperature say otherwise."""
    temperature = how.get("temperature", 1.0 if how.get("do_sample") else 0.0)
    if how.get("do_sample") is False:
        temperature = 0.0
    return Sampling(temperature, how.get("top_k"), how.get("top_p", 1.0), how.get("min_p", 0.0))


def evaluate(names: Sequence[str], folder: Path | None, adapter: Adapter, limit: int | None) -> dict[str, Any]:
    """Run tasks of the harness -> its results of each. folder: of further tasks. Raises ValueError."""
    manager = TaskManager(include_path=folder and str(folder))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"--harness: lm-evaluation-harness has no task {unknown[0]!r}; `lm-eval ls tasks` lists its own, and "
            "--include names a folder of others"
        )
    found = lm_eval.simple_evaluate(
        model=adapter, tasks=list(names), limit=limit, task_manager=manager, log_samples=False
    )
    return found["results"]
