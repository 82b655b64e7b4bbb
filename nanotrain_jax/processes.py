"""The processes of a run: which one this is, how they meet, and how they agree.

The same command starts one process on a laptop and many on many hosts; the environment, or flags, say which it is.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

PORT = 29500  # where process 0 listens, unless MASTER_PORT says otherwise: PyTorch's
LAUNCHER = "NANOTRAIN_LAUNCHER"
# What JAX, gloo, NCCL say, in errors of one type or another, when another process is gone.
GONE = ("Gloo ", "remote process exited", "UNAVAILABLE:", "DEADLINE_EXCEEDED:", "Connection reset", "Connection closed")
# Errors of disks and networks that may be gone at the next try.
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET)
PASSING += (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)

T = TypeVar("T")


class Process(NamedTuple):
    """This process among those of the run."""

    source: str  # who says so
    index: int
    count: int
    coordinator: str | None  # host:port of process 0; None: JAX finds it, from `source`
    local_index: int = 0  # among those on its host
    local_count: int = 1


def here(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Process:
    """Which process of how many this one is: as given, or else as the environment has it.

    given: host:port of process 0, number of processes, index of this one, by the names that the user knows them by; all
    of them, or all None. The environment is that of this package's launcher or torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE), of Open MPI, of Slurm (a step of srun), or of an indexed job of
    Kubernetes (JOB_COMPLETION_INDEX, with WORLD_SIZE and MASTER_ADDR). None of them: one process. Raises ValueError.
    """
    missing = [key for key, value in given.items() if value is None]
    if len(missing) < len(given):
        if missing:
            raise ValueError(f"{' and '.join(missing)} not set; set all of {', '.join(given)}, or none")
        coordinator, count, index = given.values()
        found = Process(list(given)[-1], index, count, coordinator)
    else:
        found = _of_environment(env)
    if not 0 <= found.index < found.count:
        raise ValueError(f"{found.source}: process {found.index} of {found.count}; processes count from 0")
    if found.coordinator:
        port = re.fullmatch(r".+:(\d+)", found.coordinator)
        if not port or int(port[1]) >= 1 << 16:
            raise ValueError(
                f"{found.source}: process 0 at {found.coordinator!r}; it is a host:port, such as node0:{PORT}"
            )
    return found


def _of_environment(env: Mapping[str, str]) -> Process:
    def number(key: str, default: str | None = None) -> int:
        value = env.get(key, default)
        if value is None or not value.isdigit():
            raise ValueError(f"the environment has {key}={value!r}, which is to be a number; set it, or unset the rest")
        return int(value)

    if "RANK" in env and "WORLD_SIZE" in env:
        source = "RANK" if launcher(env) is None else "launcher"
        index, here = number("RANK"), (number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1"))
    elif "OMPI_COMM_WORLD_RANK" in env:  # before Slurm, whose srun starts what starts them
        place = env.get("JAX_COORDINATOR_ADDRESS")
        count = number("OMPI_COMM_WORLD_SIZE")
        if count > 1 and place is None and "OMPI_MCA_orte_hnp_uri" not in env:  # from which JAX would take it
            raise ValueError("Open MPI 5 does not say where process 0 is; set JAX_COORDINATOR_ADDRESS to its host:port")
        here = number("OMPI_COMM_WORLD_LOCAL_RANK"), number("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        return Process("ompi", number("OMPI_COMM_WORLD_RANK"), count, place, *here)
    elif {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= env.keys():
        here = number("SLURM_LOCALID"), _tasks_here(env)
        count = number("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])  # the other is the allocation's
        return Process("slurm", number("SLURM_PROCID"), count, env.get("JAX_COORDINATOR_ADDRESS"), *here)
    elif "JOB_COMPLETION_INDEX" in env:
        source, index, here = "JOB_COMPLETION_INDEX", number("JOB_COMPLETION_INDEX"), (0, 1)
    else:
        return Process("alone", 0, 1, None)
    count = number("WORLD_SIZE")
    if count > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"the environment has {source} but no MASTER_ADDR, the host of process 0; set it")
    port = number("MASTER_PORT", str(PORT)) + (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")  # else torchrun's own
    place = f"{env['MASTER_ADDR']}:{port}" if "MASTER_ADDR" in env else None
    return Process(source, index, count, place, *here)


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of a Slurm step on this node, from e.g. SLURM_STEP_TASKS_PER_NODE=8(x3),4."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = int(env.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 1


def gpus_here(env: Mapping[str, str] = os.environ) -> list[str]:
    """The NVIDIA GPUs that a process started here sees, as CUDA_VISIBLE_DEVICES names them, without starting JAX."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(len(glob("/dev/nvidia[0-9]*")))]
    return [name for name in visible.split(",") if name.strip()]


def my_gpus(found: Process, env: Mapping[str, str] = os.environ) -> list[int]:
    """Which of the GPUs that it sees a process takes, by number; none: all.

    Those of a host are divided among its processes, unless Slurm has already. Raises ValueError if that is uneven.
    """
    gpus = len(gpus_here(env))
    divided = gpus < _slurm_number("SLURM_GPUS_ON_NODE", env) or gpus <= _slurm_number("SLURM_GPUS_PER_TASK", env)
    if found.local_count == 1 or gpus < found.local_count or (divided and launcher(env) is None):
        return []
    if gpus % found.local_count:
        raise ValueError(f"the {gpus} GPUs of a host cannot be divided among its {found.local_count} processes")
    each = gpus // found.local_count
    return list(range(found.local_index * each, (found.local_index + 1) * each))


def _slurm_number(key: str, env: Mapping[str, str]) -> int:
    """The number that a variable of Slurm's ends in, say 4 or a100:4; 0 if there is none."""
    return int("0" + re.search(r"\d*$", env.get(key, ""))[0])


def launcher(env: Mapping[str, str] = os.environ) -> int | None:
    """Process id of this package's launcher, if that has started this process."""
    pid = env.get(LAUNCHER, "")
    return int(pid) if pid.isdigit() else None


def initialize(found: Process, gpus: Sequence[int] = (), timeout: int = 300) -> None:
    """Meet the other processes, if there are any; to be called before the first use of a device.

    gpus: see `my_gpus`. Collectives of CPU devices go over gloo. timeout: seconds to wait for the others; if they do
    not come this process ends with exit code 1.
    """
    if found.count == 1:
        return
    me = f"error: process {found.index} of {found.count} (as {found.source} says)"
    place = found.coordinator or "process 0"

    def give_up(why: str) -> None:
        print(f"{me} {why}", file=sys.stderr, flush=True)
        os._exit(1)

    if found.coordinator and found.index == 0:
        try:  # gRPC would share the port with another run, or abort
            socket.create_server(("", int(place.rpartition(":")[2]))).close()
        except OSError as error:
            give_up(f"cannot listen at {place} ({os.strerror(error.errno)}); choose another port")
    late = f"did not meet the others at {place} within {timeout} s; see whether all were started, and whether that "
    timer = threading.Timer(timeout, give_up, [late + "address can be reached"])  # JAX itself would abort
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        found.coordinator,
        found.count,
        found.index,
        local_device_ids=list(gpus),
        cluster_detection_method="deactivate" if found.coordinator else found.source,
        initialization_timeout=timeout + 60,
    )
    timer.cancel()


def everyone(text: str) -> list[str]:
    """The text of each process, in their order. All processes wait here for each other."""
    if jax.process_count() == 1:
        return [text]
    mine = np.zeros(1024, np.uint8)
    data = text.encode()[: mine.size]
    mine[: len(data)] = np.frombuffer(data, np.uint8)
    try:
        rows = multihost_utils.process_allgather(mine)
    except ValueError as error:  # of gloo
        raise RuntimeError(f"another process is gone: {error}") from None
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def is_gone(error: Exception) -> bool:
    """Whether an error tells of another process that is gone."""
    return any(words in f"{error} {error.__cause__}" for words in GONE)


def may_pass(error: Exception) -> bool:
    """Whether an error is of another process, a disk or a network that may be back at the next try."""
    lost = isinstance(error, (TimeoutError, ConnectionError)) or getattr(error, "errno", None) in PASSING
    return lost or is_gone(error)


def together(work: Callable[[], T]) -> T:
    """-> work(), which every process does. If it raises ValueError or OSError on one, all raise that, and part."""
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as found:
        error = found
    number = getattr(error, "errno", None) or 0
    told = [text for text in everyone("" if error is None else f"{number} {str(error) or repr(error)}") if text]
    if told and jax.process_count() > 1:
        jax.distributed.shutdown()
        number, text = told[0].split(" ", 1)
        error = OSError(text)
        error.errno = int(number) or None
    if error is not None:
        raise error
    return result


def refuse(text: str) -> NoReturn:
    """Raise ValueError or OSError, as all processes do now: none is gone before the others know."""

    def fail() -> None:
        raise ValueError(text)

    together(fail)


def leave(code: int) -> None:
    """End this process with an exit code, without waiting for others if something is wrong: they may never come."""
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    if code and jax.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)
