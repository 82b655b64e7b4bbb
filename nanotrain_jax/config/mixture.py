"""Values of `data.source` and `data.validation`: one source, or several with names and weights."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from nanotrain_jax.config.section import Section, key
from nanotrain_jax.config.values import Source

MIXED = "stdlib", "text", "tokens"  # kinds of sources that a mixture may have: rows of these are text throughout


class NamedSource(Section):
    """A source of `data.validation`."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=64)] = key(..., "of its metrics: val_loss/NAME")
    source: Source = key(..., "stdlib, text:GLOB or tokens:DIR")


class Part(NamedSource):
    """A source of a mixture."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = key(1.0, "share of the tokens of training, in proportion")


def kind_of(source: str) -> str:
    """Return what a source is: text of text:GLOB."""
    return source.partition(":")[0]


def _tag(value: Any) -> str:
    return TAGS[isinstance(value, list | tuple)]


TAGS = "one source", "several sources"  # pydantic has them among the keys of an error
Sources = Annotated[
    Annotated[Source, Tag(TAGS[0])] | Annotated[tuple[Part, ...], Field(strict=False), Tag(TAGS[1])],
    Discriminator(_tag),
]


def check(source: str | tuple[Part, ...], validation: tuple[NamedSource, ...]) -> None:
    """Raise ValueError unless the sources of a mixture and of validation are text with names of their own."""
    if source == ():
        raise ValueError("data.source=[] has no source; write [{name: NAME, source: SOURCE, weight: WEIGHT}, ...]")
    parts = () if isinstance(source, str) else source
    named = [*parts, *validation]
    for one in named:
        if kind_of(one.source) not in MIXED:
            raise ValueError(
                f"data: source {one.source!r} of {one.name} cannot be mixed or be a further validation set; use "
                "stdlib, text:GLOB or tokens:DIR"
            )
    names = [one.name for one in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"data: two sources are named {twice!r}; each needs a name of its own")
    if validation and isinstance(source, str) and kind_of(source) not in MIXED:
        raise ValueError(
            f"data.validation with data.source={source!r}, whose rows are not plain text; use stdlib, text:GLOB or "
            "tokens:DIR, or leave data.validation out"
        )


def origin(source: str | tuple[Part, ...]) -> str:
    """Return a source in words, for people."""
    if isinstance(source, str):
        return source
    total = sum(part.weight for part in source)
    return "mixture of " + ", ".join(f"{part.name} {part.weight / total:.3g}" for part in source)
