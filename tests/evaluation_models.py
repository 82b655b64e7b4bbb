"""Models for tests of evaluation, with a tokenizer of words, and texts of them."""

import json

import generation_models
import jax
import numpy as np
import tokenizers

from nanotrain_jax.data.tokenizer import NAMES_END, TOKENIZER, of_files
from nanotrain_jax.generation import load
from nanotrain_jax.generation.load import Loaded, Placement

WORDS = 61  # w0 to w60, each a token; w3 ends documents
END = 3


def tokenizer_files(end="w3", begin=None):
    """tokenizer.json and the file beside it, as text. begin: a word that comes before each text."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if begin:
        special = [(begin, int(begin[1:]))]
        words.post_processor = tokenizers.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    return {TOKENIZER: words.to_str(), NAMES_END: json.dumps({"eos_token": end} if end else {})}


def loaded(weights, data=1, tensor=1, end="w3", begin=None):
    """A model on so many devices, of what `generation_models.weights` returns. end, begin: as of `tokenizer_files`."""
    model, _ = weights
    config, *_ = load.build(model.model_dump(), Placement(1), jax.devices()[:1])
    engine = generation_models.engine(*weights, data, tensor)
    return Loaded(engine, of_files(tokenizer_files(end, begin), "tokenizer.json"), config, None)


def text(count, seed=0):
    """Random words."""
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(4, WORDS, count))


class Oracle(generation_models.Oracle):
    """Log-probabilities in float64."""

    def log(self, tokens, count=1):
        """Of the last tokens, each after all before it -> their sum, and whether each is the most likely one."""
        logits = self.logits(tokens[:-1])[len(tokens) - 1 - count :]
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        own = logits[np.arange(count), tokens[len(tokens) - count :]]
        return float((own - total).sum()), bool((own == top).all())
