"""What a command owes the shell: one line after Ctrl-C, outputs that may be closed, a line before slow imports.

Imports only the standard library, since a command calls `begin` before its other imports:

    if __name__ == "__main__":
        from nanotrain_jax.run import shell

        shell.begin()
    import jax
    ...
    if __name__ == "__main__":
        sys.exit(shell.run(main))
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")  # see ranks.py
PROCESS = "runtime.process="
HELP = ("-h", "--help")
STREAMS = ("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class LastingOutput(io.TextIOWrapper):
    """A stream that outlives its reader: once its pipe is closed it writes to nowhere."""

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        try:
            return super().write(text)
        except BrokenPipeError:
            to_nowhere(self)
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what was written."""
        try:
            super().flush()
        except BrokenPipeError:
            to_nowhere(self)


def to_nowhere(stream: TextIO) -> None:
    """Connect a stream to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def begin(finishes: bool = False) -> None:
    """Prepare for the shell: call before slow imports, then `run`.

    Ctrl-C ends the imports with one line. Standard streams that the shell closed (`>&-`) are the null device. finishes:
    the command ends its work also if nobody reads its output any more (`| head`); without it, it stops there.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    closed = [stream for stream in STREAMS if getattr(sys, stream[0]) is None]
    for name, number, mode in closed:
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if finishes:
        sys.stdout, sys.stderr = map(_lasting, (sys.stdout, sys.stderr))


def _lasting(stream: TextIO) -> LastingOutput:
    encoding, errors, by_line = stream.encoding, stream.errors, stream.line_buffering
    return LastingOutput(stream.detach(), encoding, errors, line_buffering=by_line)


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def run(main: Callable[[], int]) -> int:
    """Run a command -> its exit code: 130 after Ctrl-C, with one line; 0 if nobody reads its output any more."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        return 0


def announce(arguments: Sequence[str], to: TextIO | None = None, env: Mapping[str, str] = os.environ) -> None:
    """Print that JAX is being loaded, in process 0 only and not for --help. to: default stdout."""
    ranks = [env[key] for key in RANKS if key in env][:1]
    ranks += [text.removeprefix(PROCESS) for text in arguments if text.startswith(PROCESS)]
    if set(ranks) <= {"0"} and not set(HELP) & set(arguments):
        print("loading JAX ...", file=to or sys.stdout, flush=True)


def stderr() -> TextIO:
    """Return the standard error stream as a file of the system; another stream may stand in for it."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return sys.__stderr__
    return sys.stderr
