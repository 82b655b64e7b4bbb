"""Process bootstrap and agreement: rank, world size, GPUs, rendezvous, and errors that all processes raise together.

The same command starts one process on a laptop and many on many hosts; flags or the environment give the rank.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

PORT = 29500  # default port of process 0, as PyTorch's MASTER_PORT
LAUNCHER = "NANOTRAIN_LAUNCHER"
# Signals that ask a run to save and stop. Slurm sends USR1 where people ask for it, a closed terminal sends HUP.
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
# Texts in errors of JAX, gloo and NCCL, of several types, after the failure of another process.
PEER_FAILURES = ("Gloo ", "remote process exited", "UNAVAILABLE:", "DEADLINE_EXCEEDED:")
PEER_FAILURES += ("Connection reset", "Connection closed")
# Errors of disks and networks that a retry may resolve.
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET)
TRANSIENT_ERRNOS += (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)

T = TypeVar("T")


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


def initialize(process: Process, gpus: Sequence[int] = (), timeout: int = 300) -> None:
    """Join the other processes, if any; call before the first use of a device.

    gpus: see `local_gpus`. CPU devices use gloo for collectives. timeout: seconds for the rendezvous; after it this
    process exits with code 1.
    """
    if process.count == 1:
        return
    this_process = f"error: process {process.index} of {process.count} (from {process.source})"
    address = process.coordinator or "process 0"

    def give_up(why: str) -> None:
        print(f"{this_process}: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    if process.coordinator and process.index == 0:
        try:  # gRPC would share the port with another run, or abort
            socket.create_server(("", int(address.rpartition(":")[2]))).close()
        except OSError as error:
            give_up(f"cannot listen at {address} ({os.strerror(error.errno)}); choose another port")
    message = f"rendezvous timeout: not all processes reached {address} within {timeout} s; "
    message += "check that all were started and can connect to this address"
    timer = threading.Timer(timeout, give_up, [message])  # JAX itself would abort
    timer.daemon = True
    timer.start()
    with without_proxy(process.coordinator):
        jax.distributed.initialize(
            process.coordinator,
            process.count,
            process.index,
            local_device_ids=list(gpus),
            cluster_detection_method="deactivate" if process.coordinator else process.source,
            initialization_timeout=timeout + 60,
        )
    timer.cancel()


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


def all_gather_text(text: str) -> list[str]:
    """Return the text of each process, by rank; a barrier for all processes. Texts are cut at 1024 bytes."""
    if jax.process_count() == 1:
        return [text]
    row = np.zeros(1024, np.uint8)
    data = text.encode()[: row.size]
    row[: len(data)] = np.frombuffer(data, np.uint8)
    try:
        rows = multihost_utils.process_allgather(row)
    except ValueError as error:  # from gloo
        raise RuntimeError(f"another process failed: {error}") from None
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def is_peer_failure(error: Exception) -> bool:
    """True if the failure of another process caused this error."""
    return any(text in f"{error} {error.__cause__}" for text in PEER_FAILURES)


def is_transient(error: Exception) -> bool:
    """True if a retry may succeed: another process, a disk or a network failed."""
    lost = isinstance(error, (TimeoutError, ConnectionError)) or getattr(error, "errno", None) in TRANSIENT_ERRNOS
    return lost or is_peer_failure(error)


def on_all_processes(work: Callable[[], T]) -> T:
    """Return work(), called by every process. If one raises ValueError or OSError, all raise it and disconnect."""
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    number = getattr(error, "errno", None) or 0
    text = "" if error is None else f"{number} {str(error) or repr(error)}"
    failures = [failure for failure in all_gather_text(text) if failure]
    if failures and jax.process_count() > 1:
        jax.distributed.shutdown()
        number, text = failures[0].split(" ", 1)
        error = OSError(text)
        error.errno = int(number) or None
    if error is not None:
        raise error
    return result


def raise_on_all(text: str) -> NoReturn:
    """Raise ValueError (one process) or OSError (several); every process must call this."""

    def fail() -> None:
        raise ValueError(text)

    on_all_processes(fail)


def exit_process(code: int) -> None:
    """Exit with this code. On failure do not wait for other processes, which may be lost."""
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    if code and jax.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)
