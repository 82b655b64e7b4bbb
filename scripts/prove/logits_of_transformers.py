"""Compute logits of tiny random models with transformers, in float64: tests hold ours to them. Needs torch.

    pip install torch transformers && python scripts/prove/logits_of_transformers.py

Writes tests/golden/hugging_face.json: config.json as transformers writes it, shapes of the tensors, tokens and logits
of each model, and the versions. Weights are not in it: `weights` makes them of the names.
"""

import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[2] / "tests" / "golden" / "hugging_face.json"
TOKENS = 12
# No value is a default, so that a key that is not read changes logits.
ROTARY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
}  # fmt: skip
LLAMA3 = {
    "rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.5, "high_freq_factor": 3.0,
}  # fmt: skip
YARN = {
    "rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6,
    "beta_fast": 2.0, "beta_slow": 0.25,
}  # fmt: skip
GEMMA3 = {
    "full_attention": {"rope_theta": 500.0, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
}
MODELS = {
    "llama": ("llama", ROTARY | {"tie_word_embeddings": False}),
    "llama_tied": ("llama", ROTARY | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", ROTARY | {"tie_word_embeddings": False, "sliding_window": None}),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 24, "n_inner": 48}
             | {"layer_norm_epsilon": 1e-2}),
    "llama_scaled": ("llama", ROTARY | {"head_dim": 12, "rope_parameters": LLAMA3}),
    "mistral_window": ("mistral", ROTARY | {"head_dim": 10, "sliding_window": 5}),
    "qwen2": ("qwen2", ROTARY | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
              | {"rope_parameters": YARN}),
    "qwen3": ("qwen3", ROTARY | {"head_dim": 10, "tie_word_embeddings": True}
              | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mixtral": ("mixtral", ROTARY | {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", ROTARY | {"head_dim": 10, "moe_intermediate_size": 24, "num_experts": 6}
                  | {"num_experts_per_tok": 2, "norm_topk_prob": False}),
    "qwen3_moe_normalized": ("qwen3_moe", ROTARY | {"moe_intermediate_size": 24, "num_experts": 4}
                             | {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    "gemma3_text": ("gemma3_text", ROTARY | {"head_dim": 10, "query_pre_attn_scalar": 10, "num_hidden_layers": 4}
                    | {"sliding_window": 5, "sliding_window_pattern": 3, "rope_parameters": GEMMA3}),
}  # fmt: skip


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return random float32 weights, the same for a name everywhere. Those of norms are about 1."""

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * 0.3
        return (x + (len(shape) == 1 and name.endswith("weight"))).astype(np.float32)

    return {name: one(name, shape) for name, shape in shapes.items()}


def main() -> None:
    """Write the golden file."""
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    def of(kind: str, keys: dict) -> dict:
        config = transformers.AutoConfig.for_model(kind, **keys)
        with tempfile.TemporaryDirectory() as folder:  # whose tensors are those of a folder, experts one by one
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            file = Path(folder, "model.safetensors")
            shapes = {name: [*x.shape] for name, x in load_file(file).items()}
            save_file(weights(shapes), file, metadata={"format": "pt"})
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
            )
        assert not any(found.values()), found
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=TOKENS).tolist()
        logits = model(torch.tensor([tokens])).logits[0].detach().numpy()
        written = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
        written["dtype"] = "float32"
        return {"config": written, "shapes": shapes, "tokens": tokens, "logits": np.round(logits, 9).tolist()}

    golden = {name: of(*model) for name, model in MODELS.items()}
    golden["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    FILE.write_text(json.dumps(golden) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
