"""Progress line that a command prints before its slow imports. Imports only the standard library."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")  # see processes.py
PROCESS = "runtime.process="
HELP = ("-h", "--help")


def announce(arguments: Sequence[str], to: TextIO = sys.stdout, env: Mapping[str, str] = os.environ) -> None:
    """Print that JAX is being loaded, in process 0 only and not for --help."""
    ranks = [env[key] for key in RANKS if key in env][:1]
    ranks += [text.removeprefix(PROCESS) for text in arguments if text.startswith(PROCESS)]
    if set(ranks) <= {"0"} and not set(HELP) & set(arguments):
        print("loading JAX ...", file=to, flush=True)
