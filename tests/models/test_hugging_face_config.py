"""config.json of Hugging Face: what is read, what is refused, and which model_type holds a model."""

import math

import pytest

from nanotrain_jax.config.schema import Model
from nanotrain_jax.models import hugging_face, hugging_face_config
from nanotrain_jax.run.model_config import resolved_model

SIZES = {
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OTHERS = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}


def section(model_type="llama", **keys):
    return hugging_face_config.section({"model_type": model_type} | SIZES | keys, "config.json")


def scaling(**keys):
    return section(rope_scaling=keys)["rope_scaling"]


def test_what_config_json_leaves_out_is_as_transformers_has_it():
    bases = {name: section(name).get("rope_theta") for name in hugging_face.KINDS if name != "gpt2"}
    usual = dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"], 1e4)
    assert bases == usual | {"gemma3_text": 1e6, "mixtral": 1e6}
    assert {section(name)["norm_eps"] for name in bases} == {1e-5, 1e-6}
    experts = {"num": 128, "top_k": 8, "d_ff": 768, "normalize": False, "first_dense": 0}
    assert section("qwen3_moe")["experts"] == experts and section("qwen3_moe")["d_ff"] == 768
    with pytest.raises(ValueError, match="mlp_only_layers=5: not supported; only the first layers may be, in order"):
        section("qwen3_moe", mlp_only_layers=5)
    assert section("mixtral")["experts"] == {"num": 8, "top_k": 2, "d_ff": 48}
    assert section("mistral")["sliding_window"] == 4096 and "sliding_window" not in section(
        "mistral", sliding_window=None
    )
    assert section("qwen3")["head_dim"] == 128 and "head_dim" not in section("llama", head_dim=8)
    gemma3 = section("gemma3_text")
    assert (gemma3["head_dim"], gemma3["rope_local_theta"], gemma3["tie_embeddings"]) == (256, 1e4, True)
    assert (gemma3["sliding_window"], gemma3["global_layers"]) == (4096, "every:6")


def test_scalings_are_read_as_transformers_computes_them():
    assert scaling(type="linear", factor=2) == {"type": "linear", "factor": 2}
    assert "rope_scaling" not in section(rope_scaling={"rope_type": "default"})
    yarn = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}
    assert scaling(**YARN, truncate=True, beta_fast=None) == yarn
    assert scaling(**YARN, mscale=1.0, mscale_all_dim=0.5, attention_factor=1.5) == yarn | {"attention_factor": 1.5}
    factor = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scaling(**YARN, mscale=1.0, mscale_all_dim=0.5) == yarn | {"attention_factor": pytest.approx(factor)}
    assert scaling(rope_type="yarn", factor=2.0)["original_max_seq_len"] == 2048  # max_position_embeddings


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({"max_window_layers": 0}, "none"),
        ({"max_window_layers": 3}, "first:3"),
        ({"max_window_layers": 4}, None),
        ({"max_window_layers": 1, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "first:2"),
    ],
)
def test_layers_of_qwen2_with_a_window(keys, window):
    model = Model(**section(**OTHERS | keys))
    assert (model.sliding_window, model.features.global_layers) == ((8, window) if window else (None, "none"))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type='longrope'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate=False"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "factor='4' must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "has no rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, "rope_local_base_freq=5.0"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 168}, "query_pre_attn_scalar=168"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window=None"),
        (OTHERS | {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types: not supported"),
        (OTHERS | {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "layer_types: not supported"),
        (OTHERS | {"max_window_layers": None}, "max_window_layers=None must be a number of layers"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern=0 must be a number"),
        ({"model_type": "gemma3_text", "layer_types": "full_attention"}, "layer_types: not supported"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": YARN}},
            "rope_parameters.sliding_attention",
        ),
    ],
)
def test_what_we_do_not_compute_gives_one_line(keys, named):
    with pytest.raises(ValueError, match=r"^config\.json") as error:
        section(**keys)
    assert named in str(error.value) and "\n" not in str(error.value)


SMALL = {"d_model": 32, "num_layers": 4, "num_heads": 4, "vocab_size": 61}
WINDOW = {"sliding_window": 8}


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"family": "llama"}, "llama"),
        ({"family": "mistral"}, "mistral"),
        ({"family": "llama", "head_dim": 10} | WINDOW, "mistral"),
        ({"family": "llama", "qkv_bias": True}, "qwen2"),
        ({"family": "mistral", "qk_norm": True}, "qwen3"),
        ({"family": "qwen2", "global_layers": "first:2"} | WINDOW, "qwen2"),
        ({"family": "gemma3"} | WINDOW, "gemma3_text"),
    ],
)
def test_a_model_is_written_as_a_model_type_that_holds_it(keys, kind):
    model = resolved_model(SMALL | keys)
    assert hugging_face.kind_of(model) == kind == hugging_face.kind_of(model, kind)
    read = resolved_model(section_of(kind, model))
    assert read.features._replace(description="", ffn_ratio=(), ffn_multiple=1) == model.features._replace(
        description="", ffn_ratio=(), ffn_multiple=1
    )


def section_of(kind, model):
    return hugging_face_config.section(hugging_face_config.as_json(kind, model, "float32", {}), "")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"family": "gpt2"} | WINDOW, "a gpt2 of Hugging Face: it has no model.sliding_window in these layers"),
        ({"family": "llama", "activation": "gelu"}, "a llama of Hugging Face: it has no features of that family"),
        ({"family": "qwen2", "global_layers": "every:2"} | WINDOW, "a qwen2 of Hugging Face: "),
        ({"family": "qwen2", "qk_norm": True}, "a qwen2 of Hugging Face: it has no features of that family"),
        ({"family": "gemma3"}, "a gemma3_text of Hugging Face: .*sliding_window=None"),
    ],
)
def test_a_model_that_no_model_type_holds_is_refused(keys, named):
    with pytest.raises(ValueError, match=named) as error:
        hugging_face.kind_of(resolved_model(SMALL | keys))
    assert "\n" not in str(error.value)
