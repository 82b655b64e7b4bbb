"""Generate the tables in the guides from golden files and module docstrings. Needs no GPU and no compiler.

    python scripts/draw/tables.py [--check]

Replaces what is between `<!-- table: NAME -->` and `<!-- end -->` in every guide. --check changes nothing and exits
with 1 if a guide is out of date.
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head, rows):
    """Rows of cells -> a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def golden(name):
    """A golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def gb(size, decimals=1):
    """Bytes -> GB as text."""
    return f"{size / 1e9:,.{decimals}f}"


def beside(measured, estimated, text):
    """A measured value, and its ratio to the estimate."""
    return f"{text} ({measured / estimated:.3f})" if estimated else f"{text} (-)"


def peaks(row, estimate):
    """Peak memory for each version of JAX, and its ratio to the estimate; - where it was not compiled."""
    sizes = map(row["peak_bytes"].get, ("0.10", "0.12"))
    return [f"{gb(size)} ({size / estimate['peak_bytes']:.2f})" if size else "-" for size in sizes]


def first_line(path):
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.split("\n")[0].replace("|", "\\|")


def modules(folder):
    """Every module of the package with its first docstring line; subpackages after the files of their parent."""
    files = [path for path in (ROOT / "nanotrain_jax").rglob("*.py") if path.name != "__init__.py"]
    files.sort(key=lambda path: (path.parent.parts, path.name))
    links = [f"[{name}]({name})" for name in (path.relative_to(folder).as_posix() for path in files)]
    return table(("file", "what it holds"), zip(links, map(first_line, files), strict=True))


def scripts(folder):
    """Every script with its first docstring line."""
    files = sorted((ROOT / "scripts").rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    names = {path: path.relative_to(ROOT / "scripts").as_posix() for path in files}
    return table(("script", "what it does"), [(f"[{name}]({name})", first_line(path)) for path, name in names.items()])


def compiled(folder, word=""):
    """The compiled step beside its estimate, of cases with a word in their label: tests/audit/test_audit.py."""
    rows, found = [], golden("audit")
    for name, e in golden("estimates")["compiled"].items():
        if word not in e["label"]:
            continue
        c = found[name]
        wire = beside(c["wire_bytes"], e["wire_bytes"], gb(c["wire_bytes"], 2))
        flops = beside(c["flops"], e["flops"], f"{c['flops'] / 1e12:,.1f}")
        state = beside(c["argument_bytes"], e["argument_bytes"], gb(c["argument_bytes"], 2))
        rows.append((e["label"], wire, flops, state, gb(e["peak_bytes"]), *peaks(c, e)))
    return table(("", "wire GB", "TFLOP", "state GB", "peak GB, estimated", "jax 0.10", "jax 0.12"), rows)


def long_context(folder):
    """The compiled step with parallel.context."""
    return compiled(folder, "context ")


def offload(folder):
    """Host offload, compiled: tests/audit/test_offload_compiled.py."""
    rows, found = [], golden("offload")
    for name, e in golden("estimates")["offload"].items():
        c = found[name]
        copied = ["-", "-", "-"]
        if c["host_bytes"]:
            copied = [beside(c[key], e[key], gb(c[key])) for key in ("host_bytes", "to_device", "to_host")]
        rows.append((e["label"], e["mode"], gb(e["peak_bytes"]), *peaks(c, e), *copied))
    head = "", "in host memory", "GPU, estimated", "jax 0.10", "jax 0.12", "host", "copied to GPU", "copied to host"
    return table(head, rows)


def hbm(folder):
    """What a layer and the parts of a step read and write in device memory, compiled: tests/audit/test_traffic.py."""
    rows, names = [], {"gpt2_124m": "GPT-2 124M, 2 microbatches of 32, remat none"}
    names["llama3_8b"] = "Llama-3-8B, 1 microbatch of 2, remat full"
    names |= {
        f"{key} with kernels by XLA": f"the same {name.split(',')[0]}, `model.kernels=xla`"
        for key, name in names.items()
    }
    for name, versions in golden("hbm").items():
        for version, row in versions.items():
            parts = [beside_the_least(row, key) for key in row if key.endswith("minimum_bytes")]
            rest = gb(row["communication_bytes"] + row["rest_bytes"])
            kernels = f"{row['layer_kernels']:.0f}", f"{row['step_kernels']:,.0f}"
            rows.append(
                (names[name], version, parts[0], kernels[0], gb(row["step_bytes"]), kernels[1], *parts[1:], rest)
            )
    head = "8 H100, GB (over the least)", "jax", "a layer", "kernels", "step", "kernels"
    return table((*head, "of it: layers", "loss", "update", "rest"), rows)


def beside_the_least(row, key):
    """GB of a part of a step, and its ratio to the least. key: of the least."""
    size, least = row[key.replace("minimum_", "")], row[key]
    return f"{gb(size, 2)} ({size / least:.2f})"


def megatron(folder):
    """Modelled seconds beside those that Megatron-LM measured: tests/planner/test_plan_papers.py."""
    rows = []
    for name, row in golden("estimates")["megatron"].items():
        model, remat = name.split()
        modelled, measured = row["modelled_seconds"], row["measured_seconds"]
        rows.append((model, remat, f"{modelled:.1f}", f"{measured:.1f}", f"{modelled / measured:.2f}"))
    return table(("GPT", "remat", "modelled s", "measured s", "ratio"), rows)


def measured(folder):
    """Modelled seconds and estimated memory beside those of one H200: tests/planner/test_plan_measured.py."""
    rows = []
    for name, row in golden("estimates")["measured"].items():
        modelled, seconds = row["modelled_seconds"], row["measured_seconds"]
        times = f"{modelled * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{modelled / seconds:.2f}", f"{row['mfu']:.1%}"
        sizes = gb(row["estimated_bytes"]), gb(row["measured_bytes"])
        rows.append((name, *times, *sizes, f"{row['measured_bytes'] / row['estimated_bytes']:.2f}"))
    head = "one H200", "modelled ms", "measured ms", "ratio", "MFU", "estimated GB", "measured GB", "ratio"
    return table(head, rows)


def papers(folder):
    """The planner's first choice beside a published layout: tests/planner/test_plan_papers.py."""
    rows = []
    for model, row in golden("estimates")["papers"].items():
        rows.append((f"{model}, {row['gpus']:,} A100-80", row["layout"], f"{row['seconds']:.1f}"))
        rows.append(("as published", row["paper_layout"], f"{row['paper_seconds']:.1f}"))
    return table(("GPT", "layout", "modelled s per step"), rows)


def llama3_8b(folder):
    """The first choices for Llama-3-8B on 8 H100s: tests/planner/test_plan_search.py."""
    rows = {rank: row for rank, row in golden("estimates")["llama3_8b"].items() if rank != "counts"}
    cells = [
        (rank, row["layout"], gb(row["peak_bytes"]), f"{row['step_seconds']:.3f}", f"{row['mfu']:.1%}")
        for rank, row in rows.items()
    ]
    return table(("", "layout", "GB per GPU", "modelled s per step", "MFU"), cells)


def scaling(kind):
    """Modelled efficiency of weak or strong scaling: tests/planner/test_plan_scaling.py."""
    rows, base = [], {}
    points = [(*name.split("-")[:2], p) for name, p in golden("estimates")["scaling"].items()]
    models = list(dict.fromkeys(model for model, _, _ in points))
    of_kind = [(model, p) for model, name, p in points if name == kind]
    for model, p in sorted(of_kind, key=lambda row: (models.index(row[0]), row[1]["gpus"])):
        work = {part: seconds * p["gpus"] / p["batch"] for part, seconds in p["seconds"].items()}
        first = base.setdefault(model, work)
        total = sum(work.values())
        lost = {part: (value - first.get(part, 0)) / total for part, value in work.items()}
        lost = ", ".join(f"{k} {x:.1%}" for k, x in sorted(lost.items(), key=lambda item: -item[1]) if x >= 0.005)
        ratio = sum(first.values()) / total
        cells = model, f"{p['gpus']:,}", f"{p['batch']:,}", p["layout"], f"{sum(p['seconds'].values()):.3f}"
        rows.append((*cells, f"{p['mfu']:.1%}", f"{ratio:.1%}" if ratio >= 0.8 else f"**{ratio:.1%}**", lost or "-"))
    return table(("", "GPUs", "sequences", "layout", "s", "MFU", "efficiency", "lost to"), rows)


def weak_scaling(folder):
    """The batch grows with the GPUs."""
    return scaling("weak")


def strong_scaling(folder):
    """The batch is fixed."""
    return scaling("strong")


def megatron_scaling(folder):
    """Modelled MFU beside the published one: tests/planner/test_plan_scaling.py."""
    rows = [
        (f"{p['gpus']:,}", p["layout"], f"{p['mfu']:.1%}", f"{p['published_mfu']:.0%}")
        for p in golden("estimates")["megatron_scaling"].values()
    ]
    return table(("H100s", "our layout", "modelled MFU", "published MFU"), rows)


def assumptions(folder):
    """What modelled scaling rests on: planner/scaling.py."""
    rows = golden("estimates")["assumptions"].items()
    return table(("", "h100", "source"), [(what, row["value"], row["source"]) for what, row in rows])


TABLES = (modules, scripts, compiled, long_context, offload, hbm, megatron, measured, papers, llama3_8b)
TABLES += (weak_scaling, strong_scaling, megatron_scaling, assumptions)
TABLES = {f.__name__: f for f in TABLES}


def guides():
    """Every guide of the repository."""
    folders = (ROOT / name for name in ("nanotrain_jax", "scripts", "tests", "configs"))
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def generated(path):
    """The text of a guide with its tables generated."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]](path.parent) + block[3], path.read_text())


def main(argv=None):
    """Write the tables, or check them. -> exit code"""
    parser = argparse.ArgumentParser(description="Generate the tables in the guides.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a guide is out of date")
    check = parser.parse_args(argv).check
    stale = {path: text for path in guides() if (text := generated(path)) != path.read_text()}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'out of date; run python scripts/draw/tables.py' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
