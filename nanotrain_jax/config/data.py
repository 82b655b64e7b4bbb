"""The section data of a config: what is read, how it becomes rows, and what is held out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import model_validator

from nanotrain_jax.config import mixture
from nanotrain_jax.config.mixture import NamedSource, Part, Sources
from nanotrain_jax.config.section import Pair, Section, key
from nanotrain_jax.config.values import Path, Seed, Sequences, Tokens, Verify, is_chat


class Data(Section):
    """Training and validation data. Documents are concatenated, each between the begin and end tokens of the tokenizer,
    and split into sequences of seq_len tokens."""

    source: Sources = key(
        "stdlib",
        "stdlib (source code of Python's standard library) | text:GLOB or a folder | tokens:DIR (of "
        "nanotrain_jax.prepare; also s3://..., gs://...) | arrays:DIR (data/arrays.py) | chat:GLOB (conversations and "
        "completions in .jsonl: "
        "data/README.md) | pairs:GLOB (a chosen and a rejected completion, for train.objective) | synthetic | a "
        "mixture: [{name, source, weight}, ...], weights by tokens",
    )
    tokenizer: Path | None = key(
        None,
        "bytes | path of a tokenizer.json or of its folder (as in Hugging Face model repositories); null: bytes, or "
        "that of tokens:DIR",
    )
    end_token: str | None = key(
        None,
        "token that ends each document; null: the one that the files beside tokenizer.json name (eos_token, "
        "eos_token_id), else <|endoftext|>, <|end_of_text|> or </s>",
    )
    begin_token: str | None = key(
        None,
        "token that begins each document, and each plain prompt and text later; none: no token; null: what the "
        "tokenizer's files say (add_bos_token of tokenizer_config.json, else the post-processor of tokenizer.json)",
    )
    field: str = key("text", "text:GLOB: key of .jsonl and column of .parquet with the text")
    batch_size: Sequences = key(32, "global batch size, in sequences per step")
    seq_len: Tokens = key(256, "sequence length, in tokens; a sequence may span documents")
    attend_across_documents: bool = key(
        True,
        "false: attention, positions and targets of each document of a sequence are as if it stood alone; so are "
        "examples of chat:GLOB",
    )
    chat_template: Path | None = key(
        None, "chat:GLOB: file with the Jinja template of conversations; null: that of the tokenizer's folder"
    )
    loss_on: Literal["assistant", "completion", "all"] = key(
        "assistant",
        "chat:GLOB: what is learned; assistant: all that the assistant says; completion: its last answer; all: "
        "questions too",
    )
    pack: Literal["best_fit", "none", "concatenate"] | None = key(
        None,
        "what shares a row; best_fit: whole documents or examples, each to itself; concatenate: cut from joined "
        "documents; none: one example of chat:GLOB; null: best_fit of chat:GLOB, concatenate of text",
    )
    too_long: Literal["drop", "cut"] = key(
        "drop", "chat:GLOB: what happens to examples longer than seq_len; cut: their end is lost"
    )
    seed: Seed = key(0, "random seed of the order of training sequences")
    val_fraction: float = key(
        0.05,
        "fraction of tokens held out for validation, in whole documents or examples; 0: none. Of tokens:DIR prepare "
        "decides it",
        ge=0,
        lt=1,
    )
    validation: Annotated[tuple[NamedSource, ...], Pair] = key(
        (),
        "[{name, source}, ...]: further validation sets, logged as val_loss/NAME; training leaves out their documents",
    )
    exhausted: Literal["repeat", "end"] = key(
        "repeat", "what happens when a source has been read once: it is read again in another order, or the run ends"
    )
    verify: Verify = key(
        "sample",
        "checksums before training: sample: of some blocks, in a time that does not grow with the data; full: of all "
        "files; off: none. Files of arrays:DIR and of the first format of tokens:DIR are verified whole unless off",
    )

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, keys: Any) -> Any:
        """Examples of chat:GLOB and pairs:GLOB, and documents packed by best fit, do not attend to each other."""
        if isinstance(keys, dict) and keys.get("pack") == "best_fit" and not is_chat(keys.get("source")):
            return {"attend_across_documents": False} | keys
        if not isinstance(keys, dict) or not is_chat(keys.get("source")):
            return keys
        if keys.get("attend_across_documents", False) is True:
            raise ValueError(
                f"data.attend_across_documents=true with data.source={keys['source']!r}: examples stand alone; leave "
                "data.attend_across_documents out"
            )
        return {"attend_across_documents": False} | keys

    @model_validator(mode="after")
    def _mixture(self) -> Data:
        mixture.check(self.source, self.validation)
        return self

    @model_validator(mode="after")
    def _pairs(self) -> Data:
        given = {"loss_on": self.loss_on, "too_long": self.too_long}
        wrong = next((key for key, value in given.items() if value not in ("assistant", "drop")), None)
        if self.is_pairs and wrong:
            raise ValueError(
                f"data.{wrong}={given[wrong]} with data.source={self.source!r}: whole completions are compared, and "
                "nothing else; leave it out"
            )
        return self

    @property
    def is_chat(self) -> bool:
        """True if the source is conversations and completions, or pairs of them, one to a line."""
        return is_chat(self.source)

    @property
    def is_pairs(self) -> bool:
        """True if the source is pairs of completions."""
        return self.kind == "pairs"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources of a mixture; () of a single source."""
        return () if isinstance(self.source, str) else self.source

    @property
    def kind(self) -> str:
        """What the source is: text of text:GLOB; "" of a mixture."""
        return "" if self.parts else mixture.kind_of(self.source)

    @property
    def kinds(self) -> set[str]:
        """What all of its sources are."""
        return {mixture.kind_of(part.source) for part in self.parts} or {self.kind}

    @property
    def packing(self) -> str:
        """What shares a row. Raises ValueError unless the source has such rows."""
        found = self.pack or ("best_fit" if self.is_chat else "concatenate")
        if found == ("concatenate" if self.is_chat else "none"):
            raise ValueError(
                f"data.pack={found} with data.source={self.origin!r}, which has no such rows; leave it out"
            )
        if found == "best_fit" and self.attend_across_documents:
            raise ValueError(
                "data.pack=best_fit keeps documents apart; leave data.attend_across_documents out, or use "
                "data.pack=concatenate"
            )
        return found

    @property
    def origin(self) -> str:
        """The source in words, for people."""
        return mixture.origin(self.source)

    @property
    def pairs_per_row(self) -> int:
        """How many pairs a row has at most: of two examples, each of two tokens at least."""
        return self.seq_len // 4

    def reading(self, source: str | tuple[Part, ...]) -> Data:
        """Return the section with another source. Raises ValueError."""
        apart = {"attend_across_documents": False} if is_chat(source) else {}
        mixture.check(source, self.validation)
        return self.model_copy(update={"source": source} | apart)

    @property
    def has_ignored_targets(self) -> bool:
        """True if training rows may have targets below 0, which are ignored: then a step counts its targets."""
        return self.kind == "arrays" or not self.attend_across_documents
