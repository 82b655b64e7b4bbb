"""Decoder families (llama, gpt2) as features, read by the model and the cost formulas. Needs no JAX."""

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """Features of a decoder family."""

    description: str
    ffn_ratio: tuple[int, int]  # default d_ff / d_model, as a fraction
    ffn_multiple: int = 1  # the default d_ff is rounded up to a multiple of this
    centered_norms: bool = False  # LayerNorm (subtracts the mean, adds a bias); else RMSNorm
    learned_positions: bool = False  # learned, at most model.max_seq_len; else rotary
    gated_mlp: bool = False  # SwiGLU, three matmuls; else GELU, two
    biases: bool = False  # after every matmul except the output head, and those of queries, keys and values
    qkv_bias: bool = False  # after the matmuls of queries, keys and values
    tied_embeddings: bool = False  # default of model.tie_embeddings

    def default_d_ff(self, d_model: int) -> int:
        numerator, denominator = self.ffn_ratio
        return -(-numerator * d_model // (denominator * self.ffn_multiple)) * self.ffn_multiple


# To add a family of these features, add a row here and a name to Name. To add a feature, implement it also in
# models/decoder_table.py (parameters), models/decoder.py (computation) and, if its activations differ, in
# costs/memory.py and planner/estimate.py.
KEYS = ("qkv_bias",)  # features that are also keys of model
Name = Literal["llama", "gpt2"]
FAMILIES: dict[Name, Family] = {
    "llama": Family("RMSNorm, rotary, SwiGLU", ffn_ratio=(8, 3), ffn_multiple=256, gated_mlp=True),
    "gpt2": Family(
        "LayerNorm, learned positions, GELU, biases",
        ffn_ratio=(4, 1),
        centered_norms=True,
        learned_positions=True,
        biases=True,
        qkv_bias=True,
        tied_embeddings=True,
    ),
}
