"""The planner's command: output, files, formulas and errors; its estimates against compiled programs."""

import json
import re
import subprocess
import sys
from math import prod

import pytest
import yaml
from conftest import LAYOUTS, cover, needs_cuda_compiler
from planning import ROOT, run, small

from nanotrain_jax import plan
from nanotrain_jax.audit import topology
from nanotrain_jax.config import load
from nanotrain_jax.planner import choice, explain, search
from nanotrain_jax.planner.compiled import compile_step, ratios
from nanotrain_jax.planner.estimate import estimate, on_gpus

FILES = sorted((ROOT / "configs").glob("*.yaml"))
# Not models of our own factories or of folders; with pictures: PICTURES, and tests/audit/test_vision_compiled.py.
OTHERS = "factory", "resume: hf:", "\nvision:"
CONFIGS = [path.stem for path in FILES if not any(key in path.read_text() for key in OTHERS)]
PICTURES = ["vision_language", "vision_language_74b"]


def values_of(numbers):
    """Evaluate the arithmetic of a formula."""
    assert re.fullmatch(r"[\d,.e+\-x/^() ]+", numbers), numbers
    return eval(numbers.replace(",", "").replace(" x ", " * ").replace("^", "**"))


APART = "parallel.replica=2", "parallel.data=4", "parallel.sync_every=20"
HOST = "memory.offload_optimizer=host"
FROZEN = "train.stages=[]", "train.freeze=[^ends/, ^layers/, ^encoder/]"
PAIRS = "train.objective={kind: dpo}", "data.source=pairs:none", "model.vocab_size=128256", "parallel.zero=0"
EXPLAINED = [(name, []) for name in CONFIGS] + [
    *((name, ["model.vocab_size=50", *more]) for name in PICTURES for more in ([], FROZEN)),
    ("vision_language_74b", ["parallel.zero=3", "memory.remat=block:8", "parallel.sequence_parallel=false"]),
    ("vision_language_74b", ["parallel.pipe=1", "parallel.tensor=8", "memory.remat=none", *FROZEN]),
    ("qwen3_8b", ["model.head_dim=64", "model.sliding_window=2048", "model.family=qwen2"]),
    ("qwen3_8b", ["model.family=gemma3", "model.sliding_window=1024", "parallel.tensor=2", "parallel.data=4"]),
    ("llama3_70b", ["parallel.zero=3", "parallel.sequence_parallel=false"]),
    ("llama3_70b", [*LAYOUTS["llama3_70b"], "parallel.zero=3", "memory.remat=block:4"]),
    ("llama3_70b", [*LAYOUTS["llama3_70b"], "parallel.zero=0", "parallel.microbatches=1", "parallel.replica=2"]),
    ("gpt3_175b", ["parallel.zero=3", "parallel.schedule=zero_bubble"]),
    ("gpt2_124m", ["parallel.replica=2", "parallel.data=4", "parallel.zero=2"]),
    *(("gpt2_124m", [f"parallel.zero={zero}", *APART]) for zero in (0, 2)),
    ("gpt2_124m", ["parallel.zero=1", *APART, "parallel.compress=topk:0.02"]),
    ("llama3_8b", ["parallel.replica=2", "parallel.data=4", "parallel.compress=powersgd:16"]),
    ("llama3_8b", ["parallel.replica=2", "parallel.data=2", "parallel.tensor=2", "parallel.compress=int8"]),
    ("gpt2_124m", ["parallel.zero=0", "parallel.grad_reduce=per_layer", "parallel.microbatches=1"]),
    *(("gpt2_124m", [f"parallel.zero={zero}", HOST]) for zero in range(4)),  # tied: used at both ends
    ("gpt2_124m", ["parallel.zero=3", HOST, "memory.offload_params=host", "parallel.tensor=2", "parallel.data=4"]),
    ("gpt2_124m", ["parallel.zero=2", "memory.remat=full", "memory.offload_activations=host"]),
    ("gpt2_124m", ["parallel.zero=3", "parallel.pipe=2", "parallel.data=4", HOST]),
    ("gpt2_124m", ["parallel.zero=2", "memory.offload_optimizer=nvme", "memory.nvme_dir=/nvme"]),
    (
        "llama3_8b_128k",
        ["parallel.context_attention=gather", "memory.remat=block:2", "parallel.tensor=2", "parallel.context=4"],
    ),
    ("llama3_8b_128k", ["parallel.context_attention=ulysses", "parallel.tensor=4", "parallel.context=2"]),
    ("llama3_8b", ["memory.remat=full", HOST, "memory.offload_params=host", "memory.offload_activations=host"]),
    ("llama3_8b", ["model.tie_embeddings=true", "parallel.zero=2", HOST]),
    ("llama3_8b", ["parallel.replica=2", "parallel.data=4", "precision.grad_reduce=int8", "precision.gather=float8"]),
    ("llama3_8b", ["parallel.zero=0", "precision.grad_reduce=float8"]),
    ("moe_laptop", ["parallel.expert=4"]),
    ("moe_16b", ["train.lora={targets: [q, v]}", "memory.remat=selective", "parallel.expert_exchange=ragged"]),
    ("moe_16b", ["parallel.pipe=4", "parallel.data=16", "model.experts.first_dense=2"]),
    ("llama3_8b", [*PAIRS, "model.loss_chunk=1024", "parallel.context=2", "parallel.tensor=4", "parallel.data=1"]),
    ("llama3_8b", ["train.freeze=[/mlp/, ^ends/]"]),
    ("llama3_8b", ["train.freeze=[^layers/]", "parallel.tensor=2", "parallel.data=4", HOST]),
    ("llama3_8b", ["parallel.pipe=2", "parallel.data=4", "parallel.zero=3", "model.tie_embeddings=true", HOST]),
]


@pytest.mark.parametrize(("name", "overrides"), EXPLAINED)
def test_every_formula_evaluates_to_its_value(name, overrides):
    config = load.load(ROOT / "configs" / f"{name}.yaml", overrides)
    gpu = "cpu" if config.runtime.simulate else "h100"
    sections = explain.explain(estimate(on_gpus(config, 0, gpu, choice.vocabulary(config)), gpu))
    titles = {section.title for section in sections}
    assert {"Parameters", "FLOPs", "Model states", "Activations", "Peak memory"} <= titles
    for section in sections:
        assert section.source
        for line in section.lines:
            assert values_of(line.numbers) == pytest.approx(line.value, rel=1e-4), line


def test_host_offload_is_planned_and_reported(tmp_path, capsys):
    """Llama-3-8B on one GPU: 18 bytes per parameter in host memory, copied over PCIe."""
    file, folder = tmp_path / "plan.json", tmp_path / "report"
    modes = ["memory.offload_optimizer=host", "memory.offload_params=host"]
    one = ["data.batch_size=1", "parallel.microbatches=1", "memory.remat=full"]
    common = "--config", ROOT / "configs/llama3_8b.yaml", "--gpu", "h100", "--gpus", 1
    assert run(*common, "--json", file, "--report", folder, *modes, *one) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "host memory per GPU, GB: optimizer 96.36, params 16.06, gradients 32.12; total 144.54" in out
    assert sum(found["estimate"]["on_host"].values()) == pytest.approx(18 * 8.03e9, rel=1e-3)
    to_host = sum(row["bytes_per_device"] for row in found["host_copies"] if row["to"] == "host")
    assert to_host == pytest.approx((12 + 2 + 4) * 8.03e9, rel=1e-3)
    assert {row["link"] for row in found["host_copies"]} == {"PCIe"}
    # The two directions overlap, and copies of each microbatch hide behind its compute.
    each_way = [sum(r["exposed_seconds"] for r in found["host_copies"] if r["to"] == to) for to in ("device", "host")]
    assert max(each_way) <= found["estimate"]["seconds"]["host"] < sum(each_way)
    assert "Host memory per GPU" in next(folder.glob("*.html")).read_text()
    assert run(*common, *one) == 1  # 132 GB without


@pytest.mark.long
def test_a_search_suggests_host_offload_and_finds_layouts_with_it(capsys):
    common = "--config", ROOT / "configs/llama3_70b.yaml", "--gpu", "h100", "--gpus", 8, "--choose"
    assert run(*common) == 2
    assert "would fit with memory.offload_optimizer=host (" in capsys.readouterr().err
    modes = "memory.offload_optimizer=host", "memory.offload_params=host", "memory.offload_activations=host"
    assert run(*common, *modes) == 0
    assert "ZeRO 3" in capsys.readouterr().out


def test_the_json_has_the_documented_keys(tmp_path):
    file = tmp_path / "plan.json"
    assert run("--config", ROOT / "configs/llama3_8b.yaml", "--gpu", "h100", "--gpus", 64, "--json", file) == 0
    found = json.loads(file.read_text())
    assert found["model"]["params"] == 8_030_261_248
    assert (found["gpu"], found["gpus"], prod(found["mesh"].values()), found["fits"]) == ("h100", 64, 64, True)
    e = found["estimate"]
    assert {"state_bytes", "activation_bytes", "peak_bytes", "step_seconds", "mfu", "bubble_fraction"} <= e.keys()
    assert e["peak_bytes"] == pytest.approx(max(sum(parts.values()) for parts in e["moments"].values()))
    assert e["step_seconds"] == pytest.approx(sum(e["seconds"].values()))
    assert {"axis", "op", "bytes_per_device", "why"} <= found["collectives"][0].keys()
    assert "compiled" not in found and "candidates" not in found


@pytest.mark.long
def test_the_chosen_layout_is_written_and_plans_the_same(tmp_path, capsys):
    chosen, first, again = (tmp_path / name for name in ("chosen.yaml", "first.json", "again.json"))
    config = ROOT / "configs/llama3_70b.yaml"
    assert run("--config", config, "--gpus", 64, "--choose", "--write", chosen, "--json", first) == 0
    assert run("--config", chosen, "--json", again) == 0
    first, again = (json.loads(file.read_text()) for file in (first, again))
    assert 1 < len(first["candidates"]) <= 10
    for key in ("mesh", "zero", "microbatches", "estimate"):
        assert first[key] == again[key]
    assert yaml.safe_load(chosen.read_text())["model"]["num_kv_heads"] == 8  # other keys are unchanged
    assert "several chunks, with microbatches" in capsys.readouterr().out


def test_a_search_keeps_overrides_and_without_a_mesh_the_keys_of_the_file(tmp_path):
    out = tmp_path / "out.json"
    config = ROOT / "configs/llama3_8b.yaml"
    assert run("--config", config, "--gpus", 8, "--choose", "parallel.zero=2", "--json", out) == 0
    assert json.loads(out.read_text())["zero"] == 2
    tree = yaml.safe_load(config.read_text())
    tree["parallel"], tree["memory"] = {"zero": 3}, {"remat": "full"}
    meshless = tmp_path / "meshless.yaml"
    meshless.write_text(yaml.safe_dump(tree))
    assert run("--config", meshless, "--gpus", 16, "--json", out) == 0
    found = json.loads(out.read_text())
    assert (found["zero"], found["remat"]) == (3, "full")  # full is in the file
    assert found["candidates"]
    assert run("--config", meshless) == 2  # the number of GPUs is missing


STAGES = "train.stages=[{name: head, steps: 50, freeze: [^layers/]}, {name: all, steps: 150, lr: 1e-4}]"


def test_a_plan_of_stages_shows_all_and_plans_one(capsys, tmp_path):
    file = tmp_path / "plan.json"
    common = "--config", ROOT / "configs/gpt2_124m.yaml", STAGES, "optimizer.warmup_steps=10"
    assert run(*common, "--stage", "head", "--json", file) == 0
    (head,) = re.findall(r"head *│ *1 to 50 │ *([\d.]+)% │ *([\d.]+)", capsys.readouterr().out)
    assert float(head[0]) == pytest.approx(31.7, abs=0.1)  # embeddings and the last norm
    assert float(head[1]) == pytest.approx(json.loads(file.read_text())["estimate"]["peak_bytes"] / 1e9, abs=0.01)
    assert run(*common, "--stage", "tail") == 2
    assert "--stage=tail is no stage of training; use head or all" in capsys.readouterr().err


def test_a_plan_of_a_batch_that_grows_is_of_the_largest(capsys):
    config = "--config", ROOT / "configs/gpt2_124m.yaml"
    assert run(*config, "parallel.microbatches=4", "train.batch_schedule=[{steps: 5, batch_size: 128}]") == 0
    told = capsys.readouterr().out
    assert "global batch: 512 sequences" in told
    assert "this is the largest batch" in told


def test_a_layout_that_does_not_fit_exits_with_1_and_prints_the_excess(capsys):
    arguments = "--config", ROOT / "configs/llama3_8b.yaml", "--gpu", "a100-40", "parallel.zero=0"
    assert run(*arguments) == 1
    assert re.search(r"does not fit: peak memory 1\d\d\.\d GB .* limit 31\.7 GB .* over", capsys.readouterr().out)
    assert run("--config", ROOT / "configs/llama3_8b.yaml", "--memory-fraction", 0.3) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "gpu='h1000' is unknown; use a100-40, a100-80, h100, h200, b200, gb200, cpu"),
        (["--gpus", 12], "gpus=12: 1 to 8, or whole hosts of 8; use 16"),
        (["--gpus", 64, "parallel.tensor=3"], "parallel.tensor=3 does not divide 64 GPUs"),
        (["--choose", "parallel.prefetch=true", "parallel.microbatches=1"], "parallel.prefetch is not searched"),
        (["--choose", "parallel.tensor=0"], "parallel.tensor=0: must be at least 1"),
        (["--gpus", 0], "gpus=0: 1 to 8, or whole hosts of 8; use 1"),
        (["--gpus", 10**9, "--choose"], "gpus=1000000000: must be at most 100000"),
        (["--gpu", ""], "gpu='' is unknown"),
        (["parallel.data=-1"], "parallel.data=-1 takes the remaining devices"),
        (["--memory-fraction", 1.5], "--memory-fraction=1.5: must be in (0, 1]"),
        (["model.d_model=100"], "model.num_heads=32 does not divide model.d_model=100"),
        (
            ["--choose", "--gpus", 8, "data.batch_size=1", "parallel.data=8"],
            "no mesh of 8 GPUs suits the model and batch",
        ),
        (
            ["--choose", "--gpus", 8, "--gpu", "a100-40", "model.d_model=8192", "data.batch_size=8"],
            "no layout of 8 x a100-40 fits: the smallest (",
        ),
        (["--write", "/proc/none"], "--write='/proc/none' cannot be written (No such file or directory); give another"),
        (["--json", "/proc/none"], "--json='/proc/none' cannot be written (No such file or directory); give another"),
        (["--report", "/proc/none"], "--report='/proc/none' cannot be written (No such file or directory); give"),
    ],
)
def test_a_request_error_is_one_line(arguments, message, capsys):
    assert run("--config", ROOT / "configs/llama3_8b.yaml", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_compiling_without_the_cuda_compiler_is_a_request_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(topology, "entry_points", lambda **_: [])
    assert run("--config", ROOT / "configs/gpt2_124m.yaml", "--compile", "--json", tmp_path / "plan.json") == 2
    message = "cannot compile for h100: the CUDA compiler is not installed; pip install 'nanotrain_jax[cuda12]'"
    assert capsys.readouterr() == ("", f"error: {message}\n")
    assert not list(tmp_path.iterdir())


def test_a_compiler_error_is_one_line_and_exits_with_1(monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED:\n  out of memory")

    monkeypatch.setattr(plan.topology, "check_compiler", lambda gpu: None)
    monkeypatch.setattr(plan.compiler, "compile_step", fails)
    monkeypatch.setattr(plan.meshes, "configure", lambda **_: None)
    assert run("--config", ROOT / "configs/gpt2_124m.yaml", "--compile") == 1
    assert capsys.readouterr().err == "error: compilation failed: RESOURCE_EXHAUSTED: out of memory\n"


def cluster(name):
    """Return the number and kind of GPUs that the first line of a config names."""
    first = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()[0]
    number, gpu = re.match(r"# For ([\d,]+) x ([\w-]+)[ ,:]", first).groups()
    return number.replace(",", ""), gpu


def planned_and_compiled(name, tmp_path):
    number, gpu = cluster(name)
    file = tmp_path / "plan.json"
    command = ["--config", f"configs/{name}.yaml", "--gpu", gpu, "--gpus", number, "--compile", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "nanotrain_jax.plan", *command, "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    found = json.loads(file.read_text())
    assert found["ratios"]["argument_bytes"] == pytest.approx(1, abs=0.02)
    assert found["ratios"]["flops"] == pytest.approx(1, abs=0.01)
    return found


# The default run of tests/audit/test_audit.py compiles layouts of most of the others.
ON_GPUS = [name for name in CONFIGS if cluster(name)[1] != "cpu"]
BY_COMMAND = ["llama3_8b_1gpu"]
MIXTURES = ["mixtral_8x7b", "moe_16b", "moe_671b"]
BY_COMMAND_LATER = [pytest.param(name, marks=pytest.mark.long) for name in ON_GPUS if name not in BY_COMMAND]


@needs_cuda_compiler
@pytest.mark.parametrize("name", BY_COMMAND + BY_COMMAND_LATER)
def test_every_config_is_planned_and_compiled_for_the_gpus_of_its_first_line(name, tmp_path):
    ratios = planned_and_compiled(name, tmp_path)["ratios"]
    assert ratios["peak_bytes"] == pytest.approx(1, abs=0.05 if name in MIXTURES else 0.1)
    assert ratios["wire_bytes"] == pytest.approx(1, abs=0.01)


ONE_STAGE = ["parallel.pipe=1", "parallel.schedule=1f1b", "parallel.chunks=1", "parallel.data=8"]


@needs_cuda_compiler
@pytest.mark.long
@pytest.mark.parametrize("layers, gpus, expert", [(4, 32, 4), (2, 8, 1), (2, 8, 8)])
def test_peaks_of_mixtures_in_a_scan_at_zero_1(layers, gpus, expert):
    keys = [*ONE_STAGE, "parallel.zero=1", f"parallel.expert={expert}", f"model.num_layers={layers}"]
    keys += ["parallel.expert_exchange=ragged"] if expert == 8 else []
    config = on_gpus(load.load(str(ROOT / "configs/mixtral_8x7b.yaml"), keys), gpus, "h100")
    found = ratios(estimate(config, "h100"), compile_step(config, "h100"))
    assert found["peak_bytes"] == pytest.approx(1, abs=0.05)
    assert found["wire_bytes"] == pytest.approx(1, abs=0.01)


IN_STAGES = [
    "parallel.pipe=2",
    "parallel.data=4",
    "parallel.microbatches=4",
    "model.num_layers=8",
    "data.batch_size=16",
]
PREFETCH = ["parallel.zero=3", "parallel.prefetch=true"]
BLOCKS = [
    [*IN_STAGES, "parallel.zero=1", "memory.remat=block:2"],
    [*IN_STAGES, *PREFETCH, "memory.remat=block:2"],
    [*PREFETCH, "parallel.microbatches=2", "model.num_layers=12", "data.batch_size=16", "memory.remat=block:3"],
]


@needs_cuda_compiler
@pytest.mark.long
@pytest.mark.parametrize("keys", BLOCKS, ids=str)
def test_peaks_of_blocks_in_loops_written_by_hand(keys):
    config = on_gpus(load.load(str(ROOT / "configs/llama3_8b.yaml"), keys), 8, "h100")
    ratio = compile_step(config, "h100")["peak_bytes"] / estimate(config, "h100").peak_bytes
    assert ratio == pytest.approx(1, abs=0.05)


ON_CPU = [name for name in CONFIGS if cluster(name)[1] == "cpu"]


@pytest.mark.parametrize("name", cover([], ON_CPU))
def test_laptop_configs_are_planned_and_compiled_for_simulated_devices(name, tmp_path):
    planned_and_compiled(name, tmp_path)


@pytest.mark.long
def test_fixed_keys_are_kept_and_the_written_config_is_valid(tmp_path, capsys):
    """Chunks require stages; keys incompatible with the chosen layout are not written."""
    config, chosen = ROOT / "configs/llama3_8b.yaml", tmp_path / "chosen.yaml"
    best = search.search(small(), "h100", 8, fixed={"parallel.chunks": 2}).best
    assert {(e.config.parallel.schedule, e.config.parallel.chunks) for e in best} == {
        ("interleaved", 2),
        ("zero_bubble", 2),
    }
    tree = yaml.safe_load(config.read_text())
    tree["parallel"] |= {"prefetch": True, "microbatches": 1}
    prefetching = tmp_path / "prefetching.yaml"
    prefetching.write_text(yaml.safe_dump(tree))
    assert run("--config", prefetching, "--gpus", 8, "--choose", "--write", chosen) == 0
    assert run("--config", chosen) == 0
    assert not load.load(chosen).parallel.prefetch
    fixed = "memory.remat=block:4", "parallel.pipe=2"
    assert run("--config", config, "--gpus", 8, "--choose", *fixed, "--write", chosen) == 0
    assert run("--config", chosen) == 0
    apart = "parallel={replica: 2, data: 4, zero: 3, sync_every: 20, full_sync_steps: 5}", "model.num_layers=8"
    assert run("--config", config, "--gpus", 8, *apart, "--write", chosen) == 0
    assert load.load(chosen).parallel.full_sync_steps == 5
    on_disk = "memory.offload_optimizer=nvme", "memory.nvme_dir=x", "parallel.compress=int8", "parallel.sync_every=0"
    assert run("--config", config, "--gpus", 8, *apart, *on_disk) == 2
    assert "each phase would begin with new files" in capsys.readouterr().err
    simulated = ROOT / "configs/quickstart.yaml"
    assert run("--config", simulated, "--gpu", "h100", "--gpus", 8, "--choose", "--write", chosen) == 0
    assert run("--config", chosen) == 0
    assert load.load(chosen).runtime.simulate == 0
