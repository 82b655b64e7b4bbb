"""The section model of a config: the decoder's sizes and features. Needs no JAX."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nanotrain_jax.config import families
from nanotrain_jax.config.experts import Experts
from nanotrain_jax.config.section import Pair, Section, key
from nanotrain_jax.config.values import Count, Factory, Layers, Tokens, Vocabulary, Width, near_divisors


class RopeScaling(Section):
    """The section model.rope_scaling, with the keys of Hugging Face's rope_scaling; models/ops.py computes it."""

    type: Literal["linear", "llama3", "yarn"] = key(..., "which frequencies are divided by factor")
    factor: float = key(..., "divides frequencies", ge=1)
    original_max_seq_len: Tokens | None = key(None, "llama3, yarn: tokens of a sequence before scaling")
    low_freq_factor: float = key(1.0, "llama3: waves that turn less often in that many tokens are scaled", gt=0)
    high_freq_factor: float = key(4.0, "llama3: those that turn more often are not", gt=0)
    beta_fast: float = key(32.0, "yarn: waves that turn more often are not scaled", gt=0)
    beta_slow: float = key(1.0, "yarn: those that turn less often are", gt=0)
    attention_factor: float | None = key(None, "yarn: multiplies queries and keys; null: 0.1 ln(factor) + 1", gt=0)

    @model_validator(mode="after")
    def _fits(self) -> RopeScaling:
        if self.type != "linear" and self.original_max_seq_len is None:
            raise ValueError(
                f"model.rope_scaling.type={self.type} without original_max_seq_len: it decides which frequencies are "
                "scaled; set model.rope_scaling.original_max_seq_len"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high or self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"model.rope_scaling: low_freq_factor={low} and beta_slow={self.beta_slow} must be below "
                f"high_freq_factor={high} and beta_fast={self.beta_fast}; exchange them"
            )
        return self


Matrix = Literal["q", "k", "v", "out", "gate", "up", "down"]


class Lora(Section):
    """The section train.lora: low-rank adapters beside frozen matrices (LoRA, arXiv 2106.09685; models/lora.py)."""

    rank: Width = key(16, "columns of A and rows of B")
    alpha: float = key(32.0, "A B is multiplied by alpha / rank", gt=0)
    targets: Annotated[tuple[Matrix, ...], Pair, Field(min_length=1)] = key(
        ("q", "k", "v", "out", "gate", "up", "down"), "matrices of layers that have an adapter; gpt2 has no gate"
    )
    rslora: bool = key(False, "multiply A B by alpha / sqrt(rank) instead (arXiv 2312.03732)")
    dropout: Literal["none"] = key("none", "adapters have no dropout: a step is a pure function of weights and batch")

    @property
    def scale(self) -> float:
        """What multiplies A B."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @model_validator(mode="after")
    def _once(self) -> Lora:
        twice = next((name for name in self.targets if self.targets.count(name) > 1), None)
        if twice:
            raise ValueError(f"targets={list(self.targets)} has {twice!r} twice; name each matrix once")
        return self


class Model(Section):
    """The decoder. A model built by `factory` may read the same keys."""

    factory: Factory | None = key(
        None, "package.module:function that builds a custom model (models/contract.py); null: the built-in decoder"
    )
    family: families.Name = key(
        "llama", "; ".join(f"{name}: {family.description}" for name, family in families.FAMILIES.items())
    )
    num_layers: Layers = key(4, "transformer layers")
    d_model: Width = key(128, "hidden size (width of the residual stream)")
    num_heads: Width = key(4, "attention (query) heads")
    head_dim: Width | None = key(None, "width of a head; null: d_model / num_heads")
    num_kv_heads: Width | None = key(None, "key/value heads (grouped-query attention); null: num_heads")
    qkv_bias: bool | None = key(
        None, f"biases of queries, keys and values; null: true for {families.those('qkv_bias')}"
    )
    qk_norm: bool | None = key(
        None, f"RMSNorm of each query and key head, before rotary positions; null: true for {families.those('qk_norm')}"
    )
    d_ff: Width | None = key(
        None,
        "MLP hidden size, with model.experts of the layers without; null: of the family: 4 d_model (gpt2), 8/3 d_model "
        "rounded up to a multiple of 256 (llama)",
    )
    experts: Experts | None = key(
        None, "{num, top_k, d_ff, ...}: a mixture of experts in place of MLPs (models/experts.py); null: none"
    )
    activation: families.Activation | None = key(
        None,
        "activation of the MLP: silu, gelu or its approximation gelu_tanh; null: gelu_tanh (gpt2, gemma3), else silu",
    )
    vocab_size: Vocabulary | None = key(None, "vocabulary size; null: that of the tokenizer")
    max_seq_len: Tokens | None = key(None, "maximum sequence length, in tokens; null: data.seq_len")
    rope_theta: float = key(10000.0, "base of the frequencies of rotary positions", gt=0)
    rope_scaling: RopeScaling | None = key(
        None, "{type: linear | llama3 | yarn, factor, original_max_seq_len, ...}, as models/ops.py says; null: none"
    )
    norm_eps: float = key(1e-5, "epsilon of RMSNorm and LayerNorm", gt=0)
    tie_embeddings: bool | None = key(
        None, f"share weights of embedding and output head; null: true for {families.those('tied_embeddings')}"
    )
    sliding_window: Tokens | None = key(
        None, "tokens that a token attends to at most, itself and those before it; null: all before it"
    )
    global_layers: Annotated[str, Field(pattern=r"^(none|(every|first):[1-9]\d{0,5})$")] | None = key(
        None, "layers that attend beyond sliding_window: none, every:N, first:N; null: every:6 for gemma3, else none"
    )
    rope_local_theta: float | None = key(
        None,
        "rope_theta of the other layers, there without rope_scaling; null: 10000 for gemma3, else rope_theta",
        gt=0,
    )
    lora: Lora | None = key(None, "adapters; null: those of train.lora")
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "attention kernel; auto: cuDNN flash attention for 16-bit dtypes on a GPU, else xla"
    )
    kernels: Literal["auto", "xla", "pallas"] = key(
        "auto",
        "of the backward of norms and GELU, and the softmax of the loss; pallas: ours on GPUs; auto: pallas on NVIDIA "
        "GPUs from Ampere on, else xla",
    )
    grouped_matmul: Literal["padded", "tokamax"] = key(
        "padded",
        "what multiplies the rows of experts: matmuls of XLA, padded; or tokamax's kernel, on Hopper GPUs, in 16 bit, "
        "with pip install 'nanotrain_jax[kernels]'",
    )
    unroll: bool | Literal["auto"] = key(
        "auto",
        "write the loop over layers out: less memory traffic, longer to compile; auto: on GPUs, up to 48 layers, of "
        "width 2,048 without experts or with zero 3, without offload; never in pipelines, with parallel.prefetch or "
        "with offload of gradients or activations",
    )
    loss_chunk: Count = key(
        0, "compute logits and loss in chunks of this many tokens per device; 0: the whole microbatch"
    )

    @property
    def features(self) -> families.Family:
        """The family's features, with those that keys of their names give."""
        family = families.FAMILIES[self.family]
        given = {name: value for name in families.KEYS if (value := getattr(self, name)) is not None}
        return family._replace(**given) if given else family

    @property
    def ffn_width(self) -> int:
        """How many hidden values of an MLP a token has: those of all its experts. Of a resolved model."""
        return self.mlp_width * (self.experts.top_k + self.experts.shared) if self.experts else self.d_ff

    @property
    def mlp_width(self) -> int:
        """Hidden size of an MLP of the stack `layers`: of one expert. Of a resolved model."""
        return self.experts.d_ff if self.experts else self.d_ff

    @property
    def dense_layers(self) -> int:
        """Layers of the stack `dense`: the first of a mixture, without experts."""
        return self.experts.first_dense if self.experts else 0

    @property
    def main_layers(self) -> int:
        """Layers of the stack `layers`: all others."""
        return self.num_layers - self.dense_layers

    @property
    def dense(self) -> Model:
        """The model with an MLP in every layer."""
        return self.model_copy(update={"experts": None})

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads(self) -> Model:
        if self.factory:
            return self
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.d_model={self.d_model}; "
                f"use {near_divisors(self.d_model, self.num_heads)}, or set model.head_dim"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use {near_divisors(self.num_heads, self.num_kv_heads)}"
            )
        if not self.features.learned_positions and self.head_width % 2:
            given = "model.head_dim" if self.head_dim else "model.d_model / model.num_heads"
            raise ValueError(
                f"head dim {self.head_width} ({given}) is odd, but rotary embeddings rotate pairs; choose an even "
                "head dim"
            )
        return self

    @model_validator(mode="after")
    def _mixture(self) -> Model:
        if self.experts and not self.features.gated_mlp:
            raise ValueError(f"model.experts with model.family={self.family}: experts are gated MLPs; use llama")
        if self.experts and not self.dense_layers and self.d_ff not in (None, self.experts.d_ff):
            raise ValueError(
                f"model.d_ff={self.d_ff} with model.experts.d_ff={self.experts.d_ff}: every MLP is a mixture of "
                "experts; leave model.d_ff out, or set model.experts.first_dense"
            )
        if self.main_layers < 1:
            raise ValueError(
                f"model.experts.first_dense={self.dense_layers} with model.num_layers={self.num_layers}: no layer has "
                f"experts; use at most {self.num_layers - 1}"
            )
        return self

    @model_validator(mode="after")
    def _positions(self) -> Model:
        if self.features.learned_positions and self.rope_scaling:
            raise ValueError(
                f"model.rope_scaling with model.family={self.family}: its positions are learned; leave rope_scaling out"
            )
        if self.rope_scaling and self.rope_scaling.type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"model.rope_theta={self.rope_theta} with yarn: must be above 1; use a larger rope_theta")
        if self.rope_local_theta and not self.features.has_local_layers:
            raise ValueError(
                f"model.rope_local_theta={self.rope_local_theta} with model.global_layers=none: all layers are alike; "
                "use model.rope_theta, or set model.global_layers"
            )
        if (
            self.global_layers
            and self.features.has_local_layers
            and not (self.sliding_window or self.features.rope_local_theta)
        ):
            raise ValueError(
                f"model.global_layers={self.global_layers} without model.sliding_window: the other layers are global "
                "too; set model.sliding_window, or leave global_layers out"
            )
        return self
