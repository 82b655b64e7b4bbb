"""Pictures of schedules, and what the script that draws them refuses."""

import collections
import importlib.util
import re
from pathlib import Path

import pytest
from schedule_cases import GOOD, UNEQUAL

from nanotrain_jax.parallel import chart
from nanotrain_jax.parallel.schedule import make

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("draw_schedule", ROOT / "scripts" / "draw_schedule.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
SVG_TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


@pytest.mark.parametrize("name", ["zero_bubble", "interleaved"])
def test_the_picture_shows_every_microbatch_of_every_stage(name, tmp_path, capsys):
    P, M, C = 3, 6, 2 if name == "interleaved" else 1
    arguments = ["--schedule", name, "--stages", str(P), "--microbatches", str(M), "--chunks", str(C)]
    assert script.main([*arguments, "--costs", "1,1.3,0.9", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert chart.draw(make(name, P, M, C)) in printed
    stem = f"{name}_p3_m6" + ("_c2" if C > 1 else "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{stem}.png", f"{stem}.svg"]
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"{stem}.png").stat().st_size > 10_000
    texts = collections.Counter(SVG_TEXT.findall((tmp_path / f"{stem}.svg").read_text()))
    kinds = 3 if name == "zero_bubble" else 2
    for m in range(M):
        assert texts[str(m)] >= P * C * kinds  # a bar for each kind of work; axes have numbers too
    found = chart.stats(make(name, P, M, C), *UNEQUAL)
    share = f"{found.bubble_fraction:.1%}"
    assert share in printed
    assert any(share in text for text in texts)


def test_one_s_own_table_can_be_drawn_and_one_that_is_out_of_order_is_marked(tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text(GOOD)
    assert script.main(["--text", str(mine), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "mine_p2_m3.svg").exists()
    mine.write_text(GOOD.replace("| .  F0 F1B0", "| F0 .  F1B0"))
    capsys.readouterr()
    assert script.main(["--text", str(mine), "--out", str(tmp_path / "never")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: stage 1, tick 0: F0 is too early; ")
    assert shown.err.splitlines()[-1] == "     ^^"
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule zb_h2 --stages 4 --microbatches 6", "zb_h2: 6 microbatches are too few for 4 stages"),
        ("--schedule gpipe --stages 4", "--schedule needs --stages and --microbatches"),
        ("--stages 4 --microbatches 4", "give --schedule, or a table with --text"),
        ("--schedule gpipe --text table.txt", "give --schedule, or a table with --text, not both"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,2", "costs='1,2' are not three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,x,1", "costs='1,x,1' are not three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,0,1/0", "costs='1,0,1/0' are not three positive"),
        ("--text no/such/file.txt", "[Errno 2] No such file or directory"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert script.main([*arguments.split(), "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not list(tmp_path.iterdir())
