"""Flip bits of files that a run reads, one at a time, and check that none changes the result without a word.

python scripts/prove/flip_bits.py [--flips 200] [--seed 0] [--only KIND]

Small runs are prepared once. Each trial copies their folder, flips one random bit of one random file (files of a kind
are equally likely, kinds take turns), and starts or resumes a run that reads it, in a process of its own. Outcomes:

    refused     exit code 1, 2 or 4, with one line that names a file, folder or key
    recovered   the losses and state of an undisturbed run, bitwise, with a line about what was found
    reported    other losses or another state, with a line about what changed
    same        the losses and state of an undisturbed run, without a line: the bit decides nothing
    SILENT      other losses or another state, without a line
    FAILED      a traceback, a crash or a hang

Exit code 1 if a flip is silent or fails. Nobody can know of a bit of a file that has no checksum, in the first run that
reads it: text, conversations and configs (trials resume a run, whose checkpoint knows them), and model folders that
others wrote (`--only foreign` shows it).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot  # noqa: F401 (a run imports it at its end; what is imported here is so once)
import numpy as np
import orbax.checkpoint as ocp
import yaml
from rich.console import Console
from rich.table import Table

from nanotrain_jax import convert, prepare, train
from nanotrain_jax.checkpoint import checksums, directory
from nanotrain_jax.config.schema import Config
from nanotrain_jax.run import curves

FIRST, STEPS = 6, 9  # of a prepared run, of the run that continues it
LIMIT = 300  # seconds of a trial
# A line names a key of a config.
KEY = re.compile(rf"\b({'|'.join(Config.model_fields)})\.\w+|unknown (key|section)|YAML")
BAD = "SILENT", "FAILED"
OUTCOMES = "refused", "recovered", "reported", "same", *BAD
# Lines of a run about what it found.
SAID = re.compile(r"(?i)warning|changed since|differ|resumed from|starts |rebuilt|jumps|invalid|reused|initialized")
CONFIG = {
    "model": {"family": "llama", "num_layers": 1, "d_model": 32, "num_heads": 4, "d_ff": 64},
    "parallel": {"data": 1, "persist_below": 0},
    "precision": {"compute": "float32"},
    "data": {"source": "tokens:tokens", "batch_size": 4, "seq_len": 64, "val_fraction": 0},
    "optimizer": {"lr": 1e-3, "warmup_steps": 2, "decay_steps": STEPS},
    "train": {"steps": STEPS, "seed": 1},
    "checkpoint": {"every": 2},
    "logging": {"tensorboard": False},
}
FROM_MODEL = {"model": None, "checkpoint": {"every": 2, "resume": "hf:model"}}
TEXT = CONFIG["data"] | {"source": "text:texts/*.txt"}
CHAT = CONFIG["data"] | {"chat_template": "chat.jinja"}
RUNS: dict[str, dict] = {  # name of a run -> its sections that differ
    "tokens": {},
    "nvme": {"memory": {"offload_optimizer": "nvme", "nvme_dir": "disk"}},
    "local": {"checkpoint": {"every": 4, "local_dir": "local", "local_every": 1}},
    "text": FROM_MODEL | {"data": TEXT},
    "chat": FROM_MODEL | {"data": CHAT | {"source": "chat:talk.jsonl"}},
    "pairs": FROM_MODEL
    | {"data": CHAT | {"source": "pairs:pairs.jsonl"}, "train": {"steps": STEPS, "objective": {"kind": "dpo"}}},
    "adapters": {"model": None, "data": TEXT}
    | {"train": {"steps": STEPS, "lora": {"rank": 2}}, "checkpoint": {"every": 2, "resume": "hf:base"}},
    "first": {"data": CONFIG["data"]},
    "start": FROM_MODEL | {"data": TEXT},
    "foreign": FROM_MODEL | {"checkpoint": {"every": 2, "resume": "hf:base"}},
}
RESUMED = "tokens", "nvme", "local", "text", "chat", "pairs", "adapters"  # the others start in a trial
CHECKPOINTS, HOMES = "runs/tokens/checkpoints", "homes"


class Kind(NamedTuple):
    """Files of a kind."""

    run: str  # that reads them
    globs: tuple[str, ...]
    without: str = "^$"  # regular expression of names that are of another kind


KINDS = {
    "checkpoint: arrays": Kind("tokens", (f"{CHECKPOINTS}/{FIRST}/state/**/d/*",)),
    "checkpoint: metadata": Kind("tokens", (f"{CHECKPOINTS}/{FIRST}/**/*",), "/d/"),
    "checkpoint: checksums": Kind("tokens", (f"{CHECKPOINTS}/checksums/{FIRST}/*",)),
    "checkpoint: array by array": Kind("nvme", (f"runs/nvme/checkpoints/arrays/{FIRST}/**/*",)),
    "NVMe files": Kind("nvme", ("disk/*",), "manifest|lock"),
    "NVMe manifest": Kind("nvme", ("disk/manifest.json",)),
    "local copies": Kind("local", ("local/**/*", "runs/local/checkpoints/.run")),
    "token shards": Kind("first", ("tokens/[0-9]*",)),
    "token header, tokenizer": Kind("first", ("tokens/*.json",), r"/\d+\.json$"),
    "model: safetensors": Kind("start", ("model/*.safetensors",)),
    "model: config, tokenizer, checksums": Kind("start", ("model/*.json",)),
    "base of adapters": Kind("adapters", ("base/*",)),
    "config of a resumed run": Kind("tokens", ("tokens.yaml",)),
    "text": Kind("text", ("texts/*",)),
    "conversations, template": Kind("chat", ("talk.jsonl", "chat.jinja")),
    "pairs, reference": Kind("pairs", ("pairs.jsonl", "runs/pairs/reference.npz")),
    "compiled programs": Kind("tokens", (f"{HOMES}/tokens/.cache/nanotrain_jax/*-cache",)),
    "logs of the run": Kind("tokens", ("runs/tokens/*", "runs/tokens/processes/*")),
}
FOREIGN = Kind("foreign", ("base/*.safetensors",))


class Ran(NamedTuple):
    """How a run ended. result: its losses and the checksums of its last state; None: there is no last checkpoint."""

    code: int | None  # None: it did not end
    out: str
    err: str
    result: dict | None

    @property
    def said(self) -> set[str]:
        """Lines about what it found."""
        return {line for line in f"{self.out}\n{self.err}".splitlines() if SAID.search(line)}


def main(argv: Sequence[str] | None = None) -> int:
    """Flip bits and print a table; -> 1 if a flip was silent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="KIND", help="kinds with this word in their names; foreign")
    options = parser.parse_args(argv)
    kinds = {"foreign": FOREIGN} if options.only == "foreign" else {k: v for k, v in KINDS.items() if options.only in k}
    if not kinds:
        parser.error(f"--only {options.only}: no such kind; use a word of {', '.join(KINDS)}")
    console, rng = Console(highlight=False, soft_wrap=True), random.Random(options.seed)
    counts: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        prepared, work = Path(folder) / "prepared", Path(folder) / "trial"
        prepared.mkdir()
        runs = {kind.run for kind in kinds.values()}
        make(prepared, runs)
        undisturbed = {}
        for name in sorted(runs):
            copy(prepared, work)
            undisturbed[name] = started(work, train.main, "--config", f"{name}.yaml", run=name)
            shutil.copytree(work / HOMES, prepared / HOMES, dirs_exist_ok=True)
        broken = [name for name, ran in undisturbed.items() if ran.code or ran.result is None]
        if broken:
            console.print(f"the undisturbed run {broken[0]} failed: {undisturbed[broken[0]].err}")
            return 1
        for number in range(options.flips):
            name = [*kinds][number % len(kinds)]
            run = kinds[name].run
            copy(prepared, work)
            path, bit = flip(work, kinds[name], rng)
            ran = started(work, train.main, "--config", f"{run}.yaml", run=run)
            outcome, line = judged(ran, undisturbed[run], path)
            counts[name][outcome] += 1
            console.print(f"{number}  {name}: {path}, {bit}: {outcome}  {line[:300]}", markup=False)
    table = Table("files", *OUTCOMES)
    total = sum(counts.values(), Counter())
    for name, found in [*counts.items(), ("all", total)]:
        table.add_row(name, *(str(found[outcome]) for outcome in OUTCOMES))
    console.print(table)
    silent = sum(total[outcome] for outcome in BAD)
    console.print(f"{silent} of {total.total()} flips were silent or failed")
    return int(silent > 0)


def make(at: Path, runs: set[str]) -> None:
    """Prepare what some runs read: text, tokens, models, conversations, configs, and the first steps."""
    (at / "texts").mkdir()
    for path in sorted(Path(__file__).parent.glob("*.py"))[:4]:
        (at / "texts" / f"{path.stem}.txt").write_text(path.read_text())
    talks = [
        [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}"}] for i in range(40)
    ]
    (at / "talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    rows = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(40)]
    (at / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    (at / "chat.jinja").write_text(turns + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    for name, sections in RUNS.items():
        tree = {k: v for k, v in (CONFIG | sections).items() if v is not None}
        tree["logging"] = {"dir": f"runs/{name}"} | tree["logging"]
        (at / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    texts = [f"texts/{path.name}" for path in sorted((at / "texts").iterdir())]
    words = "--tokenizer", "train-bpe:300", "--out", "tokens", "--workers", "1", "--val-fraction", "0"
    done(at, prepare.main, *texts, *words)
    done(at, train.main, "--config", "tokens.yaml", f"train.steps={FIRST}")
    done(at, convert.main, "--run", "runs/tokens", "--to", "model")
    shutil.copytree(at / "model", at / "base")
    (at / "base" / checksums.OF_FOLDER).unlink()  # as of a folder that others wrote
    for name in [name for name in RESUMED[1:] if name in runs]:
        done(at, train.main, "--config", f"{name}.yaml", f"train.steps={FIRST}")
    for part in (*directory.parts(FIRST), f"{directory.SUMS}/{FIRST}"):  # the local copies are newer
        shutil.rmtree(at / "runs/local/checkpoints" / part, ignore_errors=True)


def done(at: Path, command: Callable, *arguments: str) -> None:
    """Run a command. Raises RuntimeError if it fails."""
    ran = started(at, command, *arguments)
    if ran.code:
        raise RuntimeError(f"{command.__module__} {' '.join(arguments)}: {ran.err}")


def copy(prepared: Path, work: Path) -> None:
    """Replace a folder by a copy of what is prepared."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(prepared, work)


def flip(at: Path, kind: Kind, rng: random.Random) -> tuple[Path, str]:
    """Flip a bit of a file -> its path below the folder, and which bit."""
    found = {path.relative_to(at) for glob in kind.globs for path in at.glob(glob) if path.is_file()}
    files = sorted(path for path in found if (at / path).stat().st_size and not re.search(kind.without, f"/{path}"))
    path = rng.choice(files)
    content = bytearray((at / path).read_bytes())
    byte, bit = rng.randrange(len(content)), rng.randrange(8)
    content[byte] ^= 1 << bit
    (at / path).write_bytes(content)
    return path, f"bit {bit} of byte {byte:,} of {len(content):,}"


def started(at: Path, command: Callable, *arguments: str, run: str = "") -> Ran:
    """Run a command of the package in a folder, in a process forked of this one, which has imported it."""
    out, err, result = (at / name for name in ("out.log", "err.log", "result.json"))
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=in_child, args=(at, command, arguments, run))
    process.start()
    process.join(LIMIT)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    found = json.loads(result.read_text()) if result.exists() else None
    return Ran(code, out.read_text(errors="replace"), err.read_text(errors="replace"), found)


def in_child(at: Path, command: Callable, arguments: Sequence[str], run: str) -> None:
    """Run a command with its output in files, write what came of it, and end this process."""
    gc.disable()
    os.chdir(at)
    os.environ["HOME"] = str(at / HOMES / run)  # compiled programs are cached there
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # as the commands do: orbax
    for number, name in ((1, "out.log"), (2, "err.log")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = command(list(arguments))
    if run and not code:
        found = result_of(Path("runs") / run)
        Path("result.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def result_of(run: Path) -> dict | None:
    """Return the losses of a run, and the checksum of each array of its last checkpoint; None if it has none."""
    folder = run / "checkpoints"
    step = directory.latest_step(folder)
    if step is None:
        return None
    losses = {str(record["step"]): record["loss"] for record in curves.read(run / "metrics.jsonl")[0]}
    trees = [
        arrays(where) for where in (folder / str(step) / "state", *sorted((folder / "arrays" / str(step)).glob("*")))
    ]
    leaves = [leaf for tree in trees for leaf in jax.tree_util.tree_leaves_with_path(tree)]
    sums = {
        f"{i} {directory.path_name(path)}": zlib.crc32(np.ascontiguousarray(x)) for i, (path, x) in enumerate(leaves)
    }
    return {
        "step": step,
        "losses": {step: losses.get(step) for step in map(str, range(FIRST + 1, STEPS + 1))},
        "sums": sums,
    }


def arrays(where: Path) -> dict:
    """Return the arrays saved in a folder, on the host."""
    with ocp.StandardCheckpointer() as files:
        tree = files.metadata(where.absolute()).item_metadata.tree
        return files.restore(where.absolute(), jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree))


def judged(ran: Ran, undisturbed: Ran, path: Path) -> tuple[str, str]:
    """Return the outcome of a trial, and the line that tells of the flip. path: of the flipped file."""
    lines = [line for line in ran.err.splitlines() if line.strip()]
    if ran.code in (1, 2, 4) and len(lines) == 1:
        is_named = KEY.search(lines[0]) or any(part in lines[0] for part in path.parts)
        return ("refused" if is_named else "FAILED"), lines[0]
    if ran.code != 0:
        return "FAILED", f"exit code {ran.code}: {' '.join(lines[-2:])}"
    said = " | ".join(sorted(ran.said - undisturbed.said))
    if ran.result == undisturbed.result:
        return ("recovered" if said else "same"), said
    return ("reported" if said else "SILENT"), said


if __name__ == "__main__":
    sys.exit(main())
