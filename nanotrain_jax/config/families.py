"""Decoder families as features, read by the model and the cost formulas. Needs no JAX."""

from typing import Literal, NamedTuple

Activation = Literal["silu", "gelu", "gelu_tanh"]


class Family(NamedTuple):
    """Features of a decoder family."""

    description: str
    ffn_ratio: tuple[int, int]  # default d_ff / d_model, as a fraction
    ffn_multiple: int = 1  # the default d_ff is rounded up to a multiple of this
    centered_norms: bool = False  # LayerNorm (subtracts the mean, adds a bias); else RMSNorm
    learned_positions: bool = False  # learned, at most model.max_seq_len; else rotary
    gated_mlp: bool = False  # three matmuls, one of them of a gate; else two
    activation: Activation = "gelu_tanh"  # of the gate, else of the MLP's hidden values
    biases: bool = False  # after every matmul except the output head, and those of queries, keys and values
    qkv_bias: bool = False  # after the matmuls of queries, keys and values
    qk_norm: bool = False  # RMSNorm of each query and key head, before rotary positions
    tied_embeddings: bool = False  # default of model.tie_embeddings
    norms_after: bool = False  # RMSNorm also of what attention and MLP add to the residual stream
    gains_from_one: bool = False  # norms multiply by 1 + gain
    scaled_embeddings: bool = False  # embeddings are multiplied by the root of d_model
    global_layers: str = "none"  # which layers attend beyond model.sliding_window: none, every:N, first:N
    rope_local_theta: float | None = None  # in place of model.rope_theta in the others, there without rope_scaling

    @property
    def has_local_layers(self) -> bool:
        """True if layers differ in how far they attend."""
        return self.global_layers != "none"

    def is_local(self, layer: int) -> bool:
        """Return whether model.sliding_window holds for a layer, numbered from 0."""
        kind, _, number = self.global_layers.partition(":")
        if kind == "every":
            return (layer + 1) % int(number) != 0
        return kind == "none" or layer >= int(number)

    def default_d_ff(self, d_model: int) -> int:
        numerator, denominator = self.ffn_ratio
        return -(-numerator * d_model // (denominator * self.ffn_multiple)) * self.ffn_multiple


# To add a family of these features, add a row here and a name to Name. To add a feature, implement it also in
# models/decoder_table.py (parameters), models/decoder_layer.py (computation) and, if its activations differ, in
# costs/activations.py and planner/step_time.py.
KEYS = "qkv_bias", "qk_norm", "activation", "global_layers", "rope_local_theta"  # features that are also keys of model
Name = Literal["llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma3"]
LLAMA = Family("RMSNorm, rotary, SwiGLU", ffn_ratio=(8, 3), ffn_multiple=256, gated_mlp=True, activation="silu")
FAMILIES: dict[Name, Family] = {
    "llama": LLAMA,
    "gpt2": Family(
        "LayerNorm, learned positions, GELU, biases",
        ffn_ratio=(4, 1),
        centered_norms=True,
        learned_positions=True,
        biases=True,
        qkv_bias=True,
        tied_embeddings=True,
    ),
    "mistral": LLAMA._replace(description="as llama, with a wider MLP", ffn_ratio=(7, 2)),
    "qwen2": LLAMA._replace(description="as llama, biases of queries, keys and values", qkv_bias=True),
    "qwen3": LLAMA._replace(description="as llama, norms of query and key heads", ffn_ratio=(3, 1), qk_norm=True),
    "gemma3": LLAMA._replace(
        description="as qwen3, norms also after attention and MLP, GELU, scaled embeddings, local and global layers",
        ffn_ratio=(4, 1),
        activation="gelu_tanh",
        qk_norm=True,
        tied_embeddings=True,
        norms_after=True,
        gains_from_one=True,
        scaled_embeddings=True,
        global_layers="every:6",
        rope_local_theta=10000.0,
    ),
}


def those(feature: str) -> str:
    """Return the names of the families that have a feature, as text."""
    return ", ".join(name for name, family in FAMILIES.items() if getattr(family, feature))
