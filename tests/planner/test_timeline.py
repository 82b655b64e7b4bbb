"""`plan --memory-timeline`: the compiled step's memory by kind, phase and line of source."""

import json

import jax
import pytest
from conftest import LAYOUTS, cover, needs_cuda_compiler
from planning import ROOT, run

from nanotrain_jax import plan
from nanotrain_jax.audit import topology

GPT2, LLAMA = "gpt2_124m", "llama3_8b"
STAGES = ["parallel.pipe=4", "parallel.data=2", "parallel.microbatches=16", "data.batch_size=256"]
CASES = [
    (LLAMA, ["parallel.zero=3", "memory.remat=full", "parallel.microbatches=2", "data.batch_size=16"]),
    (LLAMA, ["parallel.tensor=8", "parallel.data=1", "data.batch_size=1", "memory.remat=full"]),
    (GPT2, [*STAGES, "parallel.schedule=zb_h1", "parallel.zero=1"]),
    (GPT2, ["parallel.zero=2", "memory.remat=selective"]),
    (GPT2, ["memory.offload_optimizer=host"]),
]


def name(case):
    return " ".join([case[0], *(key.split(".")[1] for key in case[1])])


def planned(case, folder, monkeypatch):
    """Return what `plan --memory-timeline` writes: the JSON, and the text of the page."""
    monkeypatch.setattr(plan.meshes, "configure", lambda **_: None)
    config, overrides = case
    request = "--config", ROOT / "configs" / f"{config}.yaml", "--gpu", "h100", "--gpus", 8, "--memory-timeline"
    files = "--json", folder / "plan.json", "--report", folder
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of users
        assert run(*request, *files, *LAYOUTS.get(config, []), *overrides) == 0
    return json.loads((folder / "plan.json").read_text()), (folder / "index.html").read_text()


@needs_cuda_compiler
@pytest.mark.parametrize("case", cover([(GPT2, ["parallel.zero=1"])], CASES, name))
def test_the_timeline_has_the_compilers_peak_and_the_parts_of_the_estimate(case, tmp_path, monkeypatch, capsys):
    found, page = planned(case, tmp_path, monkeypatch)
    compiled, moments, curve = found["compiled"], found["estimate"]["moments"], found["compiled"]["timeline"]["curve"]
    timeline = compiled["timeline"]
    assert timeline["peak_bytes"] == pytest.approx(compiled["peak_bytes"], rel=0.01)
    sums = [sum(sizes) for sizes in zip(*curve.values(), strict=True)]
    assert max(sums) == sums[timeline["at"]] == timeline["peak_bytes"]
    for kind in "params", "optimizer":
        assert max(curve[kind]) == min(curve[kind]) == pytest.approx(moments["update"][kind], rel=0.02, abs=1e6)
    has_logits = curve["loss"][timeline["at"]] > 0
    of_the_peak = [parts for parts in moments.values() if (parts["loss"] > 0) == has_logits]
    expected = max(of_the_peak, key=lambda parts: sum(parts.values()))
    groups = [["activations"], ["loss"], ["gradients", "buffers", "layer"]]
    if case[0] == LLAMA and not has_logits:  # written out: activations are freed as gradients are made
        groups = [["loss"], ["activations", "gradients", "buffers", "layer"]]
    for kinds in groups:
        size = sum(curve[kind][timeline["at"]] for kind in kinds)
        assert size == pytest.approx(sum(expected[kind] for kind in kinds), abs=0.03 * timeline["peak_bytes"]), kinds
    assert {"forward", "backward"} < set(timeline["phase"]) and timeline["phase"][-1] == "update"
    largest = next(row for row in timeline["holders"] if row["kind"] == "activations")
    assert largest["source"].startswith(("models/", "parallel/"))
    assert f"peak {timeline['peak_bytes'] / 1e9:.2f} GB" in page
    assert largest["source"] in page
    assert largest["source"] in capsys.readouterr().out


def test_a_timeline_needs_the_compiler_of_a_gpu(capsys, monkeypatch):
    config = "--config", ROOT / "configs" / "quickstart.yaml", "--memory-timeline"
    assert run(*config, "--gpu", "cpu") == 2
    assert capsys.readouterr().err.endswith("give a GPU, e.g. --gpu h100\n")
    monkeypatch.setattr(topology, "entry_points", lambda **_: [])
    assert run(*config, "--gpu", "h100") == 2
    error = capsys.readouterr().err
    assert "the CUDA compiler is not installed" in error and error.count("\n") == 1
