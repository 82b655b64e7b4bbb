"""Small models for tests of generation and evaluation, and what an oracle in float64 says of them."""

import families_oracle
import jax
import numpy as np
from conftest import resolved, small

from nanotrain_jax.generation import load
from nanotrain_jax.generation.engine import Engine, split_up
from nanotrain_jax.models import decoder
from nanotrain_jax.step.plan import specs_over_pipe_and_tensor

LARGE = 8  # times the usual weights, so that each token depends on those before it


def weights(family="llama", context=64, **keys):
    """The resolved model of a small config, and its weights as NumPy arrays."""
    changes = {"tie_embeddings": False} | keys
    config, _ = resolved(small(family, model=changes, data={"seq_len": context}))
    params = decoder.init(config.model, 0)
    rng = np.random.default_rng(1)

    def large(path, w):
        if "is_local" in path[-1].key:
            return np.asarray(w)
        return np.asarray(w * LARGE if w.ndim > 2 else w + rng.normal(0, 0.2, w.shape).astype(np.float32))

    return config.model, jax.tree_util.tree_map_with_path(large, params)


def engine(model, params, data=1, tensor=1):
    """An engine on so many devices with these weights."""
    devices = jax.devices()[: data * tensor]
    _, mesh, contract = load.build(model.model_dump(), load.Placement(tensor), devices)
    like = contract.shapes

    def put(x, kind, spec):
        padded = np.pad(x, [(0, new - old) for new, old in zip(kind.shape, x.shape, strict=True)])
        return jax.device_put(padded, jax.sharding.NamedSharding(mesh, spec))

    placed = jax.tree.map(put, params, like, specs_over_pipe_and_tensor(contract, mesh))
    return Engine(contract, mesh, split_up(contract, placed), np.float32)


class Oracle:
    """Logits of a text in float64, uncached."""

    def __init__(self, model, params):
        self.model, self.params = model, families_oracle.in_float64(params)

    def logits(self, text):
        return np.asarray(families_oracle.logits(self.model, self.params, np.asarray([text])))[0]

    def assert_greedy(self, prompt, found):
        """Each token is the most likely one after those before it."""
        logits = self.logits([*prompt, *found])[len(prompt) - 1 : -1]
        assert found == logits.argmax(-1).tolist()

    def greedy(self, prompt, count, context=None):
        """The most likely tokens; a text that fills the context continues with its last half."""
        text, start = list(prompt), 0
        for _ in range(count):
            if context and len(text) - start > context:
                start = len(text) - context // 2
            text.append(int(self.logits(text[start:])[-1].argmax()))
        return text[len(prompt) :]
