"""The stages of check_gpu.py, most valuable first; as a command it runs one of them and prints its result as JSON.

python scripts/gpu/gpu_stages.py NAME --simulate N --devices N --disk FOLDER
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

sys.path.extend(str(Path(__file__).parents[2] / name) for name in (".", "scripts/measure"))  # need not be installed
from gpu_checks import Machine, parity, resumes, two_processes
from gpu_figures import beside_jit, offloads, speed, variant

from nanotrain_jax.parallel import mesh as meshes


class Stage(NamedTuple):
    """A stage: run(machine) returns figures, among them "result", one line."""

    run: Callable[[Machine], dict]
    seconds: int  # about, on an H100
    devices: int = 1  # at least
    flags: str = ""  # XLA_FLAGS
    beside: str = ""  # another stage: the table shows the ratio of step times


BFLOAT16 = ("precision.compute=bfloat16", "model.attention=KERNEL")
FLOAT16 = ("precision.compute=float16", "precision.loss_scale=dynamic", "model.attention=KERNEL")
HOST = "memory.offload_optimizer=host"
TWO, FOUR = 2, 4  # devices
FLAGS = {  # what XLA does by default, the other way
    "command buffers off": "--xla_gpu_enable_command_buffer=",
    "cudnn gemm fusion": "--xla_gpu_cudnn_gemm_fusion_level=2",
    "loops double-buffered": "--xla_gpu_enable_while_loop_double_buffering=true",
    "exhaustive tiling": "--xla_gpu_exhaustive_tiling_search=true",
    "nccl user buffers": "--xla_gpu_enable_nccl_user_buffers=true",
}
OF_COMMUNICATION = ("nccl user buffers",)
PLAIN = "choices: none"  # the stage beside which those of choices and flags are


def device(machine: Machine) -> dict:
    """The devices of this machine, and versions."""
    meshes.configure(machine.simulate)
    devices = jax.devices()
    names = "jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12"
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in names if name in installed}
    if shutil.which("nvidia-smi") and not machine.simulate:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    found = {"kind": devices[0].device_kind, "count": len(devices), "platform": devices[0].platform}
    return found | {"versions": versions, "result": f"{len(devices)} x {devices[0].device_kind}"}


def flagged() -> dict[str, Stage]:
    """XLA flags one by one, each beside the same step without."""
    run, stages = partial(variant, name="gpt2-350m", batch=8), {}
    for name, flags in FLAGS.items():
        devices = TWO if name in OF_COMMUNICATION else 1
        seconds = 150 if name == "exhaustive tiling" else 40
        stages[f"flags: {name}"] = Stage(run, seconds, devices, flags, beside=PLAIN)
    return stages


def check(*overrides: str, devices: int = 1, seconds: int = 25) -> Stage:
    """A comparison with the oracle."""

    def run(machine: Machine) -> dict:
        return parity(machine, *overrides)

    return Stage(run, seconds, devices)


def model(name: str, seconds: int) -> Stage:
    """A timing of a model."""
    return Stage(partial(speed, name=name), seconds)


def choice(*overrides: str, beside: str = PLAIN, batch: int = 8) -> Stage:
    """A timing of GPT-2 350M with a choice, beside another one."""

    def run(machine: Machine) -> dict:
        return variant(machine, "gpt2-350m", batch, *overrides)

    return Stage(run, 45, beside=beside)


def offload(*modes: str, seconds: int) -> Stage:
    """Offload modes beside the step without."""

    def run(machine: Machine) -> dict:
        return offloads(machine, "gpt2-350m", 8, *modes)

    return Stage(run, seconds)


RING, ULYSSES = ("parallel.context=2", "parallel.context_attention=ring"), ("parallel.context=2",)
ULYSSES += ("parallel.context_attention=ulysses",)
SHARDED = ("parallel.data=2", "parallel.zero=3", "parallel.persist_below=0")
PIPE = ("parallel.pipe=2", "parallel.microbatches=4")
STAGES = {
    PLAIN: choice(beside=""),
    "kernels by XLA": choice("model.kernels=xla"),
    "kernels by XLA, parity": check(*BFLOAT16, "model.kernels=xla"),
    "layers in a loop": choice("model.unroll=false"),
    "logits in float32": choice("precision.logits=float32"),
    "float32": check(),
    "bfloat16": check(*BFLOAT16),
    "gpt2-124m": model("gpt2-124m", 50),
    "gpt2-1.5b": model("gpt2-1.5b", 110),
    "beside jit": Stage(partial(beside_jit, name="gpt2-124m", batch=8), 120),
    "resume": Stage(resumes, 60),
    "optimizer on the host": check(HOST),
    "all on the host": check(
        HOST, "memory.offload_params=host", "memory.offload_activations=host", "parallel.zero=3", "memory.remat=full"
    ),
    "nvme": check("memory.offload_optimizer=nvme", "memory.nvme_dir=DISK"),
    "offload": offload("optimizer", "all", "nvme", seconds=150),
    "llama-3b": model("llama-3b", 60),
    "llama-3b, layers written out": Stage(
        partial(speed, name="llama-3b", overrides=("model.unroll=true",)), 60, beside="llama-3b"
    ),
    "float16": check(*FLOAT16),
    "documents": check(*BFLOAT16, "data.attend_across_documents=false"),
    "float8": check(*BFLOAT16, "precision.matmul=float8"),
    "zero 3": check(*SHARDED, devices=TWO),
    "zero 3 in float8": check(*SHARDED, *BFLOAT16, "precision.gather=float8", devices=TWO),
    "tensor": check("parallel.tensor=2", devices=TWO),
    "tensor in hops": check("parallel.tensor=2", "parallel.overlap_tensor=true", devices=TWO),
    "ring": check(*RING, devices=TWO),
    "ring bfloat16": check(*RING, *BFLOAT16, devices=TWO),
    "ulysses bfloat16": check(*ULYSSES, *BFLOAT16, devices=TWO),
    "pipe": check(*PIPE, devices=TWO),
    "two processes": Stage(two_processes, 70, TWO),
    "zero 3 x tensor": check(*SHARDED, "parallel.tensor=2", devices=FOUR),
    "pipe x tensor": check(*PIPE, "parallel.tensor=2", devices=FOUR),
    "gpt2-350m": model("gpt2-350m", 60),
    "gpt2-774m": model("gpt2-774m", 90),
    **flagged(),
    "remat: full": choice("memory.remat=full"),
    "remat: selective": choice("memory.remat=selective"),
    "microbatches: 2": choice("parallel.microbatches=2"),
    "microbatches: 4": choice("parallel.microbatches=4"),
}


def main() -> int:
    """Run a stage; its figures are the last line of stdout."""
    parser = argparse.ArgumentParser(description="Run one stage of check_gpu.py.")
    parser.add_argument("name", choices=["device", *STAGES])
    parser.add_argument("--simulate", type=int, default=0, help="simulated devices of the CPU (default: use GPUs)")
    parser.add_argument("--devices", type=int, default=1, help="devices of this machine")
    parser.add_argument("--disk", default=".", help="folder for temporary files")
    asked = parser.parse_args()
    machine = Machine(asked.simulate, asked.devices, asked.disk)
    run = device if asked.name == "device" else STAGES[asked.name].run
    print(json.dumps(run(machine)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
