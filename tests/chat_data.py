"""Conversations for tests: a small tokenizer, and templates written from the published formats of chat models."""

import json
from itertools import groupby

import numpy as np
import tokenizers

from nanotrain_jax.config import load as request
from nanotrain_jax.data import batches as data

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
)  # fmt: skip

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}" + CHATML
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MARKED = (  # ChatML that says itself what is the assistant's
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITHOUT_THOUGHTS = (  # takes the thoughts out of all answers but the last, as templates of reasoning models do
    "{% for m in messages %}{% set said = m.content if loop.last else m.content.split('</think>')[-1] %}"
    "{{ '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROLES_ALONE = (  # a turn ends where the next one begins, as in GLM-4
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def talk(*said):
    """Messages of user and assistant in turn; a first one may be "system: ..."."""
    first = [{"role": "system", "content": said[0][8:]}] if said[0].startswith("system: ") else []
    return first + [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said[len(first) :])
    ]


def write_tokenizer(folder, template=None, merges=(), **names):
    """Write a byte-level BPE to a folder: without merges each byte is a token. names: special tokens of its config."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + ["".join(pair) for pair in merges]
    model = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)  # as GPT-2 has
    model.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", **names} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_rows(path, *rows):
    """Write a .jsonl file; -> its data.source."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"chat:{path}"


def load(source, tokenizer, **keys):
    """Open a source as a run does."""
    keys = {"seq_len": 512, "val_fraction": 0.0, "tokenizer": str(tokenizer)} | keys
    return data.load(request.parse({"data": {"source": source, **keys}}).data)


def marked(row, folder):
    """Return the text of a row, what is learned in [[ ]]; tokens of several bytes between dots."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inputs, targets = row["inputs"].tolist(), row["targets"].tolist()
    stop = len(inputs) if row["starts"][-1] == 0 else int(row["starts"][-1])
    learned = [False, *(target >= 0 for target in targets[: stop - 1])]
    assert all(t == inputs[i + 1] for i, t in enumerate(targets) if t >= 0)
    assert not (row["starts"][:stop].any() or np.any(row["targets"][stop - 1 :] >= 0))
    pieces = [model.decode([i], skip_special_tokens=False) for i in inputs[:stop]]
    pieces = [f"·{p}·" if len(p) > 1 and p not in SPECIAL else p for p in pieces]
    runs = groupby(zip(learned, pieces, strict=True), lambda pair: pair[0])
    texts = ((is_learned, "".join(piece for _, piece in run)) for is_learned, run in runs)
    return "".join(f"[[{text}]]" if is_learned else text for is_learned, text in texts)
