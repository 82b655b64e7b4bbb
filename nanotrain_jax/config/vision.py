"""The section `vision`: pictures in front of the text. Without it the model sees text only."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from nanotrain_jax.config.section import Pair, Section, key
from nanotrain_jax.config.values import Layers, Positive, Width, near_divisors


class Vision(Section):
    """Patches of a picture, the encoder and its token budget. The first max_tokens places of a row are for the picture;
    the language model is that of the section model."""

    image_size: Positive = key(48, "height and width of the pictures, in pixels")
    patch_size: Positive = key(8, "height and width of a patch, in pixels, or after averaging to a coarser scale")
    scales: Annotated[tuple[Positive, ...], Pair] = key(
        (2, 1), "scales of candidate patches: a patch of scale s covers s patch_size pixels in each direction"
    )
    num_layers: Layers = key(2, "layers of the encoder")
    width: Width = key(96, "width of the encoder")
    num_heads: Width = key(4, "attention heads of the encoder")
    scorer_width: Width = key(32, "hidden width of the three scorers of patches")
    min_tokens: Positive = key(12, "patches to keep of a picture, at least")
    max_tokens: Positive = key(36, "patches to keep of a picture, at most; data.seq_len includes them")
    coverage: float = key(0.95, "keep the fewest patches that hold this fraction of the relevance of all", gt=0, le=1)

    @property
    def num_candidates(self) -> int:
        return sum((self.image_size // (scale * self.patch_size)) ** 2 for scale in self.scales)

    @model_validator(mode="after")
    def _sizes(self) -> Vision:
        for scale in self.scales:
            if self.image_size % (scale * self.patch_size):
                raise ValueError(
                    f"vision.scales: patches of {scale} x {self.patch_size} pixels do not tile vision.image_size="
                    f"{self.image_size}; use an image_size that is a multiple of {scale * self.patch_size}"
                )
        if not self.scales:
            raise ValueError("vision.scales=[] leaves no patches; write e.g. [2, 1]")
        if self.width % self.num_heads:
            raise ValueError(
                f"vision.num_heads={self.num_heads} does not divide vision.width={self.width}; "
                f"use {near_divisors(self.width, self.num_heads)}"
            )
        if not self.min_tokens <= self.max_tokens <= self.num_candidates:
            raise ValueError(
                f"vision.min_tokens={self.min_tokens}, vision.max_tokens={self.max_tokens}: must be in order, and at "
                f"most the {self.num_candidates} candidates of a picture"
            )
        return self
