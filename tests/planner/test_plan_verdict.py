"""The planner's verdict (fits, may not fit, does not fit), and its hint at a much faster layout."""

import json
import re

import jax
import pytest
import yaml
from conftest import LAYOUTS, cover, needs_cuda_compiler
from planning import ROOT, run, small

from nanotrain_jax import plan
from nanotrain_jax.config import load
from nanotrain_jax.costs import flops, hardware, memory
from nanotrain_jax.parallel.pipeline import schedule, schedule_text
from nanotrain_jax.planner import choice, search
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import LARGE_MARGIN, MARGIN, estimate, margin
from nanotrain_jax.planner.report import page

LLAMA = ROOT / "configs/llama3_8b.yaml"
GPT3 = ROOT / "configs/gpt3_175b.yaml"


def peak_of(*overrides):
    """Return the estimated peak of Llama-3-8B on 8 H100s, as a fraction of the GPU's memory, and its margin."""
    config = plan.on_gpus(load.load(LLAMA, overrides), 8, "h100")
    return estimate(config, "h100").peak_bytes / hardware.find("h100").memory_bytes, margin(config)


@pytest.mark.parametrize(
    ("headroom", "code", "words"),  # in margins
    [(1.01, 0, "fits: "), (0.01, 3, "may not fit, compile it"), (-0.01, 1, "does not fit: ")],
)
def test_a_peak_near_the_limit_may_not_fit_and_exits_with_3(headroom, code, words, tmp_path, capsys):
    file, folder = tmp_path / "plan.json", tmp_path / "report"
    peak, fraction_of_peak = peak_of()
    fraction = (1 + headroom * fraction_of_peak) * peak
    assert run("--config", LLAMA, "--memory-fraction", fraction, "--json", file, "--report", folder) == code
    assert words in " ".join(capsys.readouterr().out.split())
    found = json.loads(file.read_text())
    assert (found["fits"], found["within_margin"]) == (code == 0, code == 3)
    assert found["estimate"]["margin_bytes"] == pytest.approx(fraction_of_peak * found["estimate"]["peak_bytes"])
    verdict = re.search(r'<p class="verdict (\w+)"><b>. ([a-z ]+)</b>', (folder / "index.html").read_text()).groups()
    assert (
        verdict
        == {
            0: ("good", "fits"),
            3: ("maybe", "may not fit"),
            1: ("bad", "does not fit"),
        }[code]
    )


def test_stored_attention_scores_have_a_larger_margin():
    assert margin(small()) == MARGIN < LARGE_MARGIN == margin(small().replace("model", attention="xla"))


def test_a_search_rejects_layouts_that_fit_only_without_the_margin():
    """Llama-3-8B with ZeRO 0 on 8 H100s: a layout estimated at 63.63 GB of 63.71 compiled to 63.73."""
    config = choice.neutral(load.load(LLAMA), None)
    found = search.search(config, "h100", 8, fixed={"parallel.zero": 0})
    assert found.best
    assert all(e.peak_bytes * (1 + MARGIN) <= e.limit_bytes for e in found.best)
    assert found.rejected[search.Rejection.MARGIN]


def test_a_search_returns_layouts_that_may_not_fit_if_no_others_do(capsys):
    config = choice.neutral(load.load(LLAMA), None)
    least = search.search(config, "h100", 8, 0.01).smallest
    fraction = 1.001 * least.peak_bytes / hardware.find("h100").memory_bytes
    found = search.search(config, "h100", 8, fraction)
    assert found.best
    assert all(e.verdict == "may not fit" for e in found.best)
    assert run("--config", LLAMA, "--choose", "--memory-fraction", fraction) == 3
    assert "may not fit, compile it (--compile)" in capsys.readouterr().out


def fake_compiler(monkeypatch, *ratios):
    """Make compile_step return these ratios of the estimate in turn; None raises. Return the configs it receives."""
    asked, answers = [], iter(ratios)

    def compile_step(config, gpu, memory_timeline=False):
        asked.append(config)
        ratio, e = next(answers), estimate(config, gpu)
        if ratio is None:
            raise RuntimeError("UNIMPLEMENTED")
        numbers = {"argument_bytes": 1, "flops": e.flops, "compile_seconds": 1.0, "jax": "0", "collectives": []}
        numbers["hbm"] = {"bytes": 1e9, "kernels": 1.0, "parts": []}
        return {"peak_bytes": ratio * e.peak_bytes, "host_copies": [], **numbers}

    monkeypatch.setattr(plan.compiler, "compile_step", compile_step)
    monkeypatch.setattr(plan.topology, "check_compiler", lambda gpu: None)
    monkeypatch.setattr(plan.meshes, "configure", lambda **_: None)
    return asked


def test_choose_and_compile_tries_candidates_until_one_fits(monkeypatch, tmp_path, capsys):
    asked = fake_compiler(monkeypatch, 2.0, None, 1.01)
    file, chosen_yaml, folder = tmp_path / "plan.json", tmp_path / "chosen.yaml", tmp_path / "report"
    outputs = "--json", file, "--write", chosen_yaml, "--report", folder
    assert run("--config", LLAMA, "--choose", "--compile", *outputs) == 0
    best = search.search(choice.neutral(load.load(LLAMA), None), "h100", 8).best
    assert [c.parallel for c in asked] == [e.config.parallel for e in best[:3]]
    out = " ".join(capsys.readouterr().out.split())
    assert f"does not fit as compiled: {2 * best[0].peak_bytes / 1e9:,.2f} GB" in out
    assert f"compilation failed: {search.describe(best[1].config)}" in out
    found = json.loads(file.read_text())
    assert (found["mesh"], found["fits"], found["within_margin"]) == (best[2].config.parallel.axes, True, False)
    assert [row["mesh"] for row in found["compiled_too_large"]] == [best[0].config.parallel.axes]
    assert found["compiled"]["peak_bytes"] == pytest.approx(1.01 * best[2].peak_bytes)
    assert load.load(chosen_yaml).parallel.tensor == best[2].config.parallel.tensor
    assert page._mesh(best[2]) in (folder / "index.html").read_text()


def test_a_compiled_step_that_does_not_fit_exits_with_1(monkeypatch, capsys):
    fake_compiler(monkeypatch, 1.01)
    assert run("--config", LLAMA, "--compile", "--memory-fraction", peak_of()[0]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in out and "(compiled)" in out


def test_choose_and_compile_exits_with_1_if_no_candidate_fits(monkeypatch, tmp_path, capsys):
    count = len(search.search(choice.neutral(load.load(LLAMA), None), "h100", 8).best)
    asked = fake_compiler(monkeypatch, *[3.0] * count)
    file = tmp_path / "plan.json"
    assert run("--config", LLAMA, "--choose", "--compile", "--json", file) == 1
    assert len(asked) == count
    found = json.loads(file.read_text())
    assert found["compiled"]["peak_bytes"] == min(row["compiled_peak_bytes"] for row in found["compiled_too_large"])
    assert "no candidates left" in capsys.readouterr().out


SLOW = LAYOUTS["llama3_8b"]


def test_a_much_slower_layout_prints_the_faster_one_in_one_line(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert run("--config", LLAMA, "--json", file, *SLOW[2:]) == 0  # the search keeps overrides
    assert "--choose" not in capsys.readouterr().out
    tree = yaml.safe_load(LLAMA.read_text())
    tree["memory"]["remat"], tree["parallel"]["microbatches"] = "full", 1
    slow = tmp_path / "slow.yaml"
    slow.write_text(yaml.safe_dump(tree))
    assert run("--config", slow, "--json", file) == 0
    found = json.loads(file.read_text())
    less = 1 - found["better"]["step_seconds"] / found["estimate"]["step_seconds"]
    assert less > 0.1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--choose finds ")]
    assert len(lines) == 1
    assert re.fullmatch(rf"--choose finds data 8, ZeRO 3, .*: modelled [\d.]+ s, {less:.0%} less", lines[0])
    assert run("--config", slow, "--choose", "--json", file) == 0
    assert json.loads(file.read_text())["estimate"]["step_seconds"] == found["better"]["step_seconds"]


@pytest.mark.parametrize("name", cover(["gpt2_124m", "llama3_8b", "llama3_8b_1gpu"], ["llama3_70b"]))
def test_our_configs_are_not_much_slower_than_the_chosen_layout(name, capsys):
    assert run("--config", ROOT / f"configs/{name}.yaml") == 0
    assert "--choose finds" not in capsys.readouterr().out


def test_a_search_stops_at_its_limit_and_is_incomplete():
    config = choice.neutral(load.load(LLAMA), None)
    assert search.search(config, "h100", 8).complete
    few = search.search(config, "h100", 8, most=50)
    assert (few.complete, 50 < few.tried < 100) == (False, True)


@pytest.mark.long
def test_a_search_with_a_very_large_batch_terminates():
    config = small(batch=2**18)
    found = search.search(config, "h100", 8, fixed={"parallel.tensor": 1, "parallel.zero": 1})
    assert found.best
    assert found.rejected["more than 1,048,576 entries (ticks x stages) in a schedule"]


def test_a_search_builds_each_schedule_once(monkeypatch):
    """Building tables took most of a minute for GPT-3 175B on 128 GPUs with 1,536 sequences."""
    made, make = [], schedule_text.make
    for module in (schedule_text, schedule):
        monkeypatch.setattr(module, "make", lambda *key: made.append(key) or make(*key))
    schedule_text.outline.cache_clear()
    config = choice.neutral(load.load(GPT3, ["data.batch_size=192"]), None)
    assert search.search(config, "h100", 128, fixed={"parallel.zero": 1}).tried > 1000
    assert len(made) == len(set(made)) > 100


def test_the_search_chunks_the_loss_to_fit():
    """A large vocabulary and a small model: logits take most of the memory."""
    config = small(batch=64).replace("model", vocab_size=262144, tie_embeddings=True, kernels="xla")
    fraction, fixed = 0.05, {"parallel.data": 8, "parallel.microbatches": 1}
    best = search.search(config, "h100", 8, fraction, fixed).best[0]
    assert best.config.model.loss_chunk == 2048
    assert "loss_chunk=2048" in search.describe(best.config)
    assert sum(memory.peak(best.config)[1].values()) == best.peak_bytes
    whole = search.search(config, "h100", 8, fraction, fixed | {"model.loss_chunk": 0})
    assert not whole.best
    advice = search.why_nothing_fits(whole, "h100", 8, fraction, fixed | {"model.loss_chunk": 0})
    assert f"would fit with model.loss_chunk=2048 ({best.peak_bytes / 1e9:.1f} GB)" in advice
    chunked = search.search(config, "h100", 8, fraction, fixed | {"model.loss_chunk": 1024}).best
    assert {e.config.model.loss_chunk for e in chunked} == {1024}


def test_the_chosen_loss_chunk_is_written(tmp_path):
    chosen_yaml, again = tmp_path / "chosen.yaml", tmp_path / "again.json"
    config, fraction = ROOT / "configs/llama3_8b_1gpu.yaml", ["--memory-fraction", 0.68]
    assert run("--config", config, "--choose", "--gpus", 1, *fraction, "--write", chosen_yaml) == 0
    assert run("--config", chosen_yaml, "--json", again) == 0
    assert json.loads(again.read_text())["loss_chunk"] == load.load(chosen_yaml).model.loss_chunk == 2048


def test_mfu_is_printed_in_both_conventions(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert run("--config", LLAMA, "--json", file) == 0
    found = json.loads(file.read_text())["estimate"]
    config = plan.on_gpus(load.load(LLAMA), 8, "h100")
    per_token = flops.flops_per_token(config)
    peak = hardware.find("h100").peak_flops * 8 / found["tokens_per_second"]
    assert found["mfu"] == pytest.approx(per_token["full"] / peak)
    assert found["mfu_causal"] == pytest.approx(per_token["causal"] / peak)
    text = f"MFU {found['mfu']:.1%} ({found['mfu_causal']:.1%} with causal attention FLOPs)"
    assert text in " ".join(capsys.readouterr().out.split())


def figures(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


@pytest.fixture
def restored_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "GPUS", dict(hardware.GPUS))


def test_a_gpu_from_a_file_of_figures(tmp_path, restored_gpus):
    file, plain = tmp_path / "mine.json", tmp_path / "h100.json"
    mine = figures(tmp_path, "like: h100\nkind: H100 at half speed\npeak_flops: 494.5e12\nmemory_bytes: 160e9\n")
    assert run("--config", LLAMA, "--gpu", mine, "--gpus", 8, "--json", file) == 0
    assert run("--config", LLAMA, "--gpu", "h100", "--gpus", 8, "--json", plain) == 0
    found, other = (json.loads(f.read_text()) for f in (file, plain))
    assert (found["gpu"], found["estimate"]["limit_bytes"]) == ("mine", 0.75 * 160e9)
    assert 1.5 < found["estimate"]["seconds"]["compute"] / other["estimate"]["seconds"]["compute"] <= 2
    assert found["estimate"]["peak_bytes"] == other["estimate"]["peak_bytes"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: h100\nmemory: 80e9\n", "gpu file mine: unknown figure memory; did you mean memory_bytes?"),
        ("like: h100\nmatmul: 1.5\n", "gpu file mine: matmul=1.5: must be a number above 0, at most 1"),
        ("like: h100\nnvlink: fast\n", "gpu file mine: nvlink='fast': must be a number above 0"),
        ("like: h100\nhost: 2.5\n", "gpu file mine: host=2.5: must be a whole number"),
        ("like: h1\n", "gpu='h1' is unknown; use a100-40"),
        ("like: [h100]\n", "gpu=\"['h100']\" is unknown; use a100-40"),
        ("peak_flops: 1e15\n", "gpu file mine: kind, matmul, memory_bytes, "),
        ("- 1\n", "mine.yaml is a list; write a mapping"),
    ],
)
def test_an_invalid_file_of_figures_is_one_line(text, message, tmp_path, capsys, restored_gpus):
    assert run("--config", LLAMA, "--gpu", figures(tmp_path, text)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_report_names_config_command_and_versions(tmp_path):
    assert run("--config", LLAMA, "--gpus", 8, "--report", tmp_path, "data.seed=1") == 0
    text = (tmp_path / "index.html").read_text()
    assert (
        f"<code>python -m nanotrain_jax.plan --config {LLAMA} --gpus 8 --report {tmp_path} data.seed=1</code>" in text
    )
    assert f"Config {LLAMA}." in text
    assert re.search(r"nanotrain_jax [^,]+, jax [\d.]+, \d{4}-\d\d-\d\d \d\d:\d\d", text)


# First choices of the planner, often near the memory limit: each must fit as compiled. For the first five an earlier
# search chose layouts that were estimated to fit and did not fit as compiled.
CHOICES = [  # config, GPU, GPUs, overrides
    ("llama3_8b", "h100", 1, ["memory.offload_optimizer=host", "memory.offload_params=host"]),
]
MORE_CHOICES = [
    ("llama3_8b", "h100", 8, ["parallel.zero=0"]),
    ("gpt3_175b", "h100", 128, []),
    ("gpt3_175b", "h100", 512, []),
    ("llama3_8b", "h100", 8, ["data.batch_size=512"]),
    ("llama3_8b_1gpu", "h100", 1, []),
    ("llama3_8b", "h100", 8, []),
    ("llama3_8b", "h100", 16, ["data.batch_size=32"]),
    ("llama3_8b", "h100", 64, ["data.batch_size=128"]),
    ("llama3_8b", "h100", 8, ["data.batch_size=64", "memory.remat=full"]),
    ("llama3_8b", "a100-80", 8, []),
    ("llama3_8b", "b200", 8, ["data.batch_size=64"]),
    ("llama3_70b", "h100", 64, []),
    ("llama3_70b", "h100", 128, ["data.batch_size=128"]),
    ("llama3_70b", "h100", 256, ["data.batch_size=256"]),
    ("llama3_70b", "h200", 64, []),
    ("gpt3_175b", "h100", 1024, []),
    ("gpt2_124m", "h100", 8, []),
]


def name(case):
    return " ".join(map(str, [*case[:3], *case[3]]))


def chosen(config, gpu, gpus, overrides):
    """Return the planner's first choice."""
    loaded = load.load(ROOT / "configs" / f"{config}.yaml", overrides)
    fixed = choice.keys(load.nested(overrides))
    return search.search(choice.neutral(loaded, choice.vocabulary(loaded)), gpu, gpus, fixed=fixed).best[0]


@needs_cuda_compiler
@pytest.mark.parametrize("case", cover(CHOICES, MORE_CHOICES, name))
def test_a_first_choice_fits_as_compiled(case):
    e = chosen(*case)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of users
        peak = compile_step(e.config, case[1])["peak_bytes"]
    assert e.verdict == "fits"
    assert peak <= e.limit_bytes, f"{e.peak_bytes / 1e9:.2f} estimated, {peak / 1e9:.2f} compiled"
