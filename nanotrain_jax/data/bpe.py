"""Train a tokenizer: byte-level BPE, as GPT-2 has it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import tokenizers

from nanotrain_jax.data.tokenizer import END_OF_TEXT, TOKENIZER, Tokenizer, of_files


def trained(texts: Iterator[bytes], size: str) -> Tokenizer:
    """Return a byte-level BPE of `size` ids, trained on the texts. Raises ValueError."""
    end = END_OF_TEXT[0]
    if not re.fullmatch(r"\d{1,7}", size, re.ASCII) or int(size) < 257:
        raise ValueError(
            f"--tokenizer=train-bpe:{size}: the size must be at least 257 (256 bytes and {end}); "
            "use e.g. train-bpe:32000"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((t.decode("utf-8", errors="replace") for t in texts), trainer)
    return of_files({TOKENIZER: model.to_str()}, "the BPE just trained")
