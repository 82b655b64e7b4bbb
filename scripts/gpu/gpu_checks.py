"""The first stages of check_gpu.py: does every technique compute on this machine what it should?

The reference is the oracle of the tests (tests/oracle.py): one device, plain JAX, float32, written from the papers.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import yaml
from bench import placed
from compare_offload import runnable

from nanotrain_jax.audit import hlo
from nanotrain_jax.config.load import nested, parse
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.config.schema import Config
from nanotrain_jax.distributed import ranks
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.step import build as steps

ROOT = Path(__file__).parents[2]
UPDATES = 3
# Largest relative error of the losses and the first gradient norm. (Later norms amplify what updates round.)
LIMITS = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 2e-3, "float8": 3e-2}


class Machine(NamedTuple):
    """What stages know of the machine."""

    simulate: int  # simulated devices of the CPU; 0: GPUs
    devices: int
    disk: str  # a folder for files


def oracle():
    """tests/oracle.py as a module: scripts run from a checkout."""
    spec = importlib.util.spec_from_file_location("oracle", ROOT / "tests" / "oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(machine: Machine, *overrides: str) -> dict:
    """Return a small config as plain data, with the numbers that the oracle has, and heads that cuDNN takes."""
    numbers = oracle()
    tree = {
        "model": {"num_layers": 4, "d_model": 128, "num_heads": 4, "num_kv_heads": 2, "d_ff": 256, "vocab_size": 256}
        | {"rope_theta": numbers.THETA, "norm_eps": numbers.NORM_EPS},
        "parallel": {"data": 1},
        "precision": {"compute": "float32"},
        "data": {"source": "synthetic", "batch_size": 8, "seq_len": 32 if machine.simulate else 128},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "grad_clip": 0.0}
        | {"betas": [numbers.B1, numbers.B2], "eps": numbers.EPS, "weight_decay": numbers.DECAY},
        "runtime": {"simulate": machine.simulate, "compile_cache": False},
    }
    return nested(overrides, tree)


def batches(config: Config) -> list[np.ndarray]:
    """Return random tokens[B T+1] for each update."""
    shape = UPDATES, config.data.batch_size, config.data.seq_len + 1
    return list(np.random.default_rng(0).integers(config.model.vocab_size, size=shape, dtype=np.int32))


def trained(config: Config, mesh: jax.sharding.Mesh) -> dict:
    """Train for a few updates -> losses, the first gradient norm, bytes in host memory."""
    step, losses, norms = steps.build(config, mesh), [], []
    state = step.init()
    train = step.train.lower(step.state, step.batch).compile()
    with ExitStack() as stack:
        run = runnable(stack, config, step, train)
        for tokens in batches(config):
            state, metrics, _ = run(state, placed(step, tokens, step.token_order))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    return {"figures": [*losses, norms[0]], "host_bytes": hlo.memory(train)["host_bytes"]}


def parity(machine: Machine, *overrides: str) -> dict:
    """The losses of three updates and the first gradient norm equal the oracle's. Raises ValueError if they do not.

    In overrides DISK stands for the folder of files, KERNEL for cudnn, or xla on simulated devices.
    """
    meshes.configure(machine.simulate)
    plain = parse(small(machine))
    one = meshes.make(data=1, devices=jax.devices()[:1])
    kernel = "xla" if machine.simulate else "cudnn"
    keys = [word.replace("DISK", machine.disk).replace("KERNEL", kernel) for word in overrides]
    config = parse(small(machine, *keys))
    with jax.default_matmul_precision("highest"):
        state = jax.device_get(steps.build(resolve(plain, one.shape), one).init())
        *_, log = oracle().train(state.params, batches(plain), lr=1e-2)
        mesh = meshes.make(**config.parallel.axes)
        found = trained(resolve(config, mesh.shape), mesh)
    expected = [float(loss) for loss, *_ in log] + [float(log[0][2])]
    error = float(np.max(np.abs(np.array(found["figures"]) / np.array(expected) - 1)))
    is_float8 = "float8" in (config.precision.matmul, config.precision.gather)
    limit = LIMITS["float8" if is_float8 else config.precision.compute]
    if not error <= limit:
        raise ValueError(f"relative error {error:.2g} of losses and gradient norm: must be at most {limit:g}")
    wants_host = "host" in (config.memory.offload_optimizer, config.memory.offload_activations)
    if wants_host and not found["host_bytes"] and not machine.simulate:
        raise ValueError("the compiled step uses no host memory")
    kept = f", {found['host_bytes'] / 1e6:.1f} MB in host memory" if found["host_bytes"] else ""
    return {"result": f"equals the oracle to {error:.1e}{kept}", "error": error}


def command(machine: Machine, folder: str, module: list[str], *overrides: str) -> list[float]:
    """Run the train command in processes of its own -> the loss of each step. Raises RuntimeError if it fails."""
    path = Path(folder) / "small.yaml"
    path.write_text(yaml.safe_dump(small(machine)))
    keys = [f"logging.dir={folder}/run", "logging.progress=lines", "logging.tensorboard=false", "train.eval_every=0"]
    keys += ["data.source=stdlib", "data.batch_size=8", "train.log_every=1"]
    arguments = [sys.executable, "-m", *module, "--config", str(path), *keys, *overrides]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    if not machine.simulate:  # what follows is written for at most two
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ranks.visible_gpus()[:2])
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def resumes(machine: Machine) -> dict:
    """3 steps, a checkpoint, and 3 more in another process equal 6 steps, bitwise."""
    model = ["model.vocab_size=null", "runtime.deterministic=true", "checkpoint.every=3"]
    with tempfile.TemporaryDirectory(dir=machine.disk) as once, tempfile.TemporaryDirectory(dir=machine.disk) as twice:
        whole = command(machine, once, ["nanotrain_jax.train"], *model, "train.steps=6")
        command(machine, twice, ["nanotrain_jax.train"], *model, "train.steps=3")
        resumed = command(machine, twice, ["nanotrain_jax.train"], *model, "train.steps=6")
    if resumed != whole or len(whole) != 6:
        raise ValueError(f"losses {resumed} after a resume: must be {whole}")
    return {"result": "6 steps = 3 + resume + 3, bitwise"}


def two_processes(machine: Machine) -> dict:
    """Two processes of one device each have the losses of one process with one device."""
    model = ["model.vocab_size=null", "checkpoint.every=0", "train.steps=4"]
    simulate = [f"runtime.simulate={2 if machine.simulate else 0}"]
    launch = ["nanotrain_jax.launch", "--processes", "2", "--"]
    with tempfile.TemporaryDirectory(dir=machine.disk) as one, tempfile.TemporaryDirectory(dir=machine.disk) as two:
        alone = command(machine, one, ["nanotrain_jax.train"], *model)
        both = command(machine, two, launch, *model, *simulate, "parallel.data=2", "parallel.zero=2")
    error = float(np.max(np.abs(np.array(both) / np.array(alone) - 1)))
    if not error <= 1e-3:  # float32 matmuls of GPUs are TF32 here
        raise ValueError(f"losses {both} of two processes, {alone} of one: relative error must be at most 1e-3")
    return {"result": f"losses of one process to {error:.1e}", "error": error}
