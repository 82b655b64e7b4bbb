"""checkpoint.resume=weights:PATH: a run starts at step 0 with the exact weights of another, and nothing else of it."""

import jax
import numpy as np
import pytest
from command import config_file, main, same, saved_state
from conftest import cover, records

from nanotrain_jax.checkpoint import directory
from nanotrain_jax.models import decoder_table
from nanotrain_jax.run import sources

__all__ = ["config_file"]  # a fixture
BFLOAT16 = "precision.compute=bfloat16", "model.num_layers=3", "train.eval_every=0"
FROZEN = "optimizer.lr=1e-37", "optimizer.weight_decay=0", "train.steps=1"  # weights stay the same in float32
OF_FIRST = {
    "pipeline": ("parallel.pipe=2", "parallel.data=2", "parallel.zero=3", "parallel.persist_below=64"),
    "nvme": ("parallel.zero=1", "memory.offload_optimizer=nvme", "parallel.persist_below=64"),
    "replicas apart": ("parallel.replica=2", "parallel.data=2", "parallel.sync_every=2"),
    "loss scale and noise": ("precision.loss_scale=dynamic", "train.noise_scale=true"),
}
OF_SECOND = {
    "tensor": ("parallel.tensor=2", "parallel.data=2", "parallel.zero=1"),
    "muon": ("optimizer.name=muon",),
    "nvme": ("memory.offload_optimizer=nvme", "parallel.zero=2", "parallel.persist_below=64"),
    "replicas apart": ("parallel.replica=2", "parallel.data=2", "parallel.sync_every=2"),
}
CASES = [("pipeline", "tensor")]
MORE = [("nvme", "nvme"), ("replicas apart", "muon"), ("loss scale and noise", "replicas apart"), ("pipeline", "nvme")]


def weights(run):
    """Return the float32 weights of the newest checkpoint of a run, by name and layer, without padding."""
    folder = run / "checkpoints"
    source = sources.of_run(folder, directory.latest_step(folder), is_exact=True)
    rows = decoder_table.table(source.model).items()
    places = [(path, layer) for path, row in rows for layer in (range(3) if row.is_stacked else [None])]
    return {place: source.read(*place) for place in places}


@pytest.mark.parametrize("case", cover(CASES, MORE, " to ".join))
@jax.numpy_dtype_promotion("standard")  # jax.nn.dot_product_attention itself needs it in 16 bit
def test_a_run_starts_with_the_exact_weights_of_another(case, config_file, tmp_path, capsys):
    keys, others = ([f"memory.nvme_dir={tmp_path}/{i}"] * (case[i] == "nvme") for i in (0, 1))
    first = f"logging.dir={tmp_path}/a", "train.steps=4", *BFLOAT16, *OF_FIRST[case[0]], *keys
    assert main(config_file, *first) == 0
    resume = f"checkpoint.resume=weights:{tmp_path}/a"
    second = f"logging.dir={tmp_path}/b", *BFLOAT16, *OF_SECOND[case[1]], *others, resume, *FROZEN
    capsys.readouterr()
    assert main(config_file, *second) == 0
    assert f"starts from the weights of step 4 in {tmp_path}/a/checkpoints" in capsys.readouterr().out
    assert [(r["step"], r["tokens"]) for r in records(tmp_path / "b")] == [(1, 8 * 32)]
    number, (state, _) = saved_state(tmp_path / "b")
    assert number == int(state["step"]) == 1
    found = weights(tmp_path / "b")
    assert {x.dtype for x in found.values()} == {np.dtype("float32")}
    same(found, weights(tmp_path / "a"))


def test_continuing_a_run_beyond_the_own_end_is_refused_with_the_remedy(config_file, tmp_path, capsys):
    assert main(config_file, f"logging.dir={tmp_path}/a", "train.steps=2", "train.eval_every=0") == 0
    new = f"logging.dir={tmp_path}/b", "train.eval_every=0", f"checkpoint.resume={tmp_path}/a"
    capsys.readouterr()
    assert main(config_file, *new, "train.steps=2") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "continues after step 2, and this run ends at step 2; use checkpoint.resume=weights:" in line
    assert main(config_file, *new, "train.steps=3") == 0
    assert [r["step"] for r in records(tmp_path / "b")] == [3]
