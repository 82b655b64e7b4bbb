"""Signals that end a run: all processes learn of them before the same step, so that they can save a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils

from nanotrain_jax.distributed.ranks import STOPS, launcher_pid


@contextmanager
def until_stopped() -> Iterator[Callable[[int], bool]]:
    """Yield stopped(step), to call before each step: it returns True after a SIGTERM, Ctrl-C, SIGUSR1 or SIGHUP.

    With several processes it returns True on all of them before the same step, whichever received the signal. A second
    signal has its usual effect, unless a launcher handles it.
    """
    received = []

    def handle(number, frame):
        received.append(number)
        if launcher_pid() is None:
            signal.signal(number, before[number])

    def stopped(step: int) -> bool:
        if jax.process_count() == 1:
            return bool(received)
        if received:  # jax.distributed handles SIGTERM and notifies all processes
            received.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return multihost_utils.reached_preemption_sync_point(step)

    heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
