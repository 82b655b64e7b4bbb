"""Rank of a process, its GPUs and proxy, from flags or the environment. Needs no JAX: a launcher starts without it.

The same command starts one process on a laptop and many on many hosts.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from glob import glob
from itertools import takewhile
from typing import Any, NamedTuple

PORT = 29500  # default port of process 0, as PyTorch's MASTER_PORT
LAUNCHER = "NANOTRAIN_LAUNCHER"
ROUND = "NANOTRAIN_ROUND"  # how often this package's launcher started processes before
# Signals that ask a run to save and stop. Slurm sends USR1 where people ask for it, a closed terminal sends HUP.
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


class Process(NamedTuple):
    """The rank of this process and the size of the run."""

    source: str  # what gave the rank: a flag, a variable, a scheduler
    index: int
    count: int
    coordinator: str | None  # host:port of process 0; None: JAX finds it, from `source`
    local_index: int = 0  # on this host
    local_count: int = 1


def detect(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Process:
    """Return the rank of this process: as given, or else from the environment. Raises ValueError.

    given: host:port of process 0, number of processes, index of this process, by their names in errors; all of them, or
    all None. Environments: this package's launcher or torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK,
    LOCAL_WORLD_SIZE), Open MPI, Slurm (a step of srun), an indexed job of Kubernetes (JOB_COMPLETION_INDEX, with
    WORLD_SIZE and MASTER_ADDR). In none of them the run is a single process.
    """
    missing = [key for key, value in given.items() if value is None]
    if len(missing) < len(given):
        if missing:
            raise ValueError(f"{' and '.join(missing)} not set; set all of {', '.join(given)}, or none")
        coordinator, count, index = given.values()
        process = Process(list(given)[-1], index, count, coordinator)
    else:
        process = _from_environment(env)
    if not 0 <= process.index < process.count:
        raise ValueError(
            f"{process.source}: process index={process.index}: must be in [0, {process.count}); indices start at 0"
        )
    if process.coordinator:
        port = re.fullmatch(r".+:(\d+)", process.coordinator)
        if not port or int(port[1]) >= 1 << 16:
            raise ValueError(
                f"{process.source}: coordinator={process.coordinator!r}: must be host:port; use e.g. node0:{PORT}"
            )
    return process


def _from_environment(env: Mapping[str, str]) -> Process:
    def number(key: str, default: str | None = None) -> int:
        value = env.get(key, default)
        if value is None or not value.isdigit():
            raise ValueError(
                f"{key}={value!r} in the environment: must be a number; set it, or unset the other variables"
            )
        return int(value)

    if "RANK" in env and "WORLD_SIZE" in env:
        source = "RANK" if launcher_pid(env) is None else "launcher"
        index, local = number("RANK"), (number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1"))
    elif "OMPI_COMM_WORLD_RANK" in env:  # before Slurm, whose srun may start mpirun
        address = env.get("JAX_COORDINATOR_ADDRESS")
        count = number("OMPI_COMM_WORLD_SIZE")
        if count > 1 and address is None and "OMPI_MCA_orte_hnp_uri" not in env:  # JAX would use this one
            raise ValueError("Open MPI 5 gives no address of process 0; set JAX_COORDINATOR_ADDRESS to its host:port")
        local = number("OMPI_COMM_WORLD_LOCAL_RANK"), number("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        return Process("ompi", number("OMPI_COMM_WORLD_RANK"), count, address, *local)
    elif {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= env.keys():
        local = number("SLURM_LOCALID"), _slurm_tasks_on_node(env)
        count = number("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])  # of the step; SLURM_NTASKS: of the allocation
        return Process("slurm", number("SLURM_PROCID"), count, env.get("JAX_COORDINATOR_ADDRESS"), *local)
    elif "JOB_COMPLETION_INDEX" in env:
        source, index, local = "JOB_COMPLETION_INDEX", number("JOB_COMPLETION_INDEX"), (0, 1)
    else:
        return Process("alone", 0, 1, None)
    count = number("WORLD_SIZE")
    if count > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"{source} is set without MASTER_ADDR; set MASTER_ADDR to the host of process 0")
    # torchrun's own store listens on MASTER_PORT
    port = number("MASTER_PORT", str(PORT)) + (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    address = f"{env['MASTER_ADDR']}:{port}" if "MASTER_ADDR" in env else None
    return Process(source, index, count, address, *local)


def _slurm_tasks_on_node(env: Mapping[str, str]) -> int:
    """Return the tasks of a Slurm step on this node, from e.g. SLURM_STEP_TASKS_PER_NODE=8(x3),4."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 1


def visible_gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the NVIDIA GPUs visible to a process, named as in CUDA_VISIBLE_DEVICES, without starting JAX."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(glob("/dev/nvidia[0-9]*")))]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return list(takewhile(lambda name: not name.startswith("-"), names))  # CUDA sees none from the first negative on


def local_gpus(process: Process, env: Mapping[str, str] = os.environ) -> list[int]:
    """Return the indices of the visible GPUs that a process uses; empty: all.

    Divides the GPUs of a host among its processes, unless Slurm has done so. Raises ValueError if they do not divide
    evenly.
    """
    gpus = len(visible_gpus(env))
    divided = gpus < _slurm_number("SLURM_GPUS_ON_NODE", env) or gpus <= _slurm_number("SLURM_GPUS_PER_TASK", env)
    if process.local_count == 1 or gpus < process.local_count or (divided and launcher_pid(env) is None):
        return []
    if gpus % process.local_count:
        raise ValueError(
            f"{process.local_count} processes per host: must divide the {gpus} GPUs of the host; use a divisor"
        )
    per_process = gpus // process.local_count
    return list(range(process.local_index * per_process, (process.local_index + 1) * per_process))


def _slurm_number(key: str, env: Mapping[str, str]) -> int:
    """Return the number at the end of a Slurm variable, e.g. 4 or a100:4; 0 if it has none."""
    return int("0" + re.search(r"\d*$", env.get(key, ""))[0])


def launcher_pid(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the process id of this package's launcher; None if something else started this process."""
    pid = env.get(LAUNCHER, "")
    return int(pid) if pid.isdigit() else None


def is_restart(env: Mapping[str, str] = os.environ) -> bool:
    """True if this package's launcher has started processes of this run before."""
    return env.get(ROUND, "0") != "0"


@contextmanager
def without_proxy(address: str | None, env: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let processes reach the address (host:port) of process 0 directly, whatever proxy the environment has.

    gRPC reads http_proxy and no_proxy; the host stays in no_proxy. JAX warns of any proxy: not of one that is bypassed.
    """
    if not address:  # JAX finds it
        yield
        return
    host = address.rpartition(":")[0].strip("[]")
    for name in "no_proxy", "NO_PROXY":
        hosts = [other for other in env.get(name, "").split(",") if other]
        env[name] = ",".join(dict.fromkeys([*hosts, host]))
    logger = logging.getLogger("jax")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
