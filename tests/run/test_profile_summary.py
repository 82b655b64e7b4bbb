"""The summary of a profile: the figures of a made-up trace of a GPU, and a real one of a run on simulated devices."""

import json

import jax
import pytest

from nanotrain_jax.audit import hlo
from nanotrain_jax.run import profile_summary

US = 1_000_000  # picoseconds
SOURCES = {
    "gemm.1": "jit(train)/shard_map/transpose(jvp(layer))/mlp/dot_general",
    "fusion.2": "jit(train)/shard_map/update/jit(clip)/mul",
    "all-gather-start.1": "jit(train)/shard_map/all_gather_data/all_gather",
}


def plane(number, name, lines):
    """The text of a plane. lines: name -> [(event, start in us, duration in us, {stat: value})]."""
    events, stats, text = {}, {}, ""
    for i, (line, rows) in enumerate(lines.items()):
        text += f'lines {{ id: {i} name: "{line}" timestamp_ns: 1000\n'
        for event, start, duration, values in rows:
            key = events.setdefault(event, len(events) + 1)
            text += f"events {{ metadata_id: {key} offset_ps: {start * US} duration_ps: {duration * US}"
            for stat, value in values.items():
                kind = "int64_value" if isinstance(value, int) else "str_value"
                key = stats.setdefault(stat, len(stats) + 1)
                text += f" stats {{ metadata_id: {key} {kind}: {json.dumps(value)} }}"
            text += " }\n"
        text += "}\n"
    for table, names in (("event_metadata", events), ("stat_metadata", stats)):
        text += "".join(f'{table} {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n' for n, i in names.items())
    return f'planes {{ id: {number} name: "{name}"\n{text}}}\n'


def two_steps():
    """Steps of 1000 us. In each: compute 0-500, a collective 300-700, a copy 450-550; the host waits for 50."""
    compute, other, copies, host = [], [], [], []
    for t in (0, 1000):
        compute += [("cutlass", t, 400, {"hlo_op": "gemm.1"}), ("kernel", t + 400, 100, {"hlo_op": "fusion.2"})]
        other += [("ncclDevKernel_AllGather", t + 300, 400, {"hlo_op": "all-gather-start.1"})]
        copies += [("MemcpyD2H", t + 450, 100, {})]
        host += [("train", t, 1000, {"step_num": t}), ("input", t + 10, 50, {})]
    streams = {"Stream #7(Compute)": compute, "Stream #8(Compute)": other, "Stream #9(MemcpyD2H)": copies}
    return plane(1, "/device:GPU:0", streams | {"XLA Ops": compute}) + plane(2, "/host:CPU", {"python": host})


def written(folder, text):
    path = folder / "host.xplane.pb"
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_a_gpu_trace_gives_idle_time_exposed_collectives_and_parts(tmp_path, monkeypatch):
    row = {"kernel_name": "k", "total_duration_us": 300, "is_kernel_using_tensor_core": True}
    rows = [row, row | {"total_duration_us": 100, "is_kernel_using_tensor_core": False}]
    table = {"cols": [{"id": key} for key in row], "rows": [{"c": [{"v": v} for v in r.values()]} for r in rows]}
    monkeypatch.setattr(profile_summary.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(profile_summary, "tool", lambda xplane, name: table)
    lines = profile_summary.summary(written(tmp_path, two_steps()), SOURCES).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "profile of 1 GPUs of this process, per step",
        "step time 1.00 ms, mean of 2 steps",
        "input wait 0.05 ms (5.0%): the host waits for data",
        "device idle 0.30 ms (30.0%)",
        "collectives 0.40 ms (40.0%), exposed 0.20 ms (20.0%)",
        "copies 0.10 ms (10.0%), exposed 0.05 ms (5.0%)",
        "time by part mlp backward 40%, all_gather_data 40%, update 10%, other 10%",
        "40.0% gemm.1 mlp backward, dot_general",
        "40.0% all-gather-start.1 all_gather_data, all_gather",
        "10.0% fusion.2 update, mul",
        "10.0% MemcpyD2H other",
        "kernels 2 different, tensor cores in 75% of their time (xprof)",
    ]


def test_a_trace_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no whole step"):
        profile_summary.read(written(tmp_path, plane(1, "/host:CPU", {"python": [("other", 0, 1, {})]})))


def test_xprof_reads_a_trace_of_this_jax(tmp_path):
    """Where it is installed: the columns that the summary reads exist."""
    pytest.importorskip("xprof")
    table = profile_summary.tool(written(tmp_path, two_steps()), "kernel_stats")
    assert {"total_duration_us", "is_kernel_using_tensor_core"} <= {column["id"] for column in table["cols"]}


def test_a_profile_of_a_run_names_the_parts_of_the_model(tmp_path):
    @jax.jit
    def step(x):
        with jax.named_scope("mlp"):
            return jax.numpy.tanh(x @ x)

    x = jax.numpy.ones((256, 256))
    program = step.lower(x).compile()
    jax.block_until_ready(program(x))
    with jax.profiler.trace(tmp_path):
        for number in range(2):
            with jax.profiler.StepTraceAnnotation(profile_summary.STEP, step_num=number):
                with jax.profiler.TraceAnnotation(profile_summary.INPUT):
                    pass
                program(x).block_until_ready()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    text = profile_summary.summary(trace, hlo.sources(program.as_text()))
    assert "mean of 2 steps" in text
    assert "not known on CPU" in text
    assert "mlp" in text.split("time by part")[1].splitlines()[0]
