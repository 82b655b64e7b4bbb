"""The launcher: `python -m nanotrain_jax.launch [--processes N] [options] -- --config FILE [section.key=value ...]`

Starts the processes of a run on this host and prints their output. If one fails, it stops all and restarts them from
the newest valid checkpoint. With several hosts, start one launcher per host with the same arguments; host 0 leads. An
elastic run continues without lost hosts, and with those that return.

Exit codes: 0 done; 2 invalid request; 4 the run stopped on purpose (see train.py); 75 stopped by SIGTERM or Ctrl-C with
a checkpoint saved, or at least an older one (the same command resumes); 1 any other failure: more than --max-restarts
failures in a row, missing hosts, a second signal.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanotrain_jax.run import shell

    shell.begin(finishes=True)

import argparse
import ipaddress
import math
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nanotrain_jax.config.load import Parser, at_least, path_argument, refuse
from nanotrain_jax.config.schema import Config
from nanotrain_jax.config.values import naming
from nanotrain_jax.distributed import ranks
from nanotrain_jax.distributed.agent import Agent
from nanotrain_jax.distributed.coordinator import LOOPBACK, Coordinator, RestartPolicy
from nanotrain_jax.distributed.protocol import GRACE, Refused
from nanotrain_jax.distributed.watchdog import MIN_TIMEOUT, START_END_FACTOR
from nanotrain_jax.run import model_config, shell

MAX_PROCESSES = 1024  # per host
FORGET_FACTOR = 2 * START_END_FACTOR  # hang timeouts: a start that lasts longer did not only hang, but trained
RUN = ("-m", "nanotrain_jax.train")
TOKEN = "NANOTRAIN_TOKEN"
MIN_TOKEN, MAX_TOKEN = 16, 4096  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Launch a run; -> its exit code."""
    options, run = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        flags = {"--leader": options.leader, "--hosts": options.hosts, "--host": options.host}
        this_host = ranks.detect(flags)
        if this_host.count > 1 and this_host.coordinator is None:
            raise ValueError(f"{this_host.source} does not give the address of host 0; give {', '.join(flags)}")
        config = model_config.load(run.config, run.overrides)
        check_ranks(config)
        check_numbers(options, config)
        slots = divide(options.processes, config.runtime.simulate, this_host.count, options.max_processes)
        place, _, port = (this_host.coordinator if this_host.count > 1 else f"{LOOPBACK}:0").rpartition(":")
        token = read_token(options.token_file, this_host.count)
        listener = listen(options.bind or interface(place), int(port)) if this_host.index == 0 else None
    except (ValueError, OSError) as error:
        return refuse(error)
    if listener:
        port = listener.getsockname()[1]
        rules = RestartPolicy(
            this_host.count,
            options.max_restarts,
            options.elastic,
            options.join_timeout,
            options.min_processes,
            options.max_processes or (options.min_processes and this_host.count * len(slots)),
            FORGET_FACTOR * (config.runtime.hang_timeout or MIN_TIMEOUT),
        )
        leader = Coordinator(listener, place, token, rules, lambda *left: restarted(config, *left))
        lead = threading.Thread(target=leader.run, daemon=True)
        lead.start()
    command = [sys.executable, *RUN, "--config", run.config, *run.overrides]
    env = {name: value for name, value in os.environ.items() if name != TOKEN}  # workers need no token
    host = Agent(this_host.index, slots, command, env, options.elastic)
    try:
        code = host.run((place, int(port)), token, options.join_timeout)
    except Refused as error:
        return refuse(error)
    if listener:
        lead.join(GRACE)  # wait until all hosts are notified
    return code


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Parse arguments -> options of the launcher, options of the run (config, overrides). Exits with 2 on an error."""
    parser = Parser(
        prog="python -m nanotrain_jax.launch",
        usage="%(prog)s [options] -- --config FILE [section.key=value ...]",
        description="Start the processes of a training run on this host, and restart them after a failure.",
    )
    parser.add_argument(
        "--processes", type=at_least(1), help="processes on this host (default: one per GPU; without GPUs 1)"
    )
    parser.add_argument(
        "--max-restarts",
        type=at_least(0),
        default=3,
        help=f"restart this many times at most (default: %(default)s); after a start that lasted {FORGET_FACTOR} "
        f"runtime.hang_timeout (unset: {FORGET_FACTOR * MIN_TIMEOUT // 60} minutes) restarts count from 0 again",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="after a failure continue on the remaining processes: smaller data axis, same global batch; when a host "
        "returns, save and continue with it",
    )
    parser.add_argument(
        "--min-processes",
        type=at_least(1),
        metavar="N",
        help="elastic: start once N processes can, after --join-timeout, and end with fewer (default: at first all)",
    )
    parser.add_argument(
        "--max-processes",
        type=at_least(1),
        metavar="N",
        help="elastic: run N processes, for which the config is; further hosts are spare (default: those of all hosts)",
    )
    parser.add_argument("--hosts", type=at_least(1), help="number of hosts (default: from Slurm, ..., or 1)")
    parser.add_argument("--host", type=at_least(0), help="index of this host, from 0")
    parser.add_argument("--leader", metavar="HOST:PORT", help="address of the launcher on host 0")
    parser.add_argument(
        "--bind", metavar="ADDRESS", help="address where host 0 listens (default: that of --leader, if it is a number)"
    )
    parser.add_argument(
        "--token-file",
        type=path_argument,
        metavar="FILE",
        help=f"a secret that all hosts share, readable by its owner alone (default: the variable {TOKEN})",
    )
    parser.add_argument(
        "--join-timeout", type=at_least(1), default=300, help="seconds to wait for all hosts (default: %(default)s)"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    run_parser = Parser(prog="... --", add_help=False)
    run_parser.add_argument("--config", required=True)
    run_parser.add_argument("overrides", nargs="*")
    return options, run_parser.parse_intermixed_args(argv[split + 1 :])


def read_token(file: str | None, hosts: int) -> bytes:
    """Return the secret of all launchers of a run: from a file, or the environment; of one host a random one.

    Raises ValueError or OSError, which do not show it.
    """
    if file is None and TOKEN not in os.environ and hosts == 1:
        return secrets.token_bytes(MIN_TOKEN)
    if file is None and TOKEN not in os.environ:
        raise ValueError(
            f"{hosts} hosts without a token; set {TOKEN} to the same secret on all, or give --token-file: "
            "openssl rand -hex 32"
        )
    origin, token = TOKEN, os.environ.get(TOKEN, "").encode()
    if file is not None:
        origin = f"--token-file={file!r}"
        remedy = "give a file with the secret: openssl rand -hex 32"
        with naming(f"{origin} cannot be read", remedy), Path(file).open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o077:
                raise ValueError(f"{origin} can be read by others than its owner; chmod 600")
            token = opened.read(MAX_TOKEN + 1)
    token = token.strip()
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ValueError(f"{origin} has {len(token)} bytes: must be {MIN_TOKEN} to {MAX_TOKEN}; openssl rand -hex 32")
    return token


def interface(place: str) -> str:
    """Return the address where host 0 listens: that of --leader; all interfaces ("") if that is a name, which may be
    another address on host 0 than on the others."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(place))
    return ""


def listen(address: str, port: int) -> socket.socket:
    """Listen for launchers. Raises OSError that names the remedy."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise OSError(
            f"cannot listen at {address or '*'}:{port} ({error.strerror}); give another port with --leader, or the "
            "address of a local interface with --bind"
        ) from None


def check_ranks(config: Config) -> None:
    """Raise ValueError if the config sets what the launcher gives each process."""
    for key in "coordinator", "processes", "process":
        value = getattr(config.runtime, key)
        if value is not None:
            raise ValueError(f"runtime.{key}={value} with the launcher, which sets it for each process; leave it out")


def check_numbers(options: argparse.Namespace, config: Config) -> None:
    """Raise ValueError unless --min-processes and --max-processes fit the other options and the config."""
    least, most = options.min_processes, options.max_processes
    given = {"--min-processes": least, "--max-processes": most}
    key = next((key for key, value in given.items() if value), None)
    if key and not options.elastic:
        raise ValueError(f"{key}={given[key]} without --elastic, which changes the number of processes; add it")
    if least and most and least > most:
        raise ValueError(f"--min-processes={least} is above --max-processes={most}; use a smaller one")
    if least and config.checkpoint.resume == "never":
        raise ValueError(
            f"--min-processes={least} with checkpoint.resume=never: the run saves and resumes when hosts join; use "
            "checkpoint.resume=auto"
        )


def divide(count: int | None, simulate: int, hosts: int, most: int | None = None) -> list[list[str]]:
    """Divide the GPUs of this host among its processes -> CUDA_VISIBLE_DEVICES entries of each (none on a CPU).

    count: processes per host (None: one per GPU, or one). most: processes that run at once (None: those of all hosts).
    Raises ValueError if they do not divide the devices.
    """
    gpus = [] if simulate else ranks.visible_gpus()
    count = count or len(gpus) or 1
    if count > MAX_PROCESSES:
        raise ValueError(f"--processes={count}: must be at most {MAX_PROCESSES}; use one per GPU")
    if len(gpus) % count:
        raise ValueError(f"--processes={count} does not divide the {len(gpus)} GPUs of this host")
    if most and most > count * hosts:
        raise ValueError(f"--max-processes={most}: {hosts} hosts have {count * hosts} processes; use at most that many")
    total = most or count * hosts
    if simulate % total:
        raise ValueError(f"runtime.simulate={simulate} is not divisible by {total} processes; use a multiple")
    each = len(gpus) // count
    return [gpus[i * each : (i + 1) * each] for i in range(count)]


def restarted(config: Config, before: int, left: int, devices: int) -> tuple[int, list[str]]:
    """-> number of processes to restart with, and config overrides for them.

    They resume from the newest checkpoint. Fewer processes than before use a smaller data axis with the same global
    batch, and microbatches of at most the same size per device. left: remaining processes; devices: per process.
    Raises ValueError if no data axis fits.
    """
    overrides = ["checkpoint.resume=auto"] if config.checkpoint.resume == "never" else []
    if left == before:
        return left, overrides
    p = config.parallel
    batch = config.data.batch_size
    chunk = config.model.loss_chunk or 1  # must divide the tokens of a device's microbatch
    devices = config.runtime.simulate // before or devices
    axes = p.axes
    fixed = math.prod(size for size in axes.values() if size > 0)
    axes = {axis: size if size > 0 else before * devices // fixed for axis, size in axes.items()}  # resolve -1
    others = math.prod(axes.values()) // axes["data"]
    for now in range(left, 0, -1):
        data, remainder = divmod(now * devices, others)
        if remainder or not data or batch % (axes["replica"] * data * p.expert):
            continue
        rows = batch // (axes["replica"] * data * p.expert)  # sequences per device
        least = -(-p.microbatches * (before * devices // others) // data)
        fit = [m for m in range(least, rows + 1) if rows % m == 0 and m % axes["pipe"] == 0]
        fit = [m for m in fit if rows // m * config.data.seq_len % chunk == 0]
        if fit:
            overrides += [f"runtime.simulate={now * devices}"] if config.runtime.simulate else []
            return now, [*overrides, f"parallel.data={data * p.expert}", f"parallel.microbatches={fit[0]}"]
    raise ValueError(
        f"{left} of {before} processes remain: no parallel.data on their devices divides data.batch_size={batch}"
    )


if __name__ == "__main__":
    sys.exit(shell.run(main))
