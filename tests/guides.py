"""Estimates in the guides, held to golden/estimates.json, which `python scripts/draw/tables.py` turns into tables.

After a change to the estimates: REWRITE_GOLDEN=1 pytest -n 0 -k shown_in_the_guides, then python scripts/draw/tables.py
"""

import json
import os
from pathlib import Path

import pytest

ESTIMATES = Path(__file__).parent / "golden" / "estimates.json"


def hold(table, row, values):
    """Compare one row with the golden file, numbers to 1e-9; with REWRITE_GOLDEN set, write it there instead."""
    golden = json.loads(ESTIMATES.read_text()) if ESTIMATES.exists() else {}
    if os.environ.get("REWRITE_GOLDEN"):
        golden.setdefault(table, {})[row] = values
        ESTIMATES.write_text(json.dumps(golden, indent=1) + "\n")
        return
    expected = golden[table][row]
    assert set(values) == set(expected)
    for key, value in values.items():
        assert value == (expected[key] if isinstance(value, str) else pytest.approx(expected[key], rel=1e-9)), key


def hold_rows(table, names):
    """Compare the names of all rows with the golden file, so that no row outlives its case."""
    assert set(json.loads(ESTIMATES.read_text())[table]) == set(names)
