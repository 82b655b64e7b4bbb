"""What a run trains on and is evaluated on."""

from __future__ import annotations

from typing import NamedTuple

from nanotrain_jax.data import arrays
from nanotrain_jax.data.mixture import Mixture
from nanotrain_jax.data.packed_documents import PackedDocuments
from nanotrain_jax.data.packing import Packed
from nanotrain_jax.data.windows import Synthetic, Windows

Single = Windows | Synthetic | arrays.Rows | Packed | PackedDocuments
Source = Single | Mixture


class ValidationSet(NamedTuple):
    """Rows whose mean loss is logged as val_loss/NAME, and as a share of val_loss. name: "" of those that have no name;
    share: 0 of data.validation."""

    name: str
    rows: Single
    share: float


class Dataset(NamedTuple):
    """Training and validation sequences (val may be empty). fingerprint identifies them; replaced: see Corpus;
    picture_places: see data/arrays.py; pieces: into which documents were cut to hold some out (0: they are whole);
    has_ends: see Corpus; notes: lines about them for people; further: of data.validation, which of_further identifies.
    """

    train: Source
    val: Source
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str
    replaced: int = 0
    picture_places: int | None = None
    pieces: int = 0
    has_ends: bool = True
    notes: tuple[str, ...] = ()
    further: tuple[ValidationSet, ...] = ()
    of_further: str = ""

    @property
    def validation(self) -> list[ValidationSet]:
        """All sets to evaluate: what is held out, of a mixture by source, and data.validation."""
        if isinstance(self.val, Mixture):
            own = [ValidationSet(name, self.val.rows[name], share) for name, share in self.val.shares.items()]
        else:
            own = [ValidationSet("", self.val, 1.0)]
        return [found for found in [*own, *self.further] if len(found.rows)]
