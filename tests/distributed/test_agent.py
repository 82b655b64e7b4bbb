"""Errors of several processes and the agent of a host, without training: which exit code, who is left out, the end."""

import errno

import jax
import pytest
from launching import Launched

from nanotrain_jax.distributed import processes
from nanotrain_jax.distributed.exit_codes import HUNG


@pytest.mark.parametrize(
    ("failures", "number"),
    [(["", f"{errno.ESTALE} stale"], errno.ESTALE), ([f"{errno.EIO} bad disk", ""], errno.EIO)],
)
def test_a_disk_that_fails_for_all_processes_blames_none(failures, number, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(processes, "all_gather_text", lambda text: failures)
    with pytest.raises(OSError) as raised:
        processes.on_all_processes(lambda: None)
    assert raised.value.errno == number
    assert processes.is_transient(raised.value)  # `train` raises it again, so a launcher restarts
    assert processes.exit_code(raised.value) == HUNG
    assert processes.exit_code(OSError(number, "of one process")) == 1
    assert processes.exit_code(RuntimeError("UNAVAILABLE: a peer")) == HUNG


def test_an_elastic_run_never_leaves_out_all_its_processes(tmp_path):
    run = Launched(tmp_path, {(0, 0): "sys.exit(1)"}, "--processes", "1", "--elastic")
    codes, _, err = run.wait_for_exit()
    assert codes == [0]
    assert ") exited with code 1; restart 1 of 3" in err
    assert [start["WORLD_SIZE"] for start in run.log()[0]] == ["1", "1"]
