"""The real step compiled for GPUs, against the closed forms and golden numbers.

PYTHONPATH=tests python tests/audit/test_audit.py [WORD ...]

compiles the cases whose name contains a word, or all, and writes golden/audit.json.

Wire bytes, FLOPs and argument bytes are the same with every compiler; peak memory is stored per compiler version.
Estimates are computed in every test.
"""

import collections
import importlib.util
import itertools
import json
import sys

import guides
import jax
import pytest
from conftest import LAYOUTS, ROOT, cover, needs_cuda_compiler
from jax.extend.core import jaxprs_in_params

from nanotrain_jax.audit import topology
from nanotrain_jax.config import load as request
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import activations, communication, memory
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner import search
from nanotrain_jax.planner.estimate import estimate, margin, on_gpus
from nanotrain_jax.planner.overlap import last_hop
from nanotrain_jax.step import build as steps

JAX, NEWEST = "{}.{}".format(*jax.__version_info__), "0.12"
GOLDEN = ROOT / "tests" / "golden" / "audit.json"
spec = importlib.util.spec_from_file_location("audit_script", ROOT / "scripts" / "audit.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

GPT2, LLAMA, LLAMA70, GPT3 = "gpt2_124m", "llama3_8b", "llama3_70b", "gpt3_175b"
LLAMA_128K, LLAMA_1M = "llama3_8b_128k", "llama3_8b_1m"
PIECES = "parallel.microbatches=4", "memory.remat=selective"
STAGES = ["parallel.pipe=4", "parallel.data=2", "parallel.microbatches=16", "data.batch_size=256"]
EIGHT = ["parallel.pipe=4", "parallel.data=2", "parallel.zero=1", "memory.remat=full", "data.seq_len=4096"]
EIGHT += ["parallel.microbatches=8", "data.batch_size=16"]
ON_LAST_STAGE, UNEVEN = "parallel.vocab_over_pipe=false", "model.num_layers=30"
INTERLEAVED = "parallel.schedule=interleaved", "parallel.chunks=8"
TRILLION = ["model.num_layers=128", "model.d_model=25600", "model.num_heads=160", "parallel.pipe=64", "parallel.data=6"]
TRILLION += ["parallel.microbatches=512", "data.batch_size=3072"]  # arXiv 2104.04473, table 1
ZERO3 = ["parallel.zero=3", "parallel.microbatches=12", "memory.remat=full"]
CASES = [  # config, GPUs, overrides
    *((GPT2, 8, [f"parallel.zero={zero}", "parallel.microbatches=4"]) for zero in range(4)),
    (GPT2, 8, [*STAGES, "parallel.schedule=zb_h1", "memory.remat=none"]),
    (LLAMA, 8, ["parallel.zero=3"]),
    (LLAMA, 8, ["parallel.tensor=8", "parallel.data=1", "data.batch_size=1", "memory.remat=full"]),
    (LLAMA, 64, ["parallel.tensor=8", "parallel.data=8", "parallel.zero=1", "parallel.microbatches=2"]),
    (LLAMA, 8, ["parallel.pipe=2", "parallel.tensor=2", "parallel.data=2", "data.batch_size=8", *PIECES]),
    (LLAMA, 8, EIGHT),
    (LLAMA, 8, ["data.attend_across_documents=false"]),
    (LLAMA_128K, 8, []),
    (LLAMA_128K, 8, ["parallel.context_attention=ulysses", "memory.remat=selective", "data.seq_len=65536"]),
    (LLAMA_1M, 64, []),
    (GPT3, 1024, ["memory.remat=none"]),
    (GPT3, 1024, ["parallel.schedule=zero_bubble"]),
]
MORE = [  # in `pytest -m 'cuda_compiler and long'`
    (GPT2, 8, ["parallel.zero=3", "memory.remat=full", "model.loss_chunk=2048"]),
    *((LLAMA, 8, [f"parallel.zero={zero}"]) for zero in (1, 2)),
    (LLAMA70, 64, []),
    (GPT3, 1024, ["parallel.schedule=interleaved", "parallel.chunks=2"]),
    *((GPT2, 8, [f"parallel.zero={zero}", "parallel.microbatches=1"]) for zero in (0, 1)),
    *((GPT2, 8, ["parallel.zero=3", f"memory.remat={remat}"]) for remat in ("selective", "full", "block:3")),
    (GPT2, 8, ["parallel.zero=0", "parallel.grad_reduce=per_layer"]),
    (GPT2, 8, ["parallel.zero=1", "parallel.grad_reduce=per_layer", "precision.grad_reduce=bfloat16"]),
    (GPT2, 16, ["parallel.zero=3", "parallel.data=8", "parallel.replica=2"]),
    (GPT2, 64, ["parallel.zero=3"]),
    *(
        (GPT2, 8, [*STAGES, f"parallel.schedule={schedule}", f"memory.remat={remat}"])
        for schedule, remat in (
            ("gpipe", "none"), ("1f1b_lean", "none"), ("zb_h2", "selective"), ("zero_bubble", "full"),
        )
    ),
    (LLAMA, 64, ["parallel.zero=1"]),
    (LLAMA, 1024, ["parallel.data=8", "parallel.replica=128", "data.batch_size=1024", "memory.remat=selective"]),
    *((LLAMA, 8, ["data.batch_size=8", f"memory.remat={remat}"]) for remat in ("none", "selective", "full")),
    (LLAMA, 8, ["data.batch_size=8", "memory.remat=full", "model.loss_chunk=1024"]),
    (LLAMA, 8, ["data.batch_size=16", "parallel.microbatches=2", "data.seq_len=1024"]),  # the peak is the embedding's
    *(
        (LLAMA, 8, [f"parallel.tensor={t}", f"parallel.data={8 // t}", f"data.batch_size={8 // t}", *more])
        for t, more in (
            (2, ["memory.remat=none"]),
            (4, ["memory.remat=none", "parallel.zero=2"]),
            (8, ["memory.remat=none"]),
            (8, ["memory.remat=none", "parallel.sequence_parallel=false"]),
        )
    ),
    (LLAMA_128K, 8, ["parallel.context_attention=gather"]),
    (LLAMA_128K, 8, ["parallel.context=4", "parallel.tensor=2", "memory.remat=block:2"]),
    (LLAMA_128K, 8, ["parallel.context=2", "parallel.data=4", "data.batch_size=32", "data.seq_len=32768"]),
    *((LLAMA, 8, [*EIGHT, *more]) for more in ([ON_LAST_STAGE], INTERLEAVED, [UNEVEN], [UNEVEN, ON_LAST_STAGE])),
    (LLAMA70, 64, ["parallel.tensor=1", "parallel.data=64", "parallel.zero=3", "parallel.microbatches=1"]),
    (GPT2, 8, ["model.attention=xla", "data.batch_size=64"]),
    (LLAMA, 8, ["precision.compute=float32", "data.seq_len=2048", "data.batch_size=8", "memory.remat=selective"]),
    *((GPT3, 1024, [f"memory.remat={remat}"]) for remat in ("selective", "full")),
    (GPT3, 1024, ["memory.remat=none", ON_LAST_STAGE]),
    (GPT3, 1024, ["parallel.schedule=zero_bubble", "parallel.chunks=6"]),
    (GPT3, 1024, ["parallel.pipe=1", "parallel.data=128", *ZERO3]),
    (GPT3, 3072, [*TRILLION, "memory.remat=full"]),
]  # fmt: skip
LATER = [  # of CASES, not in the default run: each stage of ZeRO, axis, schedule and remat is in others of it,
    # and attention within documents in tests/step/test_documents.py
    *((GPT2, 8, [f"parallel.zero={zero}", "parallel.microbatches=4"]) for zero in (0, 1, 3)),
    (LLAMA, 8, ["parallel.tensor=8", "parallel.data=1", "data.batch_size=1", "memory.remat=full"]),
    (LLAMA, 8, EIGHT),
    (LLAMA, 8, ["data.attend_across_documents=false"]),
    (LLAMA_128K, 8, []),
    (LLAMA_128K, 8, ["parallel.context_attention=ulysses", "memory.remat=selective", "data.seq_len=65536"]),
    (LLAMA_1M, 64, []),
    (GPT3, 1024, ["memory.remat=none"]),
]
BLACKWELL = (GPT2, 16, ["parallel.data=16", "parallel.zero=1", "parallel.microbatches=1", "data.batch_size=512"])
TOO_LARGE = (LLAMA, 8, ["parallel.zero=0"])  # 112 GB of state: compiled for a larger GPU


def golden_rows():
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def name(case):
    config, gpus, overrides = case
    return " ".join([config, str(gpus), *(o.split(".")[1] for o in overrides)])


def load(case):
    config, _, overrides = case
    return request.load(str(ROOT / "configs" / f"{config}.yaml"), [*LAYOUTS.get(config, []), *overrides])


def gpu_of(case):
    return "b200" if case in (TOO_LARGE, BLACKWELL) else "h100"


def compile_case(case):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of users
        return script.audit(load(case), gpu_of(case), case[1])


def estimated(case):
    return estimate(on_gpus(load(case), case[1], gpu_of(case)), gpu_of(case))


def row(audit):
    return {key: round(audit["compiled"][key]) for key in ("wire_bytes", "argument_bytes", "flops", "peak_bytes")}


@needs_cuda_compiler
@pytest.mark.parametrize(
    "case", cover([case for case in CASES if case not in LATER], [*LATER, *MORE, TOO_LARGE, BLACKWELL], name)
)
def test_the_compiled_step_matches_the_estimate(case):
    audit, golden = compile_case(case), golden_rows()[name(case)]
    assert_wire_bytes_match_on_each_axis(audit, estimated(case).config)
    ratios, found = audit["ratios"], row(audit)
    assert 0.9999 <= ratios["wire_bytes"] <= 1.01
    assert 0.98 <= ratios["argument_bytes"] <= 1.02
    assert 0.99 <= ratios["flops"] <= 1.01
    assert 0.9 <= ratios["peak_bytes"] <= 1.05
    for key in ("wire_bytes", "flops", "argument_bytes"):
        assert found[key] == pytest.approx(golden[key], rel=1e-3)
    if JAX in golden["peak_bytes"]:
        assert found["peak_bytes"] == pytest.approx(golden["peak_bytes"][JAX], rel=0.01)
    elif NEWEST in golden["peak_bytes"]:  # a newer compiler may need less
        assert found["peak_bytes"] <= 1.05 * golden["peak_bytes"][NEWEST]


def assert_wire_bytes_match_on_each_axis(audit, config):
    is_ring = config.parallel.is_blockwise and config.parallel.context_attention == "ring"
    theory = collections.Counter()
    for c in audit["estimate"]["collectives"]:
        theory[c["axis"], c["op"]] += c["bytes_per_device"]
    for c in audit["compiled"]["collectives"]:
        expected = theory.pop((c["axis"], c["op"]), 0)
        scalars = 100  # the loss and the global norm
        assert 0.9999 * expected <= c["bytes_per_device"] <= 1.01 * expected + scalars, c
        if c["op"] == "permute":  # sends between stages overlap with compute; hops do, but for the last one
            exposed = last_hop(config) * c["bytes_per_device"] if is_ring else 0.0
            assert c["behind_matmuls_bytes"] >= c["bytes_per_device"] - exposed - 1
    assert not theory


def residuals_of_a_layer(config, gpus):
    """Return the bytes per token that the traced step stores from the forward of a layer to its backward: of arrays
    with tokens, not the biases that kernels take again."""
    mesh = meshes.make(**config.parallel.axes, devices=topology.compile_only("h100", gpus))
    config = resolve(config, mesh.shape).replace("model", unroll=False)
    step = steps.build(config, mesh)

    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)

    L = config.model.num_layers
    jaxpr = step.train.trace(step.state, step.batch).jaxpr.jaxpr
    forward = next(e for e in equations(jaxpr) if e.primitive.name == "scan" and e.params["length"] == L)
    stacked = [x.aval for x in forward.outvars if x.aval.shape[:1] == (L,) and x.aval.ndim > 2]
    sequences = config.data.batch_size // (config.parallel.data * config.parallel.microbatches)
    return sum(x.size * x.dtype.itemsize for x in stacked) / L / (sequences * config.data.seq_len), config


STORED = [(GPT2, 3, "true"), (LLAMA, 0, "false")]


@needs_cuda_compiler
@pytest.mark.parametrize(
    "case",
    cover(
        STORED,
        [case for case in itertools.product([GPT2, LLAMA], [0, 3], ["true", "false"]) if case not in STORED],
    ),
)
def test_a_layer_stores_exactly_the_activations_of_the_closed_form(case):
    name, zero, sequence_parallel = case
    for t in (1, 2, 4):
        for remat in ("none", "selective", "full"):
            overrides = [f"parallel.tensor={t}", "parallel.data=1", "parallel.microbatches=1", f"parallel.zero={zero}"]
            overrides += [
                "data.batch_size=2",
                f"memory.remat={remat}",
                f"parallel.sequence_parallel={sequence_parallel}",
            ]
            found, config = residuals_of_a_layer(request.load(str(ROOT / "configs" / f"{name}.yaml"), overrides), t)
            policy = config.memory.rematerialization
            assert found == 2 * activations.layer_activations(config, policy)
            if sequence_parallel == "true":  # all of it over t
                assert found == 2 * activations.layer_activations(config.replace("parallel", tensor=1), policy) / t


@needs_cuda_compiler
@pytest.mark.parametrize(("zero", "remat"), [(0, "none"), (0, "selective"), (3, "none")])
def test_a_layer_with_norms_of_heads_stores_exactly_those_of_the_closed_form(zero, remat):
    overrides = ["model.family=qwen3", "model.head_dim=64", "parallel.tensor=4", "parallel.data=1", "data.batch_size=2"]
    overrides += ["parallel.microbatches=1", f"parallel.zero={zero}", f"memory.remat={remat}"]
    found, config = residuals_of_a_layer(request.load(str(ROOT / "configs" / f"{LLAMA}.yaml"), overrides), 4)
    assert found == 2 * activations.layer_activations(config, config.memory.rematerialization)


@needs_cuda_compiler
@pytest.mark.parametrize(
    "layout",
    cover([], ["parallel.microbatches=8 parallel.pipe=4", "parallel.microbatches=1", "parallel.microbatches=4"]),
)
def test_prefetch_has_equal_bytes(layout):
    def audit(*overrides):
        keys = ["parallel.zero=3", "memory.remat=full", "parallel.data=-1", *layout.split(), *overrides]
        keys.append("model.tie_embeddings=false")  # the hand-written loop gathers tied ones at both ends
        compiled = script.audit(request.load(str(ROOT / "configs" / f"{GPT2}.yaml"), keys), "h100", 8)["compiled"]
        return compiled, next(row for row in compiled["collectives"] if row["op"] == "all_gather")

    (plain, gathered), (ahead, gathered_ahead) = audit(), audit("parallel.prefetch=true")
    assert gathered_ahead["bytes_per_device"] == gathered["bytes_per_device"]
    assert ahead["flops"] == plain["flops"]
    assert gathered_ahead["exposed_bytes"] < 0.01 * gathered["bytes_per_device"]
    # Of layers written out XLA hides some without prefetch, and in a stage half of them behind kernels without matmuls.
    assert gathered_ahead["behind_matmuls_bytes"] > 2 * gathered["behind_matmuls_bytes"]
    least = 0.2 if "pipe" in layout else 0.7
    assert gathered_ahead["behind_matmuls_bytes"] > least * gathered["bytes_per_device"]


@pytest.mark.long
@needs_cuda_compiler
def test_memory_of_a_device_falls_as_one_over_context():
    """But for a constant, that of the closed form: a gathered layer, the gradient of the head, a chunk of logits."""
    config, others = str(ROOT / "configs" / f"{LLAMA_128K}.yaml"), ["data.batch_size=2", "parallel.microbatches=2"]
    loaded = {c: request.load(config, [f"parallel.context={c}", *others]) for c in (8, 16, 32)}
    peaks = {c: script.audit(size, "h100", c)["compiled"]["peak_bytes"] for c, size in loaded.items()}
    falling, constant = _fitted(peaks)
    assert peaks[16] <= 1.03 * (constant + falling / 16)  # XLA may place buffers better, and need less
    estimates = {c: estimate(on_gpus(size, c, "h100"), "h100").peak_bytes for c, size in loaded.items()}
    assert constant == pytest.approx(_fitted(estimates)[1], abs=0.03 * peaks[8])


def _fitted(peaks):
    """Return a and b of the line a / context + b through the peaks at 8 and 32."""
    falling = (peaks[8] - peaks[32]) / (1 / 8 - 1 / 32)
    return falling, peaks[8] - falling / 8


@needs_cuda_compiler
def test_larger_buckets_mean_fewer_collectives_and_the_same_bytes():
    def gradients(bucket_mb):
        few = "model.num_layers=4", "parallel.zero=0", f"parallel.bucket_mb={bucket_mb}"
        loaded = request.load(str(ROOT / "configs" / f"{GPT2}.yaml"), list(few))
        (row,) = script.audit(loaded, "h100", 8)["compiled"]["collectives"]
        return row["count"], row["bytes_per_device"]

    counts, moved = zip(*map(gradients, (0, 25, 1000)), strict=True)
    assert counts[0] > counts[1] > counts[2] == 1
    assert len(set(moved)) == 1


def test_golden_wire_bytes_of_stages_0_and_1_do_not_depend_on_microbatches():
    golden = golden_rows()
    for zero in (0, 1):
        one, four = (golden[f"{GPT2} 8 zero={zero} microbatches={m}"]["wire_bytes"] for m in (1, 4))
        assert one == four


def test_golden_peaks_match_the_estimates():
    """On at least 30 configurations, with both compilers: at most 10% below, and at most the margin above."""
    golden, worst = golden_rows(), {}
    for case in [*CASES, TOO_LARGE, *MORE, BLACKWELL]:
        for version, size in golden[name(case)]["peak_bytes"].items():
            ratio, config = size / estimated(case).peak_bytes, estimated(case).config
            assert 0.9 <= ratio <= 1 + margin(config, tuple(map(int, version.split(".")))), (name(case), version)
            worst[ratio] = name(case)
    assert len(golden) == len([*CASES, TOO_LARGE, *MORE, BLACKWELL]) >= 30
    assert "pipe=4" in worst[max(worst)] and "num_layers=30" in worst[max(worst)]  # as audit/README.md says
    assert max(worst) <= 1.035


def test_golden_memory_decreases_with_zero_stage_and_remat():
    golden = golden_rows()
    for version in ("0.10", "0.12"):
        stages = [golden[f"{LLAMA} 8 zero={zero}"]["peak_bytes"][version] for zero in range(4)]
        assert stages == sorted(stages, reverse=True)
        remats = "none", "selective", "full"
        policies = [golden[f"{LLAMA} 8 batch_size=8 remat={remat}"]["peak_bytes"][version] for remat in remats]
        assert policies == sorted(policies, reverse=True)


MODELS = {GPT2: "GPT-2 124M", LLAMA: "Llama-3-8B", LLAMA70: "Llama-3-70B", GPT3: "GPT-3 175B"}
MODELS |= dict.fromkeys((LLAMA_128K, LLAMA_1M), MODELS[LLAMA])
SAID = "grad_reduce", "sequence_parallel", "attention", "compute", "attend_across_documents"  # and search.describe


def label(case, config):
    """The case as the guide names it."""
    model = "1T" if config.model.num_layers == 128 else MODELS[case[0]]
    model += f", {config.data.seq_len:,} tokens" * (config.parallel.context > 1)
    also = [o.split(".")[1] for o in case[2] if o.split(".")[1].split("=")[0] in SAID]
    return ", ".join([f"{model}, {case[1]:,} {gpu_of(case).upper()}: {search.describe(config)}", *also])


@pytest.mark.parametrize("case", [*CASES, TOO_LARGE, *MORE, BLACKWELL], ids=name)
def test_estimates_shown_in_the_guides(case):
    e = estimated(case)
    values = {
        "label": label(case, e.config),
        "wire_bytes": sum(t.bytes for t in e.transfers),
        "flops": e.flops,
        "argument_bytes": sum(memory.state(e.config).values()),
        "peak_bytes": e.peak_bytes,
    }
    guides.hold("compiled", name(case), values)


def test_the_guides_show_no_other_estimates():
    guides.hold_rows("compiled", map(name, [*CASES, TOO_LARGE, *MORE, BLACKWELL]))


def resolved_on(gpus, *overrides, config=GPT2):
    return on_gpus(request.load(str(ROOT / "configs" / f"{config}.yaml"), list(overrides)), gpus, "h100")


def test_one_device_does_not_communicate():
    for zero in range(4):
        assert communication.communication(resolved_on(1, f"parallel.zero={zero}")) == []


def test_request_errors_are_one_line(capsys):
    config = str(ROOT / "configs" / "gpt2_124m.yaml")
    for arguments, message in (
        (["--gpu", "h1000"], "gpu='h1000' is unknown"),
        (["--zero", "4"], "parallel.zero=4"),
        (["--gpus", "12"], "gpus=12"),
    ):
        assert script.main(["--config", config, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


if __name__ == "__main__":
    rows = golden_rows()
    for case in [*CASES, TOO_LARGE, *MORE, BLACKWELL]:
        if any(word in name(case) for word in sys.argv[1:]) or not sys.argv[1:]:
            found, before = row(compile_case(case)), rows.get(name(case), {}).get("peak_bytes", {})
            rows[name(case)] = found | {"peak_bytes": before | {JAX: found["peak_bytes"]}}
    rows = {name(case): rows[name(case)] for case in [*CASES, TOO_LARGE, *MORE, BLACKWELL] if name(case) in rows}
    GOLDEN.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
