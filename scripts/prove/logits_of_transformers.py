"""Compute logits of tiny random models with transformers, in float64: tests hold ours to them. Needs torch.

    pip install torch transformers && python scripts/prove/logits_of_transformers.py

Writes tests/golden/hugging_face.json: config.json as transformers writes it, shapes of the tensors, tokens and logits
of each model, and the versions. Weights are not in it: `weights` makes them of the names.
"""

import json
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
MODELS = {
    "llama": ("llama", ROTARY | {"tie_word_embeddings": False}),
    "llama_tied": ("llama", ROTARY | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", ROTARY | {"tie_word_embeddings": False, "sliding_window": None}),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 24, "n_inner": 48}
             | {"layer_norm_epsilon": 1e-2}),
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

    def of(kind: str, keys: dict) -> dict:
        config = transformers.AutoConfig.for_model(kind, **keys)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        tied = "lm_head.weight" if config.tie_word_embeddings else None
        shapes = {name: [*x.shape] for name, x in model.state_dict().items() if name != tied}
        loaded = model.load_state_dict({n: torch.from_numpy(w) for n, w in weights(shapes).items()}, strict=False)
        assert loaded.missing_keys == [tied] * (tied is not None), loaded
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
