"""The base of the sections of a config: frozen, strict, every key with a default and a description."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Pair = Field(strict=False)  # accepts a YAML list as a tuple


def key(default: Any, description: str, **rules: Any) -> Any:
    """Return a key of a section, with rules of pydantic."""
    return Field(default=default, description=description, **rules)


class Section(BaseModel):
    """A section of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
