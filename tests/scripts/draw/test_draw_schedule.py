"""draw_schedule.py: pictures, statistics, schedules of your own, and errors."""

import collections
import importlib.util
import re

import pytest
from conftest import ROOT
from schedule_cases import GOOD, UNEQUAL

from nanotrain_jax.parallel.pipeline import schedule_text
from nanotrain_jax.parallel.pipeline.schedule import make

spec = importlib.util.spec_from_file_location("draw_schedule", ROOT / "scripts" / "draw" / "draw_schedule.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
SVG_TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


@pytest.mark.parametrize("name", ["zero_bubble", "interleaved"])
def test_the_picture_shows_every_microbatch_of_every_stage(name, tmp_path, capsys):
    P, M, C = 3, 6, 2 if name == "interleaved" else 1
    arguments = ["--schedule", name, "--stages", str(P), "--microbatches", str(M), "--chunks", str(C)]
    assert script.main([*arguments, "--costs", "1,1.3,0.9", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert schedule_text.draw(make(name, P, M, C)) in printed
    stem = f"{name}_p3_m6" + ("_c2" if C > 1 else "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{stem}.png", f"{stem}.svg"]
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"{stem}.png").stat().st_size > 10_000
    texts = collections.Counter(SVG_TEXT.findall((tmp_path / f"{stem}.svg").read_text()))
    kinds = 3 if name == "zero_bubble" else 2
    for m in range(M):
        assert texts[str(m)] >= P * C * kinds  # a bar for each kind of work; axes have numbers too
    stats = schedule_text.stats(make(name, P, M, C), *UNEQUAL)
    share = f"{stats.bubble_fraction:.1%}"
    assert share in printed
    assert any(share in text for text in texts)


def test_a_schedule_from_a_file_is_drawn_and_one_out_of_order_is_marked(tmp_path, capsys):
    table = tmp_path / "mine.txt"
    table.write_text(GOOD)
    assert script.main(["--text", str(table), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "mine_p2_m3.svg").exists()
    table.write_text(GOOD.replace("| .  F0 F1B0", "| F0 .  F1B0"))
    capsys.readouterr()
    assert script.main(["--text", str(table), "--out", str(tmp_path / "never")]) == 2
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
        ("--stages 4 --microbatches 4", "give --schedule or --text"),
        ("--schedule gpipe --text table.txt", "give --schedule or --text, not both"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,2", "--costs=1,2: must be three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,x,1", "--costs=1,x,1: must be three positive numbers"),
        ("--schedule gpipe --stages 4 --microbatches 8 --costs 1,0,1/0", "--costs=1,0,1/0: must be three positive"),
        ("--text no/such/file.txt", "[Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_no_picture(arguments, message, tmp_path, capsys):
    assert script.main([*arguments.split(), "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not list(tmp_path.iterdir())
