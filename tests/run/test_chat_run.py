"""Runs on conversations, from the command: epochs, resume in mid-epoch, what the folder keeps, what people see."""

import io
import re
from itertools import accumulate

import pytest
import yaml
from chat_data import CHATML, talk, write_rows, write_tokenizer
from command import losses, same, saved_state
from rich.console import Console

from nanotrain_jax import generate, train
from nanotrain_jax.config import load as request
from nanotrain_jax.run import show_data

TEMPLATE = CHATML.replace("<|im_end|>\\n", "<|im_end|>")


@pytest.fixture
def config_file(tmp_path):
    """40 short conversations; the template of data.chat_template, not of the tokenizer."""
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    rows = [{"messages": talk(f"What is {i}?", f"{i} is {'odd' if i % 2 else 'even'}.")} for i in range(40)]
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    tree = {
        "model": {"num_layers": 1, "d_model": 32, "num_heads": 4, "d_ff": 64},
        "parallel": {"data": 2, "tensor": 4, "sequence_parallel": False},
        "precision": {"compute": "float32"},
        "data": {"source": source, "tokenizer": str(folder), "chat_template": str(tmp_path / "mine.jinja")}
        | {"batch_size": 4, "seq_len": 128, "val_fraction": 0.1},
        "optimizer": {"schedule": "constant"},
        "train": {"epochs": 1.5, "eval_every": 5},
        "checkpoint": {"every": 4},
        "logging": {"tensorboard": False, "progress": "lines"},
        "runtime": {"simulate": 8, "compile_cache": False},
    }
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def main(config_file, run, *overrides):
    return train.main(["--config", str(config_file), f"logging.dir={config_file.parent / run}", *overrides])


def test_a_run_of_epochs_stopped_in_mid_epoch_is_resumed_bitwise(config_file, monkeypatch, capsys):
    folder = config_file.parent
    assert main(config_file, "whole") == 0
    told = capsys.readouterr().out
    assert "40 examples read" in told and "train.epochs=1.5: 5 steps" in told and "done at step 5 of 5" in told
    assert f"generate --run {folder}/whole --chat" in told
    assert main(config_file, "parts", "train.epochs=0.8") == 0
    assert main(config_file, "parts") == 0
    told = capsys.readouterr().out
    assert "resumed from step 3" in told and "train.epochs 0.8 -> 1.5" in told and "may repeat" not in told
    assert losses(folder / "parts")[5] == losses(folder / "whole")[5]
    assert losses(folder / "whole")[5][1] > 0  # of the held-out answers
    same(saved_state(folder / "parts")[1], saved_state(folder / "whole")[1])

    kept = yaml.safe_load((folder / "whole" / "config.yaml").read_text())
    assert kept["train"]["epochs"] == 1.5 and "steps" not in kept["train"]
    assert request.load(folder / "whole" / "config.yaml").data.attend_across_documents is False
    assert train.main(["--config", str(folder / "whole" / "config.yaml")]) == 0
    assert "done at step 5 of 5" in capsys.readouterr().out

    for path in [*(folder / "tokenizer").iterdir(), folder / "mine.jinja"]:  # the folder of the run has all it needs
        path.unlink()
    assert (folder / "whole" / "chat_template.jinja").read_text() == TEMPLATE
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3?\n"))
    asked = []
    monkeypatch.setattr(generate, "shown", lambda session, text, limit: asked.append(text.decode(text.prompt)) or "")
    assert generate.main(["--run", str(folder / "whole"), "--chat", "--tokens", "4"]) == 0
    assert asked == ["<|im_start|>user\nWhat is 3?<|im_end|><|im_start|>assistant\n"]


def shown(start, number):
    return (
        f"--- {start}: <|im_start|>user\u21b5\nWhat is {number}?<|im_end|><|im_start|>assistant\u21b5\n"
        f"[[{number} is {'odd' if number % 2 else 'even'}.<|im_end|>]]\n"
    )


def test_rows_are_shown_with_what_is_learned(config_file, capsys):
    assert main(config_file, "shown", "--show-data", "2") == 0
    told = capsys.readouterr().out
    assert "40 examples read" in told
    numbers = [int(number) for number in re.findall(r"What is (\d+)", told)]
    learned = [len(f"{n} is {'odd' if n % 2 else 'even'}.") + 1 for n in numbers]
    sizes = [len(f"user\nWhat is {n}?assistant\n") + 3 + count for n, count in zip(numbers, learned, strict=True)]
    expected = ""
    for row, mine in (1, slice(0, 3)), (2, slice(3, 6)):
        count = sum(sizes[mine])
        expected += f"row {row}: 3 examples, {count} tokens, {sum(learned[mine])} learned, {128 - count} of padding\n"
        expected += "".join(map(shown, accumulate([0, *sizes[mine][:2]]), numbers[mine]))
    assert expected in told
    assert told.endswith("--- 17: an example from position 17 on\n")
    assert not (config_file.parent / "shown").exists()


def test_colours_tell_what_is_learned_and_special(config_file):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", no_color=False, soft_wrap=True)
    show_data.show(request.load(config_file), 1, console)
    shown = out.getvalue()
    assert "\x1b[2;35m<|im_start|>" in shown or "\x1b[2;4;35m<|im_start|>" in shown
    for styled in "\x1b[30;42m", "\x1b[30;102m", "\x1b[1;35;42m<|im_end|>", "\x1b[2mW":
        assert styled in shown, styled
    assert "[[" not in shown


def test_text_is_shown_too_and_what_is_no_text_is_refused(config_file, capsys, text_files):
    text = [f"data.source='text:{text_files}'", "data.tokenizer=bytes", "data.seq_len=12"]
    assert main(config_file, "shown", "--show-data", "2", *text) == 0
    told = capsys.readouterr().out
    assert "row 2: 1 example, 13 tokens, 12 learned, 0 of padding\n--- 0: " in told
    assert main(config_file, "shown", "--show-data", "2", "data.source=synthetic", "model.vocab_size=9") == 2
    assert "--show-data with data.source='synthetic', which is not text" in capsys.readouterr().err
