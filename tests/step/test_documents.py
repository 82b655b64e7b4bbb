"""Rows of several documents, each by itself: the numbers of one device on the documents alone."""

import jax
import numpy as np
import pytest
from cases import PARAMS, case
from conftest import cover, equals_the_oracle, on_devices, random_tokens, resolved, small
from test_tensor_step import moves_the_bytes_of_the_papers

from nanotrain_jax.models import contract
from nanotrain_jax.step import build as steps

APART = {"attend_across_documents": False}
GATHER, ULYSSES = {"context_attention": "gather"}, {"context_attention": "ulysses"}
HEADS = {"num_heads": 8, "num_kv_heads": 2}


def apart(layout, family, remat="none", **parallel):
    memory = parallel.pop("memory", {})
    plain = case(layout, family, remat, parallel.pop("model", HEADS), **parallel).tree(parallel={"persist_below": 64})
    return plain | {"memory": plain["memory"] | memory, "data": plain["data"] | APART}


DEPTH = HEADS | {"num_layers": 8}
LAYOUTS = {
    "one device, rotary": apart("data 1", "llama"),
    "per layer, learned positions": apart("data 8", "gpt2", "full", zero=2, grad_reduce="per_layer", microbatches=2),
    "sequence parallel": apart("data 2 tensor 4", "gpt2", "selective", zero=1),
    "ring": apart("data 2 context 4", "llama", "full", zero=3, microbatches=2),
    "gather, sequence parallel": apart("context 4 tensor 2", "gpt2", zero=2, **GATHER),
    "ulysses": apart("context 8", "llama", "selective", zero=3, **ULYSSES),
    "stages with ring": apart(
        "pipe 2 context 2 tensor 2", "llama", model=DEPTH, schedule="zb_h1", microbatches=4, idle="mask"
    ),
    "stages": apart(
        "pipe 4 data 2", "gpt2", "selective", model=DEPTH, schedule="interleaved", chunks=2, microbatches=8
    ),
    "offload": apart("data 2 context 2 tensor 2", "llama", "selective", zero=3, microbatches=2, memory=PARAMS),
}


@pytest.mark.parametrize("name", cover([], sorted(LAYOUTS)))
def test_documents_equal_those_of_the_oracle_alone_and_move_the_bytes_of_the_papers(name, expected):
    equals_the_oracle(LAYOUTS[name], expected)
    if LAYOUTS[name]["parallel"].get("idle") != "mask":  # masked stages also move discarded values
        moves_the_bytes_of_the_papers(LAYOUTS[name])


@pytest.mark.parametrize(
    ("family", "parallel"), [("gpt2", {"data": 1}), ("llama", {"data": 2, "context": 4})], ids=["one", "ring"]
)
def test_the_loss_of_a_row_is_that_of_its_documents_alone(family, parallel):
    """Evaluation of rows, against that of each document as a row of its own, padded."""
    config, mesh = resolved(small(family, data=APART, parallel=parallel))
    step = steps.build(config, mesh)
    params = step.init().params
    batch = on_devices(random_tokens(config)[0], step)
    host = jax.device_get(batch)
    order = np.arange(config.data.seq_len) if step.token_order is None else np.argsort(step.token_order)
    total, count = step.evaluate(params, batch)
    of_documents = []
    for start in np.unique(host["starts"]):
        alone = {"starts": np.zeros_like(host["starts"])}
        mine = host["starts"] == start
        for name, empty in ("inputs", 0), ("targets", -1):
            shifted = np.roll(np.where(mine, host[name][:, order], empty), -start, axis=1)
            alone[name] = shifted if step.token_order is None else shifted[:, step.token_order]
        of_documents.append(step.evaluate(params, jax.device_put(alone, jax.tree.map(lambda x: x.sharding, batch))))
    assert sum(int(n) for _, n in of_documents) == int(count) < host["targets"].size
    np.testing.assert_allclose(sum(float(loss) for loss, _ in of_documents), total, rtol=2e-6)


def test_a_model_that_does_not_heed_documents_is_refused():
    config, mesh = resolved(small(data=APART, model={"factory": "plain_model:build"}))
    with pytest.raises(ValueError, match="plain_model:build does not say that it heeds") as error:
        steps.build(config, mesh)
    assert "\n" not in str(error.value)
    assert not contract.Model.splits_documents
