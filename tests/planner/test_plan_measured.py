"""Modelled times beside those that a GPU measured (scripts/gpu/results/), which holds the memory estimated then."""

import json
import sys

import guides
import pytest
from conftest import ROOT

sys.path.extend(str(ROOT / "scripts" / name) for name in ("gpu", "measure"))
import gpu_figures
from gpu_checks import Machine

from nanotrain_jax.planner.estimate import estimate, on_gpus

GPU, RESULTS = "h200", ROOT / "scripts" / "gpu" / "results" / "2026-11-29_1xnvidia-h200.json"
MEASURED = json.loads(RESULTS.read_text())["stages"]
STAGES = {  # stage -> row of the table, model, sequences, overrides
    "gpt2-124m": ("GPT-2 124M, 32 sequences of 1,024", "gpt2-124m", 32, []),
    "choices: none": ("GPT-2 350M, 8 sequences", "gpt2-350m", 8, []),
    "layers in a loop": ("the same, layers in a loop", "gpt2-350m", 8, ["model.unroll=false"]),
    "remat: full": ("the same, remat full", "gpt2-350m", 8, ["memory.remat=full"]),
    "gpt2-350m": ("GPT-2 350M, 32 sequences", "gpt2-350m", 32, []),
    "gpt2-1.5b": ("GPT-2 1.5B, 16 sequences", "gpt2-1.5b", 16, []),
    "llama-3b": ("Llama 3.2 3B, 4 sequences of 4,096", "llama-3b", 4, []),
    "llama-3b, layers written out": ("the same, layers written out", "llama-3b", 4, ["model.unroll=true"]),
}


@pytest.mark.parametrize("stage", STAGES)
def test_times_beside_one_h200_shown_in_the_guides(stage):
    name, model, batch, overrides = STAGES[stage]
    config = on_gpus(gpu_figures.planned(Machine(0, 1, "."), model, batch, "memory.remat=none", *overrides), 1, GPU)
    found, e = MEASURED[stage], estimate(config, GPU)
    assert 1.0 < e.step_seconds / found["step_seconds"] < 1.25  # matmuls are assumed slower than one GPU alone has them
    row = {"modelled_seconds": e.step_seconds, "measured_seconds": found["step_seconds"], "mfu": found["mfu_full"]}
    row |= {"estimated_bytes": found["peak_bytes_estimated"], "measured_bytes": found["peak_bytes_measured"]}
    guides.hold("measured", name, row)


def test_every_row_of_the_table_is_held():
    guides.hold_rows("measured", [name for name, *_ in STAGES.values()])
