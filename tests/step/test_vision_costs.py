"""The closed forms of vision against compiled programs: FLOPs, bytes of each collective, state, in every layout."""

import math
from collections import Counter

import jax
import pytest
from conftest import cover, resolved

from nanotrain_jax.audit import matmuls, wire
from nanotrain_jax.costs import communication, counts, flops, memory, vision
from nanotrain_jax.models.vision_table import INVENTORY, table
from nanotrain_jax.parallel.sharding import path_name
from nanotrain_jax.step import build as steps

TREE = {
    "model": {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128, "vocab_size": 40}
    | {"unroll": False},
    "vision": {"image_size": 16, "patch_size": 4, "scales": [2, 1], "num_layers": 4, "width": 32, "num_heads": 2}
    | {"scorer_width": 24, "min_tokens": 3, "max_tokens": 12},
    "precision": {"compute": "float32"},
    "data": {"source": "arrays:pictures", "batch_size": 12, "seq_len": 22},
}
DECODER = "^ends/", "^layers/"
FROZEN = {
    "all": (),
    "encoder frozen": ("^vision/", "^encoder/"),
    "decoder frozen": DECODER,
    "adapter": (*DECODER, "^encoder/", "^vision/patches/"),
    "only adapter": (*DECODER, "^encoder/", "^vision/(patches|relevance)/"),
    "no picture": ("^vision/", "^encoder/", "embedding"),
}
LAYOUTS = {
    "one device": {},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 2, "zero": 3},
    "per layer": {"data": 2, "zero": 1, "grad_reduce": "per_layer", "microbatches": 2},
    "pipe per layer": {"pipe": 2, "data": 2, "zero": 1, "grad_reduce": "per_layer", "microbatches": 2},
    "prefetch": {"data": 2, "zero": 3, "prefetch": True, "microbatches": 2},
    "tensor": {"tensor": 2},
    "whole rows": {"tensor": 2, "sequence_parallel": False},
    "pipe": {"pipe": 2, "microbatches": 2},
    "pipe zero 2": {"pipe": 2, "data": 2, "zero": 2, "microbatches": 3},
    "pipe zero 3": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2, "schedule": "zero_bubble"},
    "pipe tensor": {"pipe": 2, "tensor": 2, "data": 2, "zero": 1, "microbatches": 2},
}
COVER = [("tensor", "decoder frozen", "full")]
MORE = [
    *(("one device", frozen, "selective") for frozen in FROZEN),
    *(("one device", "all", remat) for remat in ("none", "full", "block:2")),
    *((layout, frozen, "none") for layout in [*LAYOUTS][1:] for frozen in [*FROZEN][:3]),
    ("pipe tensor", "decoder frozen", "full"),
    *((layout, "only adapter", "full") for layout in ("zero 3", "tensor", "pipe zero 3")),
    *((layout, "all", "block:2") for layout in ("zero 3", "tensor", "prefetch")),
]
SCALARS = 20  # bytes: the loss, the number of targets and the norm of the gradients


def small(layout, frozen, remat):
    parallel = {"data": 1, "persist_below": 100} | LAYOUTS[layout]
    return TREE | {"parallel": parallel, "train": {"freeze": list(FROZEN[frozen])}, "memory": {"remat": remat}}


@pytest.mark.parametrize("case", cover(COVER, MORE))
def test_flops_bytes_and_state_equal_the_closed_forms(case):
    config, mesh = resolved(small(*case))
    step = steps.build(config, mesh)
    text, rates = step.train.lower(step.state, step.batch).compile().as_text(), communication.conditional_rates(config)
    assert matmuls.flops(text, rates) == pytest.approx(flops.step_flops(config), rel=2e-3)  # products with a vector
    local = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.state)]
    assert sum(local) == pytest.approx(sum(memory.state(config).values()), abs=SCALARS)
    batch = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(step.batch)]
    assert sum(batch) == counts.batch_bytes(config)
    theory, found = Counter(), Counter()
    for row in communication.communication(config):
        theory[row["axis"], row["op"]] += row["bytes_per_device"]
    for row in wire.summary(wire.collectives(text, mesh.shape, rates)):
        found[row["axis"], row["op"]] += row["bytes_per_device"]
    spared = Counter()
    if config.parallel.zero == 3 and config.parallel.microbatches > 1:  # XLA:CPU shares gathers between microbatches
        spared["data", "all_gather"] = theory["data", "all_gather"]
    for key in theory.keys() | found.keys():
        assert theory[key] - spared[key] - 1e-6 <= found[key] <= theory[key] + SCALARS, key


def test_the_table_has_every_weight_and_its_size():
    config, mesh = resolved(small("one device", "all", "none"))
    shapes = steps.build(config, mesh).plan.model.shapes
    found = {path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
    rows = table(config.vision, config.model.d_model)
    for path, row in rows.items():
        assert found[path] == ((config.vision.num_layers,) if row.is_stacked else ()) + row.shape, path
    assert rows.keys() == INVENTORY.keys() == {path for path in found if path.startswith(("vision/", "encoder/"))}
    assert counts.all_parameters(config) == sum(map(math.prod, found.values()))


def test_a_frozen_encoder_costs_its_forward_alone():
    """Unless the embedding of the question trains: its gradient comes through the encoder."""
    of = {name: resolved(small("one device", name, "full"))[0] for name in FROZEN}
    forward, backward, again = vision.picture_flops(of["no picture"])
    assert (backward, again) == (0, 0) and not vision.has_backward(of["no picture"])
    assert vision.model_flops(of["no picture"]) == forward
    assert vision.picture_flops(of["encoder frozen"]).backward > forward / 2
    v, D = of["all"].vision, 64
    K, E, L = v.max_tokens, v.width, v.num_layers
    adapter = 2 * K * (E * D + D * D)
    assert vision.picture_flops(of["only adapter"]).backward == 2 * adapter
    frozen_layers, trained_layers = (vision.picture_flops(of[name]).backward for name in ("adapter", "decoder frozen"))
    patches = 2 * v.num_candidates * (13 * v.patch_size**2 + v.num_candidates + 3 * 24) * E + 18 * v.image_size**2
    assert trained_layers - frozen_layers == L * 24 * K * E**2 + patches
    without = flops.flops_per_token(of["all"].model_copy(update={"vision": None}))["full"]
    more = (flops.flops_per_token(of["all"])["full"] - without) * of["all"].data.seq_len
    assert more == pytest.approx(vision.model_flops(of["all"]))
