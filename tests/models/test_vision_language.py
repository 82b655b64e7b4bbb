"""The vision-language model in the step: every layout equals one device, padding changes nothing, bad requests."""

import jax
import numpy as np
import pytest
import yaml
from command import main
from conftest import cover, records, resolved

from nanotrain_jax.data import arrays
from nanotrain_jax.step import build as steps

SIZE, TEXT, WORDS = 16, 8, 40
VISION = {"image_size": SIZE, "patch_size": 4, "scales": [2, 1], "num_layers": 2, "width": 16, "num_heads": 2}
TREE = {
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64, "vocab_size": WORDS},
    "vision": VISION | {"min_tokens": 3, "max_tokens": 12, "coverage": 0.4},
    "precision": {"compute": "float32"},
    "data": {"source": "arrays:shapes", "batch_size": 8, "seq_len": 12 + TEXT},
    "optimizer": {"lr": 1e-2, "eps": 1e-4, "schedule": "constant"},
    "logging": {"tensorboard": False, "progress": "lines"},
    "runtime": {"simulate": 8, "compile_cache": False},
}
TENSOR = {"data": 2, "tensor": 2, "zero": 3, "persist_below": 100}
LAYOUTS = {
    "data 2 tensor 2 zero 3": TENSOR,
    "whole rows, microbatches": TENSOR | {"sequence_parallel": False, "microbatches": 2},
    "per layer": {"data": 4, "zero": 1, "grad_reduce": "per_layer", "microbatches": 2},
    "pipe": {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2, "schedule": "zero_bubble"},
    "pipe and tensor": TENSOR | {"pipe": 2, "zero": 1, "microbatches": 2},
}


def tree_with(**changes):
    return TREE | {section: TREE.get(section, {}) | keys for section, keys in changes.items()}


def rows_of(count, places=12, seed=0):
    """Rows of random pictures and words; two targets each, in different places."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, WORDS, (count, places + TEXT), dtype=np.int32)
    inputs[:, :places] = 1
    targets = np.full_like(inputs, -1)
    for place in (rng.integers(places + half, places + half + 4, count) for half in (0, 4)):
        targets[np.arange(count), place] = rng.integers(2, WORDS, count)
    return {
        "inputs": inputs,
        "targets": targets,
        "images": rng.integers(256, size=(count, SIZE, SIZE, 3), dtype=np.uint8),
    }


def on_devices(rows, step):
    return jax.device_put(rows, jax.tree.map(lambda x: x.sharding, step.batch))


def trained(tree, updates=3):
    """Return losses, gradient norms and evaluations of some updates."""
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    state, log = step.init(), []
    for seed in range(updates):
        batch = on_devices(rows_of(8, seed=seed), step)
        scores = step.evaluate(state.params, batch)
        state, metrics, _ = step.train(state, batch)
        log.append([metrics["loss"], metrics["grad_norm"], *scores])
    return np.array(log)


@pytest.fixture(scope="module")
def on_one_device():
    return trained(tree_with(parallel={"data": 1}))


@pytest.mark.parametrize("layout", cover([], [*LAYOUTS]))
def test_a_layout_equals_one_device(on_one_device, layout):
    found = trained(tree_with(parallel=LAYOUTS[layout], memory={"remat": "full"}))
    np.testing.assert_allclose(found, on_one_device, rtol=1e-5)
    loss, _, total, targets, _ = on_one_device.T
    np.testing.assert_array_equal(targets, 16)  # of 160 tokens
    np.testing.assert_allclose(loss, total / targets, rtol=1e-5)


@pytest.mark.parametrize("remat", cover([], ["full", "selective", "block:2"]))
def test_rematerialization_changes_nothing(on_one_device, remat):
    found = trained(tree_with(parallel={"data": 1}, memory={"remat": remat}), updates=1)
    np.testing.assert_allclose(found, on_one_device[:1], rtol=1e-5)


def scored(rows, **vision):
    """Return sum of losses, targets and right targets with weights of seed 0."""
    places = rows["inputs"].shape[1] - TEXT
    tree = tree_with(parallel={"data": 1}, vision=vision | {"max_tokens": places}, data={"seq_len": places + TEXT})
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    return [float(x) for x in step.evaluate(step.init().params, on_devices(rows, step))]


@pytest.mark.long
def test_places_of_padding_change_nothing():
    keep = {"min_tokens": 3, "coverage": 1e-6}  # exactly 3 patches
    narrow, wide = rows_of(8, places=3), rows_of(8, places=3)
    padding = np.full((8, 9), 1, np.int32)
    wide["inputs"] = np.concatenate([padding, narrow["inputs"]], 1)
    wide["targets"] = np.concatenate([-padding, narrow["targets"]], 1)
    without, padded = scored(narrow, **keep), scored(wide, **keep)
    np.testing.assert_allclose(padded, without, rtol=1e-5)
    more = scored(wide, min_tokens=4, coverage=1e-6)  # the picture counts, so the test is not empty
    assert abs(more[0] - padded[0]) > 1e-3


@pytest.mark.long
def test_right_targets_are_those_with_the_largest_logit():
    """Among rows whose target is each word in turn, each row is right once."""
    rows = rows_of(8)
    place = rows["targets"] >= 0
    tree = tree_with(parallel={"data": 2, "tensor": 4, "zero": 3}, vision={"num_heads": 4})
    config, mesh = resolved(tree)
    step = steps.build(config, mesh)
    params = step.init().params
    right = 0
    for word in range(WORDS):
        targets = np.where(place, word, -1).astype(np.int32)
        right += int(step.evaluate(params, on_devices(rows | {"targets": targets}, step))[2])
    assert right == place.sum()


@pytest.fixture
def config_file(tmp_path):
    sides = {"train": rows_of(64), "val": rows_of(20, seed=1)}
    arrays.write(tmp_path / "shapes", sides, WORDS, {"picture_places": 12})
    train = {"train": {"steps": 4, "eval_every": 2}, "checkpoint": {"every": 2}}
    tree = TREE | train | {"data": TREE["data"] | {"source": f"arrays:{tmp_path / 'shapes'}"}}
    path = tmp_path / "vision.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.long
def test_the_command_logs_accuracy_and_resumes(config_file, capsys):
    keys = "parallel.data=2", "checkpoint.async=false"
    folder = config_file.parent
    assert main(config_file, f"logging.dir={folder}/whole", *keys) == 0
    assert "accuracy" in capsys.readouterr().out
    stopped = "train.steps=2", "optimizer.decay_steps=4"
    assert main(config_file, f"logging.dir={folder}/cut", *keys, *stopped) == 0
    assert main(config_file, f"logging.dir={folder}/cut", *keys) == 0
    whole, cut = records(folder / "whole"), records(folder / "cut")
    for one, other in zip(whole, cut, strict=True):
        assert one["loss"] == other["loss"]
    assert [record.get("accuracy") is not None for record in whole] == [False, True, False, True]
    assert 0 <= whole[-1]["accuracy"] <= 1 and whole[-1]["mfu"] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context=2"], "vision with parallel.context=2: rows stay whole"),
        (
            ["parallel.data=2", "parallel.zero=3", "memory.remat=full", "memory.offload_optimizer=host"],
            "vision has an encoder: gradients and activations in host memory do without one",
        ),
        (
            ["parallel.pipe=2", "parallel.vocab_over_pipe=true", "parallel.microbatches=2"],
            "vision with parallel.vocab_over_pipe=true",
        ),
        (["data.attend_across_documents=false"], "vision with data.attend_across_documents=false"),
        (["data.source=stdlib", "model.vocab_size=257"], "the model reads images, but data.source='stdlib' is text"),
        (["vision.max_tokens=20"], "data.seq_len=20 has no place for text after vision.max_tokens=20"),
        (["data.seq_len=22"], "inputs.npy has 20 tokens in a row, but data.seq_len=22; use data.seq_len=20"),
        (["vision.max_tokens=10"], "vision.max_tokens=10, but rows of data.source='arrays:"),
        (["vision.max_tokens=13"], "have 12 places for a picture; use vision.max_tokens=12"),
        (["vision.image_size=32"], "images.npy is uint8 [64 16 16 3], but the model reads uint8 [rows 32 32 3]"),
        (["parallel.tensor=4", "vision.num_heads=2", "model.num_kv_heads=4"], "use vision.num_heads=4"),
        (["vision.min_tokens=30"], "must be in order"),
        (["vision.max_token=30"], "did you mean vision.max_tokens?"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(config_file, capsys, overrides, message):
    assert main(config_file, f"logging.dir={config_file.parent}/no", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
