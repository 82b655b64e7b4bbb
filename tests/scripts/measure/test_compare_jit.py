"""compare_jit.py: the programs under plain `jax.jit` have the losses, state and shardings of our step."""

import importlib.util
import json
import math
import sys
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import yaml
from conftest import LOSS, ROOT, STATE, cover, exit_code, on_devices, random_tokens, resolved, small

SCRIPT = ROOT / "scripts" / "measure" / "compare_jit.py"
sys.path.insert(0, str(SCRIPT.parent))  # scripts import each other
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
compare_jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_jit)


def two_microbatches(family="llama", zero=3, **axes):
    """A config so small that the script's own check runs the same programs, compiled by the first test."""
    return small(
        family,
        model={"d_ff": 128, "vocab_size": 128, "attention": "xla"},
        parallel={"data": 8 // math.prod(axes.values()), **axes, "zero": zero, "microbatches": 2, "persist_below": 256}
        | {"context_attention": "gather"},
        optimizer={"grad_clip": 0.5},
        runtime={"simulate": 8},
    )


LONG = [
    (1, "llama", "pipe context"),
    (2, "llama", "tensor"),
    (0, "gpt2", ""),
    (0, "gpt2", "pipe tensor"),
    (3, "llama", "context tensor"),
]


@pytest.fixture(autouse=True)
def float32_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("case", cover([], [(3, "llama", ""), *LONG]))
def test_programs_under_jit_equal_ours(case):
    zero, family, axes = case
    config, mesh = resolved(two_microbatches(family, zero, **dict.fromkeys(axes.split(), 2)))
    step, programs = compare_jit.programs(config, mesh)
    states, losses = {name: step.init() for name in programs}, {name: [] for name in programs}
    for tokens in random_tokens(config, count=3):
        for name, train in programs.items():
            ordered = step if name == "ours" else step._replace(token_order=None)
            states[name], metrics, *_ = train(states[name], on_devices(tokens, ordered))
            losses[name].append(float(metrics["loss"]))
    for name in ("jit", "jit + constraints"):
        np.testing.assert_allclose(losses[name], losses["ours"], **LOSS)
        chex.assert_trees_all_close(states[name], states["ours"], **STATE)
        chex.assert_trees_all_equal_shapes_and_dtypes(states[name], states["ours"])
        assert jax.tree.map(lambda x: x.sharding, states[name]) == jax.tree.map(lambda x: x.sharding, step.state)


@pytest.mark.parametrize("other", [4.0001, float("nan")])
def test_programs_with_different_losses_are_not_compared(other, monkeypatch):
    config, mesh = resolved(two_microbatches())
    step, _ = compare_jit.programs(config, mesh)

    def train(loss):
        return lambda state, batch: (state, {"loss": loss})

    monkeypatch.setattr(compare_jit, "random_batches", lambda config, step: dict.fromkeys(programs))
    programs = {"ours": train(4.0), "jit": train(4.00001), "jit + constraints": train(other)}
    monkeypatch.setattr(compare_jit, "programs", lambda *_: (step._replace(init=lambda: None), programs))
    with pytest.raises(ValueError, match="compute different losses"):
        compare_jit.check(config)
    programs["jit + constraints"] = train(4.00001)
    compare_jit.check(config)


def test_replica_groups_along_axes_are_numbered():
    text = "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, replica_groups={{0,1}}"
    groups = "{{0,4},{1,5},{2,6},{3,7}}"
    assert compare_jit.with_numbered_groups(text) == f"replica_groups={groups}, replica_groups={{{{0,1}}}}"
    text = "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'c'}"  # of devices 0 2 4 6 1 3 5 7
    assert compare_jit.with_numbered_groups(text) == "replica_groups={{0,2,4,6},{1,3,5,7}}"
    with pytest.raises(ValueError, match="parts of axes"):
        compare_jit.with_numbered_groups("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}")


def program(groups):
    """A stand-in for a compiled program with one all-reduce of 32 bytes."""
    text = (
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %r = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%none\n}}\n\n"
        "%none (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n}\n"
    )
    memory = SimpleNamespace(
        argument_size_in_bytes=1,
        temp_size_in_bytes=2,
        peak_memory_in_bytes=3,
        host_argument_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        host_output_size_in_bytes=0,
        host_alias_size_in_bytes=0,
    )
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)


def test_groups_along_a_part_of_an_axis_are_counted():
    text = program("{{0,4},{1,5},{2,6},{3,7}}").as_text()
    (found,) = compare_jit.collectives(text, {"pipe": 4, "data": 2}, {})
    assert (found.axes, found.bytes) == (("pipe",), 32)


def test_failed_compilation_and_unknown_groups_give_notes(monkeypatch):
    config, mesh = resolved(two_microbatches())
    outcomes = [program("{{0,1,2,3,4,5,6,7}}"), jax.errors.JaxRuntimeError("no kernel"), program("{{0,1,2},{3,4,5}}")]
    outcomes += [program("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}")] * 3

    def compiled(train, step):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, 1.0

    monkeypatch.setattr(compare_jit, "compiled", compiled)
    rows = compare_jit.audit(config.replace("model", attention="auto"), mesh)
    assert [row["wire_bytes"] for row in rows] == [56, None, None, 56, 56, 56]
    assert [row["peak_bytes"] for row in rows] == [3, None, 3, 3, 3, 3]
    assert "xla attention: no kernel" in rows[1]["notes"][0]
    assert "n/a: replica group [0, 1, 2]" in rows[2]["notes"][0]
    assert [row["program"].endswith(" (xla attention)") for row in rows] == [False] * 3 + [True] * 3
    assert list(compare_jit.show(rows, "").columns[2].cells) == [
        *("0.0", "n/a", "n/a", "n/a"),
        *("0.0", "0.0", "0.0", "n/a"),
    ]


@pytest.mark.long
def test_the_script_prints_a_table_and_one_json_line(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(two_microbatches()))
    assert compare_jit.main(["--config", f"{tmp_path}/x.yaml", "--stages", "3", "--steps", "2"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert "ratio to ours" in "\n".join(table)
    assert "noisy: fewer than 30" in "\n".join(table)
    printed = json.loads(line)
    assert printed["devices"] == 8
    assert [row["program"] for row in printed["rows"]] == ["ours", "jit", "jit + constraints"]
    assert all(row["step_seconds"] >= row["step_seconds_min"] > 0 for row in printed["rows"])
    assert printed["rows"][0]["ratio_to_ours"] == 1


@pytest.mark.parametrize("wrong", [["--stages", "0,4"], ["--steps", "0"], ["--gpu", "h1000"], ["model.layers=3"]])
def test_a_wrong_request_is_one_line_and_exit_code_2(tmp_path, capsys, wrong):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(runtime={"simulate": 8})))
    assert exit_code(compare_jit.main, ["--config", f"{tmp_path}/x.yaml", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
