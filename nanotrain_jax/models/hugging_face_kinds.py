"""Which models of Hugging Face have folders that we read and write: a row of `KINDS` for each model_type. Needs no JAX.

It is read in both directions. A row of tensors says how a stored tensor consists of arrays of ours:

    Tensor("...q_proj.weight", "(N H) D", (q_DNH,))      the array [D N H], stored as a matrix of N H rows
    Tensor("...c_attn.weight", "D (* N H)", (q, k, v))   three arrays [D N H], side by side

{} is the number of a layer, {expert} that of an expert, whose tensors one after another are one of ours; * counts the
arrays. Rotary embeddings pair the first half of a head with the second, here
and there, so no row is permuted. A row whose arrays the model does not have is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from nanotrain_jax.config import families
from nanotrain_jax.models import decoder_table as ours


class Tensor(NamedTuple):
    """A row: a tensor of a model folder."""

    name: str
    dims: str
    paths: tuple[str, ...]  # of our arrays (models/decoder_table.py)


class Kind(NamedTuple):
    """A model_type of config.json."""

    family: families.Name
    architecture: str
    prefix: str  # of tensors; left out in folders of the model without its head
    tensors: tuple[Tensor, ...]
    keys: Mapping[str, str]  # key of config.json -> key of the section model
    defaults: Mapping[str, Any]  # of keys that config.json may leave out, as transformers has; None: that of ours
    fixed: Mapping[str, tuple[Any, ...]]  # keys with the values that we compute; the first is written
    buffers: str  # regular expression: tensors that are no weights
    experts: Mapping[str, str] | None = None  # key of config.json -> key of the section model.experts; None: no mixture
    global_layers: Literal["first", "every"] | None = None  # which layers may have no window; None: all are alike


def _layer(name: str, dims: str, *paths: str) -> Tensor:
    return Tensor(f"model.layers.{{}}.{name}", dims, paths)


def _experts(router: str, experts: str, names: tuple[str, str, str]) -> tuple[Tensor, ...]:
    """Return the rows of a mixture. names: of the matrices gate, up and down of an expert."""
    arrays = f"{ours.MLP}/gate_EDF", f"{ours.MLP}/up_EDF", f"{ours.MLP}/down_EFD"
    rows = zip(names, ("E F D", "E F D", "E D F"), arrays, strict=True)
    of_experts = (_layer(f"{experts}.{{{{expert}}}}.{name}.weight", dims, path) for name, dims, path in rows)
    return _layer(f"{router}.weight", "E D", f"{ours.MLP}/router_DE"), *of_experts


def _block(name: str, dims: str, *paths: str) -> Tensor:
    return Tensor(f"transformer.h.{{}}.{name}", dims, paths)


NORMS = (_layer("post_attention_layernorm.weight", "D", f"{ours.NORM_MLP}/gain_D"),)
GEMMA3_NORMS = (
    _layer("post_attention_layernorm.weight", "D", f"{ours.NORM_ATTENTION_OUT}/gain_D"),
    _layer("pre_feedforward_layernorm.weight", "D", f"{ours.NORM_MLP}/gain_D"),
    _layer("post_feedforward_layernorm.weight", "D", f"{ours.NORM_MLP_OUT}/gain_D"),
)
LLAMA_TENSORS = (
    Tensor("model.embed_tokens.weight", "V D", (ours.EMBEDDING,)),
    _layer("input_layernorm.weight", "D", f"{ours.NORM_ATTENTION}/gain_D"),
    _layer("self_attn.q_proj.weight", "(N H) D", f"{ours.ATTENTION}/q_DNH"),
    _layer("self_attn.q_proj.bias", "(N H)", f"{ours.ATTENTION}/bias_q_NH"),
    _layer("self_attn.k_proj.weight", "(K H) D", f"{ours.ATTENTION}/k_DKH"),
    _layer("self_attn.k_proj.bias", "(K H)", f"{ours.ATTENTION}/bias_k_KH"),
    _layer("self_attn.v_proj.weight", "(K H) D", f"{ours.ATTENTION}/v_DKH"),
    _layer("self_attn.v_proj.bias", "(K H)", f"{ours.ATTENTION}/bias_v_KH"),
    _layer("self_attn.o_proj.weight", "D (N H)", f"{ours.ATTENTION}/out_NHD"),
    _layer("self_attn.q_norm.weight", "H", f"{ours.ATTENTION}/gain_q_H"),
    _layer("self_attn.k_norm.weight", "H", f"{ours.ATTENTION}/gain_k_H"),
    *NORMS,
    _layer("mlp.gate_proj.weight", "F D", f"{ours.MLP}/gate_DF"),
    _layer("mlp.up_proj.weight", "F D", f"{ours.MLP}/up_DF"),
    _layer("mlp.down_proj.weight", "D F", f"{ours.MLP}/down_FD"),
    Tensor("model.norm.weight", "D", (f"{ours.NORM_LAST}/gain_D",)),
    Tensor("lm_head.weight", "V D", (ours.HEAD,)),
)
GEMMA3_TENSORS = (*(row for row in LLAMA_TENSORS if row not in NORMS), *GEMMA3_NORMS)
WITHOUT_MLP = tuple(row for row in LLAMA_TENSORS if not row.paths[0].startswith(f"{ours.MLP}/"))
GPT2_TENSORS = (
    Tensor("transformer.wte.weight", "V D", (ours.EMBEDDING,)),
    Tensor("transformer.wpe.weight", "T D", (ours.POSITIONS,)),
    _block("ln_1.weight", "D", f"{ours.NORM_ATTENTION}/gain_D"),
    _block("ln_1.bias", "D", f"{ours.NORM_ATTENTION}/bias_D"),
    _block("attn.c_attn.weight", "D (* N H)", *(f"{ours.ATTENTION}/{name}" for name in ("q_DNH", "k_DKH", "v_DKH"))),
    _block("attn.c_attn.bias", "(* N H)", *(f"{ours.ATTENTION}/bias_{name}" for name in ("q_NH", "k_KH", "v_KH"))),
    _block("attn.c_proj.weight", "(N H) D", f"{ours.ATTENTION}/out_NHD"),
    _block("attn.c_proj.bias", "D", f"{ours.ATTENTION}/bias_out_D"),
    _block("ln_2.weight", "D", f"{ours.NORM_MLP}/gain_D"),
    _block("ln_2.bias", "D", f"{ours.NORM_MLP}/bias_D"),
    _block("mlp.c_fc.weight", "D F", f"{ours.MLP}/up_DF"),
    _block("mlp.c_fc.bias", "F", f"{ours.MLP}/bias_up_F"),
    _block("mlp.c_proj.weight", "F D", f"{ours.MLP}/down_FD"),
    _block("mlp.c_proj.bias", "D", f"{ours.MLP}/bias_down_D"),
    Tensor("transformer.ln_f.weight", "D", (f"{ours.NORM_LAST}/gain_D",)),
    Tensor("transformer.ln_f.bias", "D", (f"{ours.NORM_LAST}/bias_D",)),
    Tensor("lm_head.weight", "V D", (ours.HEAD,)),
)

ROTARY_FIXED = {"hidden_act": ("silu",), "partial_rotary_factor": (None, 1)}
LLAMA = Kind(
    family="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    tensors=LLAMA_TENSORS,
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "d_ff",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_seq_len",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    fixed=ROTARY_FIXED | {"attention_bias": (False,), "mlp_bias": (False,)},
    buffers=r".*rotary_emb\.inv_freq",
)
QWEN2 = LLAMA._replace(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=LLAMA.defaults
    | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
    | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    fixed=ROTARY_FIXED,
    global_layers="first",
)
KINDS: dict[str, Kind] = {
    "llama": LLAMA,
    "mistral": LLAMA._replace(
        family="mistral",
        architecture="MistralForCausalLM",
        keys=LLAMA.keys | {"sliding_window": "sliding_window"},
        defaults=LLAMA.defaults | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        fixed=ROTARY_FIXED,
    ),
    "qwen2": QWEN2,
    "qwen3": QWEN2._replace(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=QWEN2.defaults | {"head_dim": 128},
        fixed=ROTARY_FIXED | {"attention_bias": (False,)},
    ),
    "mixtral": LLAMA._replace(
        family="mistral",
        architecture="MixtralForCausalLM",
        tensors=(
            *WITHOUT_MLP,
            *_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        ),
        keys=LLAMA.keys | {"sliding_window": "sliding_window"},
        experts={"num_local_experts": "num", "num_experts_per_tok": "top_k", "intermediate_size": "d_ff"},
        defaults=LLAMA.defaults
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None, "rms_norm_eps": 1e-5}
        | {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        fixed=ROTARY_FIXED,
    ),
    "qwen3_moe": QWEN2._replace(
        family="qwen3",
        architecture="Qwen3MoeForCausalLM",
        tensors=(*LLAMA_TENSORS, *_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))),
        keys={key: name for key, name in LLAMA.keys.items() if name != "d_ff"},
        experts={
            "num_experts": "num",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "d_ff",
            "norm_topk_prob": "normalize",
        },
        defaults=QWEN2.defaults
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False, "mlp_only_layers": None, "intermediate_size": 6144},
        fixed=ROTARY_FIXED | {"attention_bias": (False,), "decoder_sparse_step": (1,)},
    ),
    "gemma3_text": LLAMA._replace(
        family="gemma3",
        architecture="Gemma3ForCausalLM",
        tensors=GEMMA3_TENSORS,
        keys=LLAMA.keys | {"rope_local_base_freq": "rope_local_theta"},
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "partial_rotary_factor": (None, 1),
            "attention_bias": (False,),
            "final_logit_softcapping": (None,),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        global_layers="every",
    ),
    "gpt2": Kind(
        family="gpt2",
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        tensors=GPT2_TENSORS,
        keys={
            "n_layer": "num_layers",
            "n_embd": "d_model",
            "n_head": "num_heads",
            "n_inner": "d_ff",
            "vocab_size": "vocab_size",
            "n_positions": "max_seq_len",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
        },
        defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        buffers=r".*\.attn\.(bias|masked_bias)",
    ),
}
