"""Writes token folders of the first format, as `prepare` did before there were shards."""

import json

import numpy as np

from nanotrain_jax.data import corpus


def write(folder, documents, tokenizer):
    """Tokenize documents into a token folder; -> its header."""
    folder.mkdir()
    rows = list(corpus.encoded(documents, tokenizer))
    ends = np.cumsum([len(ids) for ids, _, _ in rows])
    (folder / "tokens.bin").write_bytes(np.concatenate([ids for ids, _, _ in rows]).tobytes())
    keys = [key for _, key, _ in rows]
    np.save(folder / "documents.npy", np.array(list(zip(ends, keys, strict=True)), corpus.DOCUMENT))
    for name, text in tokenizer.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    header = {
        "format": corpus.FORMAT,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": tokenizer.dtype.str,
        "tokens": int(ends[-1]),
        "documents": len(rows),
        "replaced": sum(count for *_, count in rows),
        "end": tokenizer.end,
        "sha256": {name: corpus.digest(folder / name) for name in ("tokens.bin", "documents.npy")},
    }
    (folder / "header.json").write_text(json.dumps(header))
    return header
