"""Check a GPU machine with one command: does every technique work here, and how fast. A table and JSON, resumable.

    python scripts/gpu/check_gpu.py [--minutes 30] [--disk FOLDER] [--only WORD,WORD] [--out FOLDER] [--size tiny]

Runs the stages of gpu_stages.py, most valuable first, each in a process of its own: if one crashes or runs out of
memory, its error is a line of the table. What does not fit into the remaining minutes is skipped. Results are saved
after each stage, in --out, named by date and GPU; the same command continues after a kill or Ctrl-C, and repeats what
was skipped or failed with --again. --size tiny runs all of it on 4 simulated devices, to test the script.

Exit code: 0 all that ran is right, 1 a stage failed, 2 the request is wrong, 130 interrupted.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_stages import STAGES, Stage

from nanotrain_jax.config.load import Parser, refuse

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY_DEVICES = 4
FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"  # compile fast, on CPUs
GRACE = 15  # seconds
SLACK = 4  # a stage that takes this many times as long as expected hangs
DONE = "ok", "failed"

Results = dict[str, Any]  # "about", and "stages": name -> figures, with "status" and "result"


class Runner:
    """Runs stages in processes of their own."""

    def __init__(self, simulate: int, disk: str, cache: str):
        """simulate: simulated devices; 0: GPUs. disk: for files of stages; cache: for compiled programs."""
        self.arguments = ["--simulate", str(simulate), "--disk", disk]
        paths = [str(ROOT), os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [str(ROOT)]
        self.environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        self.environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.flags = f"{os.environ.get('XLA_FLAGS', '')} {FAST if simulate else ''}"

    def run(self, name: str, flags: str, limit: float, devices: int = 1) -> dict[str, Any]:
        """Run a stage for at most limit seconds -> its figures, with status ok or failed."""
        command = [sys.executable, HERE / "gpu_stages.py", name, *self.arguments, "--devices", str(devices)]
        environment = self.environment | {"XLA_FLAGS": f"{self.flags} {flags}".strip()}
        if name.startswith("flags:"):  # kernels chosen with other flags would be taken from the cache
            environment["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = time.monotonic()
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "result": f"no end after {limit:.0f} s", "seconds": limit}
        finally:
            stop(process)
        seconds = round(time.monotonic() - started, 1)
        if process.returncode:
            return {"status": "failed", "result": reason(process.returncode, errors), "seconds": seconds}
        figures = last_object(out)
        if figures is None:
            return {"status": "failed", "result": "it printed no figures", "seconds": seconds}
        return {"status": "ok", "seconds": seconds} | figures


def last_object(out: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object: libraries print to the same stream."""
    for line in reversed(out.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def stop(process: subprocess.Popen) -> None:
    """End a stage, if it still runs, and the processes it started: a launcher ends its own when it is asked to."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason(code: int, errors: str) -> str:
    """Return one line: the error of a stage that failed."""
    lines = [line for line in errors.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|NoCompiler)\b", line)]
    last = (raised or lines or [f"exit code {code}, without a word"])[-1]
    return " ".join(last.split())[:200]


def cut(stage: Stage, devices: int, left: float, tiny: bool) -> str:
    """Return why a stage does not run; "" if it does. left: seconds."""
    if stage.devices > devices:
        return f"needs {stage.devices} devices, this machine has {devices}"
    if left <= 0 or (stage.seconds > left and not tiny):
        return f"needs about {stage.seconds} s, {max(left, 0):.0f} s of --minutes are left"
    return ""


def run_stages(runner: Runner, results: Results, names: list[str], minutes: float, path: Path) -> None:
    """Run the stages that have no result yet, saving after each."""
    until, devices = time.monotonic() + 60 * minutes, results["about"]["count"]
    tiny = results["about"]["platform"] == "cpu"
    for number, name in enumerate(names, 1):
        found, stage = results["stages"], STAGES[name]
        if found.get(name, {}).get("status") in DONE:
            continue
        left = until - time.monotonic()
        skipped = cut(stage, devices, left, tiny)
        if skipped:
            found[name] = {"status": "skipped", "result": skipped}
        else:
            print(f"[{number}/{len(names)}] {name} ...", flush=True)
            limit = min(left, max(120, SLACK * stage.seconds))
            found[name] = runner.run(name, stage.flags, limit, devices)
            print(f"    {found[name]['status']}, {found[name]['seconds']:.0f} s: {found[name]['result']}", flush=True)
        save(results, path)


def save(results: Results, path: Path) -> None:
    """Write the results and their table; a kill leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)
    path.with_suffix(".md").write_text(table(results))


def table(results: Results) -> str:
    """Return the results as Markdown."""
    about, found = results["about"], results["stages"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rows = [f"# {about['count']} x {about['kind']}, {about['date']}", "", versions, ""]
    rows += ["| stage | | s | result |", "|---|---|---|---|"]
    for name in (name for name in STAGES if name in found):
        row, other = found[name], found.get(STAGES[name].beside, {})
        ratio = ""
        if "step_seconds" in row and "step_seconds" in other:
            ratio = f"{row['step_seconds'] / other['step_seconds']:.3f} x {STAGES[name].beside}: "
        text = row["result"].replace("|", "\\|")
        rows.append(f"| {name} | {row['status']} | {row.get('seconds', '')} | {ratio}{text} |")
    return "\n".join(rows) + "\n"


def machine(runner: Runner) -> dict[str, Any]:
    """Return what the first stage says of devices and versions. Raises ValueError without a GPU."""
    found = runner.run("device", "", 300)
    if found["status"] != "ok":
        raise ValueError(f"JAX finds no device: {found['result']}")
    if found["platform"] == "cpu" and "--simulate" in runner.arguments and runner.arguments[1] == "0":
        raise ValueError("JAX finds no GPU; install nanotrain_jax[cuda12] or [cuda13], or try --size tiny")
    return found | {"date": time.strftime("%Y-%m-%d")}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="time for all stages (default: 30)")
    parser.add_argument(
        "--size", choices=["full", "tiny"], default="full", help="tiny: simulated devices, small models"
    )
    parser.add_argument("--disk", help="folder on the disk to test with NVMe offload (default: a temporary folder)")
    parser.add_argument("--only", default="", help="stages with one of these words in their name, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--again", action="store_true", help="repeat stages that failed")
    return parser.parse_args(argv)


def prepare(asked: argparse.Namespace, runner: Runner) -> tuple[Results, Path]:
    """Return the results so far, and their file."""
    about = machine(runner)
    name = re.sub(r"\W+", "-", about["kind"].lower()).strip("-")
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{about['date']}_{about['count']}x{name}.json"
    results = json.loads(path.read_text()) if path.exists() else {"stages": {}}
    if results.get("about", about)["versions"] != about["versions"]:
        raise ValueError(f"{path} is of other versions; move it away, or give another --out")
    if asked.again:
        results["stages"] = {key: row for key, row in results["stages"].items() if row["status"] != "failed"}
    return results | {"about": about}, path


def main(argv: list[str] | None = None) -> int:
    """Run the stages and print the table."""
    asked = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
    names = [name for name in STAGES if any(word in name for word in asked.only.split(","))]
    try:
        if asked.minutes <= 0 or not names:
            raise ValueError(f"--minutes={asked.minutes:g} --only={asked.only}: must be above 0, and name a stage")
        with tempfile.TemporaryDirectory(dir=asked.disk) as disk, tempfile.TemporaryDirectory() as cache:
            runner = Runner(TINY_DEVICES if asked.size == "tiny" else 0, disk, cache)
            results, path = prepare(asked, runner)
            try:
                run_stages(runner, results, names, asked.minutes, path)
            except KeyboardInterrupt:
                print(f"interrupted; the same command continues. Results so far: {path.with_suffix('.md')}")
                return 130
    except (ValueError, OSError) as error:
        return refuse(error)
    print(f"\n{table(results)}\nsaved as {path} and .md")
    return int(any(row["status"] == "failed" for row in results["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
