"""Families of decoders: what distinguishes them, as features that the model and the closed forms read. No JAX."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """The features of a family of decoders."""

    meaning: str
    centered_norms: bool  # LayerNorm, which subtracts the mean and adds a bias; else RMSNorm
    learned_positions: bool  # added to the embedding, at most model.max_seq_len; else rotary
    gated_mlp: bool  # SwiGLU, three matmuls; else GELU, two
    biases: bool  # after every matmul but the output head's
    tied_embeddings: bool  # by default
    ffn_ratio: tuple[int, int]  # default d_ff / d_model, as a fraction
    ffn_multiple: int  # to which the default d_ff is rounded up

    def default_d_ff(self, d_model: int) -> int:
        """Hidden width of the MLP where the config leaves it out."""
        numerator, denominator = self.ffn_ratio
        return -(-numerator * d_model // (denominator * self.ffn_multiple)) * self.ffn_multiple


# A new family of these features is a row here, and a name in Name. A new feature is also read where it acts: by
# models/decoder_table.py (its parameters), model.py (what they compute) and, if its activations differ, audit/memory.py
# and planner/estimate.py.
Name = Literal["llama", "gpt2"]
FAMILIES: dict[Name, Family] = {
    "llama": Family(
        "RMSNorm, rotary, SwiGLU",
        centered_norms=False,
        learned_positions=False,
        gated_mlp=True,
        biases=False,
        tied_embeddings=False,
        ffn_ratio=(8, 3),
        ffn_multiple=256,
    ),
    "gpt2": Family(
        "LayerNorm, learned positions, GELU, biases",
        centered_norms=True,
        learned_positions=True,
        gated_mlp=False,
        biases=True,
        tied_embeddings=True,
        ffn_ratio=(4, 1),
        ffn_multiple=1,
    ),
}
