"""flip_bits.py: how it judges a trial, that it flips one bit, and the command itself."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "prove" / "flip_bits.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
flip_bits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(flip_bits)

SAME, OTHER = {"losses": [1.0]}, {"losses": [2.0]}
UNDISTURBED = flip_bits.Ran(0, "resumed from step 6\nstep 7/9", "", SAME)


@pytest.mark.parametrize(
    ("ran", "outcome"),
    [
        ((0, "resumed from step 6", "", SAME), "same"),
        ((0, "resumed from step 6", "", OTHER), "SILENT"),
        ((0, "resumed from step 6", "", None), "SILENT"),
        ((0, "warning: skipped checkpoint 6\nresumed from step 4", "", SAME), "recovered"),
        ((0, "resumed from step 6\nchanged since the checkpoint: optimizer.lr", "", OTHER), "reported"),
        ((2, "", "error: disk/moments is damaged\n", None), "refused"),
        ((2, "", "error: something is damaged\n", None), "FAILED"),  # names nothing
        ((1, "", "Traceback\nValueError: disk/moments\n", None), "FAILED"),
        ((-11, "", "", None), "FAILED"),
        ((None, "", "", None), "FAILED"),
    ],
)
def test_outcomes(ran, outcome):
    assert flip_bits.judged(flip_bits.Ran(*ran), UNDISTURBED, Path("disk/moments"))[0] == outcome


def test_one_bit_of_one_file_of_the_kind_is_flipped(tmp_path):
    before = {"disk/a": b"0123", "disk/manifest.json": b"{}", "disk/empty": b"", "other": b"xy"}
    (tmp_path / "disk").mkdir()
    for trial in range(20):
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)
        path, _ = flip_bits.flip(tmp_path, flip_bits.KINDS["NVMe files"], random.Random(trial))
        assert str(path) == "disk/a"
        after = {name: (tmp_path / name).read_bytes() for name in before}
        changed = int.from_bytes(after.pop("disk/a")) ^ int.from_bytes(before["disk/a"])
        assert changed.bit_count() == 1
        assert after == {name: content for name, content in before.items() if name != "disk/a"}


@pytest.mark.long
def test_flips_of_token_shards_are_refused():
    command = [sys.executable, SCRIPT, "--flips", "2", "--only", "shards"]  # it forks: not where JAX has threads
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 of 2 flips were silent or failed" in ran.stdout
