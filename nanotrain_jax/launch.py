"""`python -m nanotrain_jax.launch [--processes N] [options] -- --config FILE [section.key=value ...]`

Starts the processes of a run on this host, shows what they print, ends all when one fails, and starts all again from
the newest good checkpoint. On several hosts there is one launcher each, with the same arguments; that of host 0 leads.

Exit codes: 0 done; 2 if the request is wrong; 75 if a launcher was told to stop (SIGTERM, Ctrl-C) and all processes
have saved, or there is at least an older checkpoint: the same command goes on; 1 anything else: it failed more often
than --max-restarts, hosts are missing, it was told to stop a second time.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from nanotrain_jax import processes
from nanotrain_jax.config import Config
from nanotrain_jax.runtime import request
from nanotrain_jax.runtime.host import Host
from nanotrain_jax.runtime.leader import LOOPBACK, Leader, Rules
from nanotrain_jax.runtime.link import GRACE

MOST = 1024  # processes of a host
RUN = ("-m", "nanotrain_jax.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, and -> the run's exit code."""
    options, run = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        given = {"--leader": options.leader, "--hosts": options.hosts, "--host": options.host}
        here = processes.here(given)
        if here.count > 1 and here.coordinator is None:
            raise ValueError(f"{here.source} does not say where host 0 is; give {', '.join(given)}")
        config = request.load(run.config, run.overrides)
        slots = divide(options.processes, config.runtime.simulate, here.count)
        place, _, port = (here.coordinator if here.count > 1 else f"{LOOPBACK}:0").rpartition(":")
        listener = socket.create_server(("" if here.count > 1 else place, int(port))) if here.index == 0 else None
    except (ValueError, OSError) as error:
        return request.refuse(error)
    if listener:
        port = listener.getsockname()[1]
        rules = Rules(here.count, options.max_restarts, options.elastic, options.join_timeout)
        leader = Leader(listener, place, rules, lambda *left: restarted(config, *left))
        lead = threading.Thread(target=leader.run, daemon=True)
        lead.start()
    command = [sys.executable, *RUN, "--config", run.config, *run.overrides]
    host = Host(here.index, slots, command, os.environ, options.elastic)
    code = host.run((place, int(port)), options.join_timeout)
    if listener:
        lead.join(GRACE)  # until all hosts have been told
    return code


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """-> the launcher's own options, and the run's: config, overrides. Exits with 2 if they are wrong."""
    parser = request.Parser(
        prog="python -m nanotrain_jax.launch",
        usage="%(prog)s [options] -- --config FILE [section.key=value ...]",
        description="Start, watch and restart the processes of a run.",
    )
    parser.add_argument("--processes", type=_at_least(1), help="on this host; default: one per GPU, or 1")
    parser.add_argument("--max-restarts", type=_at_least(0), default=3, help="default: %(default)s")
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without what was lost: on fewer processes, a smaller data axis, the same batch",
    )
    parser.add_argument("--hosts", type=_at_least(1), help="number of hosts; default: as Slurm, ... say, or 1")
    parser.add_argument("--host", type=_at_least(0), help="which of them this is, from 0")
    parser.add_argument("--leader", help="host:port of host 0, where the launchers meet")
    parser.add_argument("--join-timeout", type=_at_least(1), default=300, help="seconds to wait for hosts; %(default)s")
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    of_run = request.Parser(prog="... --", add_help=False)
    of_run.add_argument("--config", required=True)
    of_run.add_argument("overrides", nargs="*")
    return options, of_run.parse_intermixed_args(rest)


def _at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a number. It raises ArgumentTypeError."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least} (at most 999999)")
        return int(text)

    return number


def divide(count: int | None, simulate: int, hosts: int) -> list[list[str]]:
    """The GPUs (as CUDA_VISIBLE_DEVICES names them; none on a CPU) of each process of this host.

    count: processes on each of some hosts (None: one per GPU, or one). Raises ValueError if it does not come out even.
    """
    gpus = [] if simulate else processes.gpus_here()
    count = count or len(gpus) or 1
    if count > MOST:
        raise ValueError(f"--processes {count}: a host starts at most {MOST}; use one per GPU, or fewer")
    if len(gpus) % count:
        raise ValueError(f"--processes {count} does not divide the {len(gpus)} GPUs of this host")
    if simulate % (count * hosts):
        raise ValueError(
            f"runtime.simulate={simulate} devices cannot be divided among {count * hosts} processes; use a multiple"
        )
    each = len(gpus) // count
    return [gpus[i * each : (i + 1) * each] for i in range(count)]


def restarted(config: Config, before: int, left: int, devices: int) -> tuple[int, list[str]]:
    """-> how many of the processes that are left to use, and overrides for them: from the newest checkpoint, and where
    they are fewer than before on a smaller data axis, with the same batch.

    A device's microbatch stays as large, or becomes smaller. devices: of each process. Raises ValueError if no data
    axis fits.
    """
    on = ["checkpoint.resume=auto"] if config.checkpoint.resume == "never" else []
    if left == before:
        return left, on
    p = config.parallel
    batch = config.data.batch_size
    chunk = config.model.loss_chunk or 1  # divides the tokens of a device's microbatch
    devices = config.runtime.simulate // before or devices
    axes = p.axes
    given = math.prod(size for size in axes.values() if size > 0)
    axes = {axis: size if size > 0 else before * devices // given for axis, size in axes.items()}  # -1: the rest
    others = math.prod(axes.values()) // axes["data"]
    for now in range(left, 0, -1):
        data, remainder = divmod(now * devices, others)
        if remainder or not data or batch % (axes["replica"] * data):
            continue
        rows = batch // (axes["replica"] * data)  # of a device
        least = -(-p.microbatches * (before * devices // others) // data)
        fit = [m for m in range(least, rows + 1) if rows % m == 0 and m % axes["pipe"] == 0]
        fit = [m for m in fit if rows // m * config.data.seq_len % chunk == 0]
        if fit:
            on += [f"runtime.simulate={now * devices}"] if config.runtime.simulate else []
            return now, [*on, f"parallel.data={data}", f"parallel.microbatches={fit[0]}"]
    raise ValueError(
        f"{left} of {before} processes are left: no data axis over their devices divides data.batch_size={batch} evenly"
    )


if __name__ == "__main__":
    sys.exit(main())
