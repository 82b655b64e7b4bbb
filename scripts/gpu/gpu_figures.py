"""The other stages of check_gpu.py: how fast, and how much memory beside the estimate and the compiled program.

Each model takes the largest batch that the estimate says fits, without recomputation if possible; a model that does not
fit at all loses layers ("slice").
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import bench
import compare_jit
import compare_offload
import jax
from gpu_checks import Machine

from nanotrain_jax.config.load import nested, parse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import hardware
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.estimate import Estimate, estimate

GPT2 = {"family": "gpt2", "vocab_size": 50304}
MODELS = {  # name -> model, tokens of a sequence
    "gpt2-124m": (GPT2 | {"num_layers": 12, "d_model": 768, "num_heads": 12}, 1024),
    "gpt2-350m": (GPT2 | {"num_layers": 24, "d_model": 1024, "num_heads": 16}, 1024),
    "gpt2-774m": (GPT2 | {"num_layers": 36, "d_model": 1280, "num_heads": 20}, 1024),
    "gpt2-1.5b": (GPT2 | {"num_layers": 48, "d_model": 1600, "num_heads": 25}, 1024),
    "llama-3b": (
        {"family": "llama", "num_layers": 28, "d_model": 3072, "num_heads": 24, "num_kv_heads": 8, "d_ff": 8192}
        | {"vocab_size": 128256, "loss_chunk": 2048},
        4096,
    ),
}
TINY = {"num_layers": 2, "d_model": 32, "num_heads": 4, "vocab_size": 128}
BATCHES = 32, 16, 8, 4, 2, 1  # sequences of a device
STEPS, WARMUP = 20, 3


def planned(machine: Machine, name: str, batch: int, *overrides: str) -> Config:
    """Return the config of a model, data-parallel over all devices. batch: sequences of a device."""
    model, tokens = MODELS[name]
    if machine.simulate:
        model, tokens = model | TINY | {"num_kv_heads": 2 if "num_kv_heads" in model else None, "d_ff": 64}, 32
        model |= {"loss_chunk": 0}
    zero = 0 if machine.devices == 1 else 1 if name == "gpt2-124m" else 3
    tree: dict[str, Any] = {
        "model": dict(model),
        "parallel": {"data": machine.devices, "zero": zero},
        "precision": {"compute": "bfloat16"},
        "data": {"source": "synthetic", "batch_size": batch * machine.devices, "seq_len": tokens},
        "runtime": {"simulate": machine.simulate},
    }
    return parse(nested(overrides, tree))


def estimated(machine: Machine, config: Config) -> Estimate | None:
    """Return the estimate for this machine's GPU; None for one that the planner does not know."""
    kind = jax.devices()[0].device_kind
    gpu = hardware.SIMULATED if machine.simulate else hardware.name_of(kind)
    axes = config.parallel.axes | {"data": machine.devices}
    return gpu and estimate(resolve(config, axes), gpu)


def candidates(machine: Machine, name: str, *overrides: str) -> Iterator[Config]:
    """Yield configs of a model, the most wanted first."""
    layers = 2 if machine.simulate else MODELS[name][0]["num_layers"]
    while layers > 1:
        for remat, batch in product(("none", "full"), BATCHES[-2:] if machine.simulate else BATCHES):
            keys = f"memory.remat={remat}", f"model.num_layers={layers}", *overrides
            yield planned(machine, name, batch, *keys)
        layers -= max(1, layers // 8)


def fitting(machine: Machine, name: str, *overrides: str) -> tuple[Config, Estimate | None]:
    """Return the first config that the estimate says fits; without an estimate one sequence and full remat.

    Raises ValueError if none fits.
    """
    for config in candidates(machine, name, *overrides):
        e = estimated(machine, config)
        if e is None:
            return planned(machine, name, 1, "memory.remat=full", *overrides), None
        if e.fits:
            return config, e
    raise ValueError(f"{name}: not even 2 layers fit, by the estimate")


def timed(machine: Machine, config: Config, e: Estimate | None) -> dict:
    """Time a config -> figures of bench.py, and the estimated peak."""
    figures = bench.measure(config, 3 if machine.simulate else STEPS, WARMUP)
    peak, compiled = figures["peak_bytes_measured"], figures["peak_bytes_compiled"]
    b, m = config.data.batch_size, config.model
    result = f"{figures['tokens_per_second']:,.0f} tokens/s"
    result += f", MFU {figures['mfu_full']:.1%}" if figures["mfu_full"] else ""
    result += f", {figures['step_seconds'] * 1e3:,.1f} ms"
    result += f"; peak {peak / 1e9:.3g} GB measured," if peak else "; peak"
    result += f" {compiled / 1e9:.3g} GB compiled" + (f", {e.peak_bytes / 1e9:.3g} estimated" if e else "")
    result += f" ({m.num_layers} layers, {b} sequences of {config.data.seq_len}, remat {config.memory.remat})"
    return figures | {"result": result, "peak_bytes_estimated": e and e.peak_bytes, "num_layers": m.num_layers}


def speed(machine: Machine, name: str, overrides: tuple[str, ...] = ()) -> dict:
    """Tokens per second, MFU and peak memory of a model."""
    meshes.configure(machine.simulate)
    return timed(machine, *fitting(machine, name, *overrides))


def variant(machine: Machine, name: str, batch: int, *overrides: str) -> dict:
    """The same with a given batch, to compare choices that leave the work the same."""
    meshes.configure(machine.simulate)
    config = planned(machine, name, batch, *overrides)
    return timed(machine, config, estimated(machine, config))


def beside_jit(machine: Machine, name: str, batch: int) -> dict:
    """Our step and the same under plain jit, timed in turn."""
    meshes.configure(machine.simulate)
    config = planned(machine, name, batch)
    mesh = meshes.make(**config.parallel.axes)
    config = resolve(config, mesh.shape)
    compare_jit.check(config)
    rows = compare_jit.run(config, mesh, 3 if machine.simulate else compare_jit.MIN_STEPS)
    ours, *others = (row["step_seconds"] for row in rows)
    result = f"{ours * 1e3:,.1f} ms, {ours / min(others):.3f} of plain jit ({min(others) * 1e3:,.1f} ms)"
    return {"result": result, "step_seconds": ours, "ratio_to_jit": ours / min(others), "rows": rows}


def offloads(machine: Machine, name: str, batch: int, *modes: str) -> dict:
    """Offload to host memory and NVMe: time over the step without, hidden copies; bandwidth of the host's link."""
    meshes.configure(machine.simulate)
    config = planned(machine, name, batch, "parallel.zero=3", "parallel.persist_below=0", "memory.remat=full")
    size = 2**22 if machine.simulate else 2**28
    bandwidth = compare_offload.link_bandwidth(size)
    rows = compare_offload.compare(config, list(modes), 2 if machine.simulate else 10, machine.disk)
    texts = []
    for row in rows[1:]:
        hidden = "" if row["hidden"] is None else f", {row['hidden']:.0%} of copies hidden"
        texts.append(f"{row['mode']} x{row['over_plain']:.2f}{hidden}")
    result = f"host link {bandwidth / 1e9:.1f} GB/s per direction; {'; '.join(texts)}"
    return {"result": result, "link_bytes_per_second": bandwidth, "rows": rows}
