"""The planner: published figures come out, the search misses nothing, the command says what is wrong."""

import itertools
import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import yaml
from conftest import LAYOUTS, needs_cuda_compiler

from nanotrain_jax import plan
from nanotrain_jax.audit import cost, hardware, memory, topology
from nanotrain_jax.fields import Remat
from nanotrain_jax.parallel import chart, schedule
from nanotrain_jax.planner import explain, search
from nanotrain_jax.planner.estimate import estimate, link, margin, on_gpus
from nanotrain_jax.resolved import resolve
from nanotrain_jax.runtime import request

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def gpt(layers, width, heads, batch, remat="none", vocab=51200, **parallel):
    """A GPT of the papers, 2,048 tokens long, resolved."""
    tree = {
        "model": {"family": "gpt2", "num_layers": layers, "d_model": width, "num_heads": heads, "vocab_size": vocab},
        "parallel": {"data": 1} | parallel,
        "memory": {"remat": remat},
        "data": {"source": "synthetic", "batch_size": batch, "seq_len": 2048},
    }
    config = request.parse(tree)
    return resolve(config, config.parallel.axes)


# Models of Korthikanti et al. 2022 (arXiv 2205.05198, table 3): layers, width, heads, tensor, pipe, microbatch.
MODELS = {
    "22B": (48, 6144, 64, 8, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 1),
    "530B": (105, 20480, 128, 8, 35, 1),
    "1T": (128, 25600, 160, 8, 64, 1),
}


def test_the_zero_paper_s_own_example_comes_out():
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, figure 1); gradients as there, 2
    bytes each, which we hold for a part of the step only."""
    found = []
    for zero in range(4):
        config = gpt(36, 4096, 32, 64, data=64, zero=zero, persist_below=0)
        psi = cost.parameters(config.model)
        gradients = 2 * psi / (64 if zero > 1 else 1)
        found.append((sum(memory.state(config).values()) + gradients) / psi * 7.5)
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_gpt3_has_175_billion_parameters_and_2_8_terabytes_of_state():
    """arXiv 2005.14165, table 2.1; 16 bytes each with 16-bit gradients (arXiv 1910.02054, section 3.1)."""
    config = gpt(96, 12288, 96, 1, vocab=50257)
    psi = cost.parameters(config.model)
    assert psi == 174_604_259_328
    assert (sum(memory.state(config).values()) + 2 * psi) / 1e12 == pytest.approx(2.8, abs=0.05)


@pytest.mark.parametrize(
    ("model", "billions"), [("22B", 22), ("175B", 175), ("530B", 530), ("1T", 1008)], ids=list(MODELS)
)
def test_layers_keep_what_table_2_of_korthikanti_says_but_for_masks(model, billions):
    """In s b h bytes: 10 + 24/t with tensor, 34/t with sequence parallelism, 2 with full recomputation. Our layers have
    no dropout (2 masks of a byte), and attention keeps a float32 statistic per head instead of its scores; heads of 160
    have no flash attention, whose scores are told apart here."""
    L, h, a, t, _, b = MODELS[model]
    config = gpt(L, h, a, b)
    assert cost.parameters(config.model) / 1e9 == pytest.approx(billions, rel=0.02)
    sbh = 2048 * b * h
    flash = h // a <= 128
    statistic = 4 * a * 2048 * b if flash else (6 * 2048 + 8) * a * 2048 * b

    def kept(remat="none", **parallel):
        config = gpt(L, h, a, b, remat=remat, **parallel)
        return 2 * memory.layer_activations(config, Remat.parse(remat)) * 2048 * b

    masks = 2 * sbh
    assert kept() == 34 * sbh - masks + statistic
    assert kept(tensor=t, sequence_parallel=False) == (10 + 24 / t) * sbh - masks + statistic / t
    assert kept(tensor=t) == (34 * sbh - masks + statistic) / t
    assert kept("full") == 2 * sbh
    assert kept("full", tensor=t, sequence_parallel=False) == 2 * sbh


@pytest.mark.parametrize(("P", "M", "C"), [(4, 8, 1), (8, 64, 1), (8, 64, 2), (64, 512, 1), (16, 192, 3)])
def test_bubbles_are_those_of_narayanan(P, M, C):
    """(p - 1) / m of the ideal time, over v with interleaved stages (arXiv 2104.04473, section 2.2)."""
    outline = chart.outline("interleaved" if C > 1 else "1f1b", P, M, C)
    time = outline.time(1 / C, 2 / C, 0.0)
    assert time / (3 * M) - 1 == pytest.approx((P - 1) / (C * M))


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_an_outline_takes_as_long_and_keeps_as_much_as_its_schedule(name):
    for P, M in ((2, 4), (4, 12), (8, 32)):
        C = 2 if name == "interleaved" else 1
        table, outline = schedule.make(name, P, M, C), chart.outline(name, P, M, C)
        assert outline.time(1.0 / C, 1.3 / C, 0.9 / C) == pytest.approx(chart.stats(table, 1.0, 1.3, 0.9).time)
        assert outline.slots == {what: buffer.count for what, buffer in schedule.buffers(table).items()}
        assert (outline.ticks, outline.weights) == (table.ticks, table.weight.shape[-1])


# Seconds per iteration that Megatron-LM took on A100-80s, with selective recomputation and sequence parallelism, and
# with full recomputation (Korthikanti et al. 2022, table 5); batches of 4, 64, 280 and 512 sequences on one group.
MEASURED = {"22B": (1.10, 1.42), "175B": (13.75, 18.13), "530B": (37.83, 49.05), "1T": (71.49, 94.42)}
BATCH = {"22B": 4, "175B": 64, "530B": 280, "1T": 512}


@pytest.mark.parametrize("model", MEASURED)
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_modelled_times_are_within_a_quarter_of_what_megatron_took(model, remat):
    """Not the same program: theirs has dropout and no flash attention."""
    L, h, a, t, P, b = MODELS[model]
    chunks = 3 if model in ("175B", "530B") else 1
    name = "interleaved" if chunks > 1 else "1f1b"
    pieces = BATCH[model] // b
    how = {"tensor": t, "pipe": P, "schedule": name, "chunks": chunks, "microbatches": pieces}
    config = gpt(L, h, a, BATCH[model], remat, **how)
    ratio = estimate(config, "a100-80").step_seconds / MEASURED[model][remat == "full"]
    assert 0.75 <= ratio <= 1.25
    line = f"{estimate(config, 'a100-80').step_seconds:.1f} / {MEASURED[model][remat == 'full']:.1f} ({ratio:.2f})"
    assert line in (ROOT / "README.md").read_text(), line


def test_links_are_those_that_a_group_of_devices_has():
    sizes = 2, 1, 4, 1, 8  # pipe, replica, data, context, tensor on 64 GPUs
    assert link(("tensor",), sizes, 8) == (8, 8)
    assert link(("data",), sizes, 8) == (4, 1)
    assert link(("data", "tensor"), sizes, 8) == (32, 8)
    assert link(("data",), (1, 1, 32, 1, 2), 8) == (32, 4)
    assert link(("data",), (1, 1, 32, 1, 2), 72) == (32, 32)
    assert link(("tensor",), (1, 1, 8, 1, 3), 8) == (3, 1)  # some groups of three lie on two hosts


# arXiv 2104.04473: GPT-3 on 1,024 A100s, tensor 8 within hosts (the paper's 12 stages do not divide them; 16 do), and
# the last row of table 1.
PAPER = {
    "175B": (gpt(96, 12288, 96, 1536), 1024, {"pipe": 16, "data": 8, "tensor": 8}),
    "1T": (gpt(128, 25600, 160, 3072), 3072, {"pipe": 64, "data": 6, "tensor": 8}),
}


@pytest.mark.parametrize("model", PAPER)
def test_the_first_choice_is_as_good_as_the_paper_s_layout(model):
    config, gpus, axes = PAPER[model]
    found = search.search(config, "a100-80", gpus)
    pieces = config.data.batch_size // axes["data"]
    theirs = resolve(
        config.replace("parallel", **axes, microbatches=pieces).replace("memory", remat="full"),
        axes | {"replica": 1, "context": 1},
    )
    theirs = estimate(theirs, "a100-80")
    best = found.best[0]
    assert theirs.fits and best.fits
    assert best.step_seconds <= theirs.step_seconds
    readme = (ROOT / "README.md").read_text()
    assert f"{best.step_seconds:.1f} s against {theirs.step_seconds:.1f} s" in readme
    assert search.words(best.config) in readme


def small(batch=32, **parallel):
    tree = {
        "model": {"num_layers": 8, "d_model": 512, "num_heads": 8, "vocab_size": 4096},
        "parallel": {"data": 1} | parallel,
        "data": {"source": "synthetic", "batch_size": batch, "seq_len": 512},
    }
    config = request.parse(tree)
    return resolve(config, config.parallel.axes)


def everything(config, gpus):
    """Every layout that can be asked for."""
    sizes = [d for d in range(1, gpus + 1) if gpus % d == 0]
    for pipe, replica, tensor in itertools.product(sizes, repeat=3):
        data = gpus // (pipe * replica * tensor)
        if pipe * replica * tensor * data != gpus:
            continue
        axes = {"pipe": pipe, "replica": replica, "data": data, "context": 1, "tensor": tensor}
        ways = itertools.product(range(4), schedule.SCHEDULES, (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), search.POLICIES)
        for zero, name, chunks, pieces, remat in ways:
            keys = {"zero": zero, "schedule": name, "chunks": chunks, "microbatches": pieces}
            try:
                yield resolve(config.replace("parallel", **keys).replace("memory", remat=remat), axes)
            except ValueError:
                continue


@pytest.mark.parametrize("taken", [0.75, 0.012])
def test_a_search_finds_what_trying_everything_finds(taken):
    """Within the 1% that count as equal; the second time little memory is left."""
    config = small()
    found = search.search(config, "h100", 8, taken)
    limit = taken * hardware.find("h100").memory_bytes
    fitting = [c for c in everything(config, 8) if sum(memory.peak(c)[1].values()) * (1 + margin(c)) <= limit]
    best = min(estimate(c, "h100").step_seconds for c in fitting)
    assert found.best[0].step_seconds <= 1.0101 * best
    assert all(e.fits and e.gpus == 8 for e in found.best)


def test_one_microbatch_is_tried_where_two_do_not_fit():
    """Several need float32 sums of the gradients, which few tokens do not make up for."""
    config = request.load(ROOT / "configs/llama3_8b.yaml", ["data.seq_len=512"])
    fixed = {"parallel.zero": 1, "parallel.data": 8}
    best = search.search(plan.neutral(config, None), "h100", 8, fixed=fixed).best[0]
    assert (best.config.parallel.microbatches, best.fits) == (1, True)


def test_what_the_user_gave_is_held():
    fixed = {"parallel.tensor": 2, "parallel.zero": 2, "memory.remat": "full", "parallel.microbatches": 4}
    found = search.search(small(), "h100", 8, fixed=fixed)
    assert found.best
    for e in found.best:
        p = e.config.parallel
        assert (p.tensor, p.zero, p.microbatches, e.config.memory.remat) == (2, 2, 4, "full")


def test_the_readme_shows_what_is_chosen_for_llama_on_one_host():
    found = search.search(plan.neutral(request.load(ROOT / "configs/llama3_8b.yaml"), None), "h100", 8)
    readme = (ROOT / "README.md").read_text()
    assert f"{found.tried} layouts estimated" in readme
    for e in found.best[:3]:
        assert f"{e.peak_bytes / 1e9:.1f}   {e.step_seconds:.3f}  {e.mfu:.1%}" in readme
    assert f"{found.rejected['needs more memory than there is']}  needs more memory" in readme


def test_rejected_layouts_have_reasons():
    config = small(batch=24)
    found = search.search(config, "h100", 16, 0.003)
    assert found.rejected["needs more memory than there is"]
    assert found.rejected["data.batch_size is not divisible by replica x data"]
    assert found.rejected["parallel.tensor over more than the 8 GPUs that NVLink joins"]
    assert found.rejected["parallel.pipe=16 does not divide model.num_layers=8"]


def values_of(numbers):
    """The arithmetic of an explanation, computed again."""
    assert re.fullmatch(r"[\d,.e+\-x/^() ]+", numbers), numbers
    return eval(numbers.replace(",", "").replace(" x ", " * ").replace("^", "**"))


HOST = "memory.offload_optimizer=host"
EXPLAINED = [(name, []) for name in CONFIGS] + [
    ("llama3_70b", ["parallel.zero=3", "parallel.sequence_parallel=false"]),
    ("llama3_70b", [*LAYOUTS["llama3_70b"], "parallel.zero=3", "memory.remat=block:4"]),
    ("llama3_70b", [*LAYOUTS["llama3_70b"], "parallel.zero=0", "parallel.microbatches=1", "parallel.replica=2"]),
    ("gpt3_175b", ["parallel.zero=3", "parallel.schedule=zero_bubble"]),
    ("gpt2_124m", ["parallel.replica=2", "parallel.data=4", "parallel.zero=2"]),
    ("gpt2_124m", ["parallel.zero=0", "parallel.grad_reduce=per_layer", "parallel.microbatches=1"]),
    *(("gpt2_124m", [f"parallel.zero={zero}", HOST]) for zero in range(4)),  # tied: used at both ends
    ("gpt2_124m", ["parallel.zero=3", HOST, "memory.offload_params=host", "parallel.tensor=2", "parallel.data=4"]),
    ("gpt2_124m", ["parallel.zero=2", "memory.remat=full", "memory.offload_activations=host"]),
    ("gpt2_124m", ["parallel.zero=3", "parallel.pipe=2", "parallel.data=4", HOST]),
    ("gpt2_124m", ["parallel.zero=2", "memory.offload_optimizer=nvme", "memory.nvme_dir=/nvme"]),
    ("llama3_8b", ["memory.remat=full", HOST, "memory.offload_params=host", "memory.offload_activations=host"]),
    ("llama3_8b", ["model.tie_embeddings=true", "parallel.zero=2", HOST]),
    ("llama3_8b", ["parallel.pipe=2", "parallel.data=4", "parallel.zero=3", "model.tie_embeddings=true", HOST]),
]


@pytest.mark.parametrize(("name", "overrides"), EXPLAINED)
def test_every_explained_number_is_what_its_arithmetic_gives(name, overrides):
    config = request.load(ROOT / "configs" / f"{name}.yaml", overrides)
    gpu = "cpu" if config.runtime.simulate else "h100"
    sections = explain.explain(estimate(on_gpus(config, 0, gpu, plan.vocabulary(config)), gpu))
    assert {"Parameters", "FLOPs", "State", "Activations", "Peak"} <= {section.title for section in sections}
    for section in sections:
        assert section.source
        for line in section.lines:
            assert values_of(line.numbers) == pytest.approx(line.value, rel=1e-4), line


def test_what_rests_on_the_host_is_planned_and_told(tmp_path, capsys):
    """Llama-3-8B on one GPU: 18 bytes per parameter on its host, there and back over PCIe."""
    file, folder = tmp_path / "plan.json", tmp_path / "report"
    modes = ["memory.offload_optimizer=host", "memory.offload_params=host"]
    one = ["data.batch_size=1", "parallel.microbatches=1", "memory.remat=full"]
    common = "--config", ROOT / "configs/llama3_8b.yaml", "--gpu", "h100", "--gpus", 1
    assert run(*common, "--json", file, "--report", folder, *modes, *one) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "in host memory, GB for each GPU: optimizer 96.36, params 16.06, gradients 32.12; together 144.54" in out
    assert sum(found["estimate"]["on_host"].values()) == pytest.approx(18 * 8.03e9, rel=1e-3)
    to_host = sum(row["bytes_per_device"] for row in found["host_copies"] if row["to"] == "host")
    assert to_host == pytest.approx((12 + 2 + 4) * 8.03e9, rel=1e-3)
    assert {row["link"] for row in found["host_copies"]} == {"PCIe"}
    # Both ways at a time, and what every microbatch copies behind its computing.
    alone = [sum(r["exposed_seconds"] for r in found["host_copies"] if r["to"] == to) for to in ("device", "host")]
    assert max(alone) <= found["estimate"]["seconds"]["host"] < sum(alone)
    assert "its host's memory holds" in next(folder.glob("*.html")).read_text()
    assert run(*common, *one) == 1  # 132 GB without


def test_a_search_says_when_host_memory_would_do_and_finds_layouts_with_it(capsys):
    common = "--config", ROOT / "configs/llama3_70b.yaml", "--gpu", "h100", "--gpus", 8, "--choose"
    assert run(*common) == 2
    assert "what would do: memory.offload_optimizer=host (" in capsys.readouterr().err
    modes = "memory.offload_optimizer=host", "memory.offload_params=host", "memory.offload_activations=host"
    assert run(*common, *modes) == 0
    assert "ZeRO 3" in capsys.readouterr().out


def run(*arguments):
    return plan.main([str(a) for a in arguments])


def test_the_json_has_what_is_promised(tmp_path):
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


def test_the_winner_is_written_and_planned_again_the_same(tmp_path, capsys):
    won, first, again = (tmp_path / name for name in ("won.yaml", "first.json", "again.json"))
    config = ROOT / "configs/llama3_70b.yaml"
    assert run("--config", config, "--gpus", 64, "--choose", "--write", won, "--json", first) == 0
    assert run("--config", won, "--json", again) == 0
    first, again = (json.loads(file.read_text()) for file in (first, again))
    assert 1 < len(first["candidates"]) <= 10
    for key in ("mesh", "zero", "microbatches", "estimate"):
        assert first[key] == again[key]
    assert yaml.safe_load(won.read_text())["model"]["num_kv_heads"] == 8  # the rest is as it was
    assert "interleaved, with microbatches" in capsys.readouterr().out


def test_overrides_hold_while_choosing_and_keys_of_the_file_do_where_it_has_no_mesh(tmp_path):
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
    assert (found["zero"], found["remat"]) == (3, "full")  # full stands in the file
    assert found["candidates"]
    assert run("--config", meshless) == 2  # on how many GPUs?


def test_a_layout_that_does_not_fit_ends_with_1_and_says_by_how_much(capsys):
    arguments = "--config", ROOT / "configs/llama3_8b.yaml", "--gpu", "a100-40", "parallel.zero=0"
    assert run(*arguments) == 1
    assert re.search(r"does not fit: 1\d\d\.\d GB .* of the 31\.7 GB .* too much", capsys.readouterr().out)
    assert run("--config", ROOT / "configs/llama3_8b.yaml", "--memory-fraction", 0.3) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "gpu='h1000' is unknown; use a100-40, a100-80, h100, h200, b200, gb200, cpu"),
        (["--gpus", 12], "gpus=12: 1 to 8, or whole hosts of 8; use 16"),
        (["--gpus", 64, "parallel.tensor=3"], "parallel.tensor=3 does not divide 64 GPUs"),
        (["--choose", "parallel.prefetch=true", "parallel.microbatches=1"], "parallel.prefetch is not searched"),
        (["--choose", "parallel.tensor=0"], "parallel.tensor=0: an axis has 1 or more devices"),
        (["--gpus", 0], "gpus=0: 1 to 8, or whole hosts of 8; use 1"),
        (["--gpus", 10**9, "--choose"], "gpus=1000000000: there are not so many"),
        (["--gpu", ""], "gpu='' is unknown"),
        (["parallel.data=-1"], "parallel.data=-1 takes whatever devices remain"),
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
        (["--write", "/proc/none"], "/proc/none"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message, capsys):
    assert run("--config", ROOT / "configs/llama3_8b.yaml", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_fits_nowhere_is_told_by_how_much_and_what_would_help():
    config = plan.neutral(request.load(ROOT / "configs/llama3_70b.yaml"), None)
    found = search.search(config, "h100", 8)
    assert not found.best
    text = search.why_nothing_fits(found, "h100", 8, 0.75, {})
    assert re.search(r"needs \d+\.\d GB of 63\.7, most of it .*; what would do: .*GPUs \(", text)


def test_to_compile_without_the_cuda_compiler_is_a_wrong_request(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(topology, "entry_points", lambda **_: [])
    assert run("--config", ROOT / "configs/gpt2_124m.yaml", "--compile", "--json", tmp_path / "plan.json") == 2
    message = "cannot compile for h100: the CUDA compiler is not installed; pip install 'nanotrain_jax[cuda12]'"
    assert capsys.readouterr() == ("", f"error: {message}\n")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_told_in_one_line_and_ends_with_1(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED:\n  out of memory")

    monkeypatch.setattr(plan.topology, "check_compiler", lambda gpu: None)
    monkeypatch.setattr(plan.compiler, "compile_step", fails)
    monkeypatch.setattr(plan.meshes, "configure", lambda **_: None)
    assert run("--config", ROOT / "configs/gpt2_124m.yaml", "--compile") == 1
    assert capsys.readouterr().err == "error: cannot be compiled: RESOURCE_EXHAUSTED: out of memory\n"


def cluster(name):
    """What the first line of a config says it is for: -> number, kind of GPU."""
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


@needs_cuda_compiler
@pytest.mark.parametrize("name", [name for name in CONFIGS if cluster(name)[1] != "cpu"])
def test_every_config_is_planned_and_compiled_for_the_cluster_of_its_first_line(name, tmp_path):
    ratios = planned_and_compiled(name, tmp_path)["ratios"]
    assert ratios["peak_bytes"] == pytest.approx(1, abs=0.1)
    assert ratios["wire_bytes"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", [name for name in CONFIGS if cluster(name)[1] == "cpu"])
def test_configs_for_a_laptop_are_planned_and_compiled_for_its_simulated_devices(name, tmp_path):
    planned_and_compiled(name, tmp_path)


@needs_cuda_compiler
def test_compiling_what_does_not_fit_ends_with_1(capsys):
    arguments = "--config", ROOT / "configs/gpt2_124m.yaml", "--compile", "--memory-fraction", 0.05
    done = subprocess.run(
        [sys.executable, "-m", "nanotrain_jax.plan", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "does not fit" in done.stdout and "(compiled)" in done.stdout


def test_what_is_held_makes_no_other_sense_of_it(tmp_path, capsys):
    """Chunks mean stages; what cannot go with the layout that was found is not written."""
    config, won = ROOT / "configs/llama3_8b.yaml", tmp_path / "won.yaml"
    held = search.search(small(), "h100", 8, fixed={"parallel.chunks": 2}).best
    assert {(e.config.parallel.schedule, e.config.parallel.chunks) for e in held} == {("interleaved", 2)}
    tree = yaml.safe_load(config.read_text())
    tree["parallel"] |= {"prefetch": True, "microbatches": 1}
    ahead = tmp_path / "ahead.yaml"
    ahead.write_text(yaml.safe_dump(tree))
    assert run("--config", ahead, "--gpus", 8, "--choose", "--write", won) == 0
    assert run("--config", won) == 0
    assert not request.load(won).parallel.prefetch
    assert (
        run("--config", config, "--gpus", 8, "--choose", "memory.remat=block:4", "parallel.pipe=2", "--write", won) == 0
    )
    assert run("--config", won) == 0
    assert (
        run("--config", ROOT / "configs/quickstart.yaml", "--gpu", "h100", "--gpus", 8, "--choose", "--write", won) == 0
    )
    assert run("--config", won) == 0
    assert request.load(won).runtime.simulate == 0
