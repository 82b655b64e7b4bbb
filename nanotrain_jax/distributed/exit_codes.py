"""Exit codes of training and of its launcher, beside 0 (done) and 1 (any other failure).

A launcher passes FINAL on, and restarts after 1 and HUNG; with --elastic it drops no process that exits with HUNG.
"""

WRONG_REQUEST = 2
HUNG = 3  # no failure of this process alone: a hang timeout, another process is lost, or all met a failure together
ENDED = 4  # the run stopped on purpose: it diverged, or hardware computes wrong
STOPPED = 75  # stopped by a signal before the last step (EX_TEMPFAIL of sysexits.h)
FINAL = WRONG_REQUEST, ENDED  # it would end so again
