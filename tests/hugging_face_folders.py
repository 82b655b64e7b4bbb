"""Model folders of tiny random models, as transformers writes them, with the logits that it computed in float64."""

import importlib.util
import json

import ml_dtypes
import numpy as np
from conftest import ROOT
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

GOLDEN = {k: v for k, v in json.loads((ROOT / "tests/golden/hugging_face.json").read_text()).items() if k != "versions"}
spec = importlib.util.spec_from_file_location("golden", ROOT / "scripts/prove/logits_of_transformers.py")
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tensors(name, dtype="float32"):
    """Return the tensors of a model, by name."""
    return {key: x.astype(DTYPES[dtype]) for key, x in golden.weights(GOLDEN[name]["shapes"]).items()}


def logits(name):
    """Return tokens [T] and their logits [T V], in float64."""
    return np.asarray(GOLDEN[name]["tokens"]), np.asarray(GOLDEN[name]["logits"])


def folder(path, name="llama", dtype="float32", **config):
    """Write a model folder. config: further keys of config.json."""
    path.mkdir(parents=True)
    save_file(tensors(name, dtype), path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", GOLDEN[name]["config"] | {"dtype": dtype} | config)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, "w0")).save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"eos_token": "w3"})
    return path


def in_shards(path):
    """Divide the file of a folder into two, with an index."""
    found, half = read(path), len(read(path)) // 2
    (path / "model.safetensors").unlink()
    names, weight_map = sorted(found), {}
    for i, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({key: found[key] for key in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return path


def write_json(path, content):
    path.write_text(json.dumps(content))


def read(path):
    """Return the tensors of all files of a folder."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert all(a[key].dtype == b[key].dtype and a[key].tobytes() == b[key].tobytes() for key in a)
