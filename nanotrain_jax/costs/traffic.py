"""Kinds of traffic between devices."""

from __future__ import annotations

from enum import Enum


class Traffic(Enum):
    """What a row of `communication` moves between devices."""

    GRADIENTS = "gradients"
    GRADIENT_SHARDS = "gradient shards"
    COMPRESSED = "gradients, compressed"
    WEIGHTS = "weights, forward and backward"
    UPDATED_WEIGHTS = "updated weights"
    ACTIVATIONS = "activations"
    REGATHERED_ACTIVATIONS = "activations, gathered again in the backward"
    ADAPTERS = "activations of adapters, as wide as their rank"
    BETWEEN_STAGES = "activations and their gradients"
    SHARED_BY_STAGES = "activations and their gradients at both ends"
    ATTENTION = "keys, values and their gradients"
    HEADS = "queries, keys, values and outputs, tokens for heads"
    LOSS = "loss"
    ROUTERS = "loads of experts"
    EXPERTS = "tokens to their experts and back, and their gradients"
    SYNCHRONIZATION = "weights of replicas"
    MOMENTUM = "momentum, shards for whole matrices"
    ENCODER = "activations of the encoder of pictures"
    ENCODED = "encoded pictures and their gradients"
    QUESTION = "embeddings of the text, for the relevance of patches"

    @property
    def is_gradients(self) -> bool:
        """True if the row moves gradients of parameters."""
        return self in (Traffic.GRADIENTS, Traffic.GRADIENT_SHARDS, Traffic.COMPRESSED)
