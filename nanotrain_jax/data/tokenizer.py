"""Tokenizers: bytes, or a tokenizer.json with the files that Hugging Face model folders have beside it. Needs no JAX.

Which token ends a document: `data.end_token`; else `eos_token` of tokenizer_config.json; else the first `eos_token_id`
of generation_config.json or config.json; else a usual name that the vocabulary has. Generated text stops at any token
that one of them names.

What begins a text: `data.begin_token`; else, where tokenizer_config.json has `add_bos_token`, its `bos_token` or
nothing; else what the post-processor of tokenizer.json puts before a text, which often is nothing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from nanotrain_jax.config.values import is_remote, with_message
from nanotrain_jax.data import stored

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # usual names of the end-of-document token, by preference
TOKENIZER = "tokenizer.json"
NAMES_END = "tokenizer_config.json"  # eos_token: a string, or an object with it as `content`
ADDS_BEGIN, NAMES_BEGIN = "add_bos_token", "bos_token"  # in the same file: true or false, and a token
NO_BEGIN = "none"  # of data.begin_token
NAMES_IDS = "generation_config.json", "config.json"  # eos_token_id: a number or a list
CHAT_TEMPLATE = "chat_template.jinja"  # of newer folders; older ones have it in tokenizer_config.json
BEGIN = " begin "  # before its id in the name of a tokenizer
FILES = TOKENIZER, NAMES_END, *NAMES_IDS, CHAT_TEMPLATE


class Tokenizer(NamedTuple):
    """name: identifies it (a hash for files); encode: texts -> token ids of each; end: id of the token that ends
    documents; stops: ids at which generated text stops; files: name -> text of the files that give it; none for bytes;
    begin: ids that come before each text which no chat template wrote.
    """

    name: str
    vocab_size: int
    encode: Callable[[Sequence[bytes]], list[np.ndarray]]
    end: int | None
    stops: frozenset[int]
    files: Mapping[str, str]
    begin: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """Dtype of stored token ids."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def is_bytes(self) -> bool:
        """True for the byte tokenizer."""
        return not self.files

    def begun(self, ids: np.ndarray) -> np.ndarray:
        """Return the tokens of a text behind those of `begin`, unless they begin with them."""
        begin = np.asarray(self.begin, ids.dtype)
        return ids if np.array_equal(ids[: len(begin)], begin) else np.concatenate([begin, ids])


class Encoded(NamedTuple):
    """A text as tokens. starts, stops: the characters of each token, first and last + 1; tokens of one character have
    the same. All [tokens]."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


def load(
    path: str,
    end_token: str | None = None,
    begin_token: str | None = None,
    key: str = "data.tokenizer",
    others: str = "bytes",
) -> Tokenizer:
    """Load a tokenizer: `bytes`, a tokenizer.json, a folder with one, or a token folder in a store. Raises ValueError
    or OSError that name the key.

    end_token, begin_token: end documents and begin texts instead of what the files say (data.end_token,
    data.begin_token). others: values the key accepts besides a path, for messages.
    """
    if path == "bytes":
        if end_token is not None:
            raise ValueError(
                f"the end token {end_token!r} is not one of bytes, where id 256 ends a document; remove it"
            )
        if begin_token not in (None, NO_BEGIN):
            raise ValueError(
                f"the begin token {begin_token!r} is not one of bytes, where none begins a document; remove it"
            )
        return of_bytes()
    if is_remote(path):
        paths = [stored.folder_at(path) / name for name in FILES]
        files = {path.name: stored.content(path).decode() for path in paths if stored.exists(path)}
        return of_files(files, path, end_token, begin_token)
    remedy = f"give {others}, or the path of a tokenizer.json or of its folder (as in Hugging Face model repositories)"
    file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
    try:
        files = {TOKENIZER: file.read_text(encoding="utf-8")}
    except OSError as error:
        raise with_message(error, f"{key}={path!r} cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{key}={path!r} is not a tokenizer.json (not UTF-8); {remedy}") from None
    for name in FILES[1:]:
        if (file.parent / name).is_file():
            files[name] = (file.parent / name).read_text(encoding="utf-8", errors="replace")
    return of_files(files, str(file), end_token, begin_token)


def of_bytes() -> Tokenizer:
    """Return the byte tokenizer: ids 0-255 are bytes, 256 ends a document."""
    return Tokenizer("bytes", 257, lambda texts: [np.frombuffer(t, np.uint8) for t in texts], 256, frozenset([256]), {})


def check_name(tokenizer: Tokenizer, trained_with: str | None, folder: Path) -> None:
    """Raise ValueError unless the tokenizer in a folder is that of a checkpoint. trained_with: None: it has none."""
    if begin_apart(tokenizer.name, trained_with) == NO_BEGIN:
        raise ValueError(
            f"{folder / TOKENIZER} with the files beside it is {tokenizer.name}, but the checkpoint was trained with "
            f'{trained_with}: no begin token came before its texts; write "{ADDS_BEGIN}": false into '
            f"{folder / NAMES_END}, or train it again"
        )
    if trained_with not in (None, tokenizer.name):
        raise ValueError(
            f"{folder / TOKENIZER} with the files beside it is {tokenizer.name}, but the checkpoint was trained with "
            f"{trained_with}: it was modified; put the tokenizer of the run there"
        )


def begin_of(name: str) -> str:
    """Return the begin token that the name of a tokenizer tells, an id; "" if it tells none."""
    return name.partition(BEGIN)[2]


def begin_apart(now: str | None, then: str | None) -> str:
    """Return which data.begin_token makes the first of two tokenizers the second, in words; "" if they are the same, or
    differ in more. now, then: their names."""
    if None in (now, then) or now == then or now.partition(BEGIN)[0] != then.partition(BEGIN)[0]:
        return ""
    return f"the token of id {begin_of(then)}" if begin_of(then) else NO_BEGIN


def of_files(
    files: Mapping[str, str], origin: str, end_token: str | None = None, begin_token: str | None = None
) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json (`tokenizers` library) and the files beside it. Raises ValueError.

    files: name -> text. origin: where they come from, for messages. end_token, begin_token: as of `load`.
    """
    text = files[TOKENIZER]
    try:
        model = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"tokenizer {origin!r} is not a tokenizer.json ({error}); give such a file, or bytes"
        ) from None
    model.no_truncation()
    model.no_padding()
    named = ([] if end_token is None else [end_token]) + _named(files, origin)
    end = _end(named, model)
    if named and end is None:
        raise ValueError(
            f"the end token {named[0]!r} is not a token of {origin!r}; set data.end_token to one (<|endoftext|>, say)"
        )
    stops = frozenset({_id(token, model) for token in named} | {end}) - {None}
    begins = _begins(files, model, origin, begin_token)
    begin = tuple(_id(token, model) for token in begins)
    if None in begin:
        raise ValueError(
            f"the begin token {begins[begin.index(None)]!r} is not a token of {origin!r}; set data.begin_token to one, "
            f"or to {NO_BEGIN}"
        )

    def encode(texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [t.decode("utf-8", errors="replace") for t in texts]
        return [np.asarray(e.ids, np.uint32) for e in model.encode_batch_fast(decoded, add_special_tokens=False)]

    name = "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]
    if end != _end([], model):
        name += f" end {end}"
    if begin:
        name += BEGIN + " ".join(map(str, begin))
    vocab_size = max(model.get_vocab().values(), default=0) + 1
    described = _described(files, end, stops, model)
    in_files = tuple(_id(token, model) for token in _begins(described, model, origin))
    if in_files != begin:  # data.begin_token has none or one
        named = {NAMES_BEGIN: model.id_to_token(begin[0])} if begin else {}
        _add(described, NAMES_END, {ADDS_BEGIN: bool(begin)} | named)
    return Tokenizer(name, vocab_size, encode, end, stops, described, begin)


def _id(token: str | int, model: tokenizers.Tokenizer) -> int | None:
    """Return the id of a token or id; None if the vocabulary does not have it."""
    token = model.id_to_token(token) if isinstance(token, int) else token
    return None if token is None else model.token_to_id(token)


def _end(named: Sequence[str | int], model: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token that ends documents: the first that is named, else a usual one."""
    if named:
        return _id(named[0], model)
    return next((i for i in map(model.token_to_id, END_OF_TEXT) if i is not None), None)


def _named(files: Mapping[str, str], origin: str) -> list[str | int]:
    """Return the end tokens that the files beside a tokenizer.json name. Raises ValueError."""
    found = []
    for name in (NAMES_END, *NAMES_IDS):
        key, kind = ("eos_token", str) if name == NAMES_END else ("eos_token_id", int)
        value = parse_json(files, name, origin).get(key)
        if isinstance(value, dict):
            value = value.get("content")
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is kind for token in tokens) or (kind is int and min(tokens, default=0) < 0):
            raise ValueError(f"{key}={value!r} of {name} beside {origin!r} names no token; mend or remove the file")
        found += tokens
    return found


def _begins(
    files: Mapping[str, str], model: tokenizers.Tokenizer, origin: str, asked: str | None = None
) -> list[str | int]:
    """Return the tokens or ids that come before a text. asked: data.begin_token. Raises ValueError."""
    if asked is not None:
        return [] if asked == NO_BEGIN else [asked]
    config = parse_json(files, NAMES_END, origin)
    adds, token = config.get(ADDS_BEGIN), config.get(NAMES_BEGIN)
    if adds is None or (adds and token is None):
        return [] if model.post_processor is None else _added(json.loads(model.post_processor.__getstate__()))
    token = token.get("content") if isinstance(token, dict) else token
    if type(adds) is not bool or (adds and not isinstance(token, str)):
        raise ValueError(
            f"{ADDS_BEGIN}={adds!r} with {NAMES_BEGIN}={token!r} of {NAMES_END} beside {origin!r} is not true or false "
            "with a token; mend or remove the file"
        )
    return [token] if adds else []


def _added(processor: Mapping[str, Any]) -> list[str | int]:
    """Return the tokens or ids that a post-processor, as tokenizer.json has it, puts before a text."""
    kind = processor["type"]
    if kind == "Sequence":
        return [token for one in processor["processors"] for token in _added(one)]
    if kind == "TemplateProcessing":
        pieces = takewhile(lambda piece: "SpecialToken" in piece, processor["single"])
        names, ids = [piece["SpecialToken"]["id"] for piece in pieces], processor["special_tokens"]
        return [token for name in names for token in (ids[name]["ids"] if name in ids else [name])]
    return [processor["cls"][1]] if kind in ("BertProcessing", "RobertaProcessing") else []


def parse_json(files: Mapping[str, str], name: str, origin: str) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none. Raises ValueError."""
    try:
        content = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} beside {origin!r} is damaged ({error}); mend or remove the file") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} beside {origin!r} is not a JSON object; mend or remove the file")
    return content


def _described(
    files: Mapping[str, str], end: int | None, stops: frozenset[int], model: tokenizers.Tokenizer
) -> dict[str, str]:
    """Return the files that give the same tokenizer in another folder: as they came, with what they lack added."""
    out = {name: text for name, text in files.items() if name != "config.json"}  # which is the model's
    if _end(_named(out, ""), model) != end:
        _add(out, NAMES_END, {"eos_token": model.id_to_token(end)})
    named = {_id(token, model) for token in _named(out, "")}
    if len(stops) > 1 and not stops <= named:
        _add(out, "generation_config.json", {"eos_token_id": sorted(stops)})
    return out


def _add(files: dict[str, str], name: str, keys: Mapping[str, Any]) -> None:
    """Write keys into a JSON file, in place."""
    files[name] = json.dumps(parse_json(files, name, "") | keys, indent=2) + "\n"


def text_decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text."""
    if tokenizer.is_bytes:
        return lambda ids: bytes(i for i in ids if i != tokenizer.end).decode("utf-8", "replace")
    return partial(tokenizers.Tokenizer.from_str(tokenizer.files[TOKENIZER]).decode, skip_special_tokens=False)


def line_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens with which a line ends."""
    if tokenizer.is_bytes:
        return [ord("\n")]
    vocabulary = tokenizers.Tokenizer.from_str(tokenizer.files[TOKENIZER]).get_vocab()
    return sorted(i for token, i in vocabulary.items() if token.endswith(("\n", "\u010a", "<0x0A>")))  # byte-level BPE


def text_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[Encoded]]:
    """Return a function from texts to their tokens: special tokens in a text are such tokens, and none is added."""
    if tokenizer.is_bytes:
        return lambda texts: [_encoded_bytes(text) for text in texts]
    model = tokenizers.Tokenizer.from_str(tokenizer.files[TOKENIZER])
    model.no_truncation()
    model.no_padding()
    model.post_processor = None  # that of byte-level BPE takes white space out of the offsets

    def encode(texts: Sequence[str]) -> list[Encoded]:
        found = model.encode_batch(texts, add_special_tokens=False)
        offsets = (np.array(one.offsets, np.int64).reshape(-1, 2).T for one in found)
        return [Encoded(np.array(one.ids, np.int64), *both) for one, both in zip(found, offsets, strict=True)]

    return encode


def _encoded_bytes(text: str) -> Encoded:
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + sum((points >= least).astype(int) for least in (0x80, 0x800, 0x10000))  # in UTF-8
    starts = np.repeat(np.arange(len(points)), sizes)
    return Encoded(np.frombuffer(text.encode(), np.uint8).astype(np.int64), starts, starts + 1)


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id -> text of the special tokens, and of those at which generated text stops."""
    if tokenizer.is_bytes:
        return {tokenizer.end: "<end>"}
    model = tokenizers.Tokenizer.from_str(tokenizer.files[TOKENIZER])
    special = {i: token.content for i, token in model.get_added_tokens_decoder().items() if token.special}
    return special | {i: model.id_to_token(i) for i in tokenizer.stops}
