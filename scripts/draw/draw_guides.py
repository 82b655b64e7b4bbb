"""Draw the pictures of the guides: schedules, who computes which attention, noise scale, memory of compiled steps.

python scripts/draw/draw_guides.py

The last needs the CUDA compiler: pip install 'nanotrain_jax[cuda12]'.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from nanotrain_jax.config.load import load
from nanotrain_jax.parallel.context.context import zigzag_order
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import estimate, on_gpus
from nanotrain_jax.planner.report import timeline

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "nanotrain_jax" / "parallel" / "pipeline" / "docs"
ZIGZAG = ROOT / "nanotrain_jax" / "parallel" / "context" / "docs" / "zigzag.png"
NOISE = ROOT / "nanotrain_jax" / "run" / "docs" / "noise_scale.png"  # beside it the measured values, as JSON
TIMELINES = ROOT / "nanotrain_jax" / "planner" / "docs"
STEPS = {  # on 8 H100s: picture -> config, overrides
    "gpt2": ("gpt2_124m", ["parallel.zero=1"]),
    "llama3_8b": ("llama3_8b", ["parallel.zero=3", "parallel.microbatches=2", "memory.remat=full"]),
    "gpt2_pipeline": (
        "gpt2_124m",
        [
            "parallel.pipe=4",
            "parallel.data=2",
            "parallel.zero=1",
            "parallel.schedule=zb_h1",
            "parallel.microbatches=16",
            "data.batch_size=256",
        ],
    ),
}
SCHEDULES = "1f1b", "zero_bubble"
STAGES, MICROBATCHES, COSTS = 4, 12, "1,1.3,0.9"  # costs of F, dX and W
DEVICES = 4  # of the picture of zig-zag order
ROW = -1.0  # height at which it shows the chunks of a row


def draw(name: str, folder: str) -> Path:
    """-> the picture of a schedule, as PNG."""
    command = [sys.executable, str(ROOT / "scripts" / "draw" / "draw_schedule.py"), "--schedule", name, "--out", folder]
    command += ["--stages", str(STAGES), "--microbatches", str(MICROBATCHES), "--costs", COSTS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (picture,) = Path(folder).glob(f"{name}_*.png")
    return picture


def draw_zigzag(path: Path) -> None:
    """Draw who computes which block of causal attention, in the order of the row and in zig-zag order."""
    figure, both = pyplot.subplots(1, 2, figsize=(10, 5.2), layout="constrained")
    chunks = 2 * DEVICES
    in_order = np.arange(chunks) // 2
    zigzag = np.empty(chunks, int)
    zigzag[zigzag_order(chunks, DEVICES)] = in_order
    draw_blocks(both[0], in_order, "tokens in order")
    draw_blocks(both[1], zigzag, "tokens in zig-zag order")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(DEVICES)]
    labels = [f"device {i}" for i in range(DEVICES)]
    figure.legend(handles, labels, loc="outside lower center", ncols=DEVICES, frameon=False)
    figure.savefig(path, dpi=80)


def draw_blocks(axes: Axes, owners: np.ndarray, title: str) -> None:
    """Draw the chunks of a row, coloured by device, above the causal blocks of queries x keys: coloured by the device
    that has the queries, with the hop at which it computes them."""
    for key, owner in enumerate(owners):
        axes.add_patch(pyplot.Rectangle((key, ROW), 1, 0.6, facecolor=f"C{owner}", edgecolor="white"))
    blocks = [(query, key) for query in range(len(owners)) for key in range(query + 1)]
    for query, key in blocks:
        owner = owners[query]
        axes.add_patch(pyplot.Rectangle((key, query), 1, 1, facecolor=f"C{owner}", edgecolor="white"))
        hop = (owner - owners[key]) % DEVICES
        axes.text(key + 0.5, query + 0.5, str(hop), ha="center", va="center", color="white")
    # A block on the diagonal is half a block: the causal mask hides the rest.
    work = np.bincount(owners[[q for q, _ in blocks]], [0.5 if q == k else 1 for q, k in blocks])
    axes.set(xlim=(0, len(owners)), ylim=(len(owners), ROW), aspect="equal", xlabel="chunk of keys")
    axes.set(ylabel="chunk of queries", title=f"{title}\nblocks per device: {', '.join(f'{w:g}' for w in work)}")
    axes.set_xticks(np.arange(len(owners)) + 0.5, range(len(owners)))
    axes.set_yticks([ROW + 0.3, *np.arange(len(owners)) + 0.5], ["row", *range(len(owners))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_noise_scale(path: Path) -> None:
    """Draw the noise scale of runs with a fixed batch, and the batch of one that grows with it: tokens over steps."""
    runs = json.loads(path.with_suffix(".json").read_text())
    figure = pyplot.figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for seed, values in enumerate(runs["noise_scale"]):
        axes.plot(runs["step"], values, color="C0", linewidth=1, label=None if seed else "noise scale, each seed")
    axes.axhline(runs["fixed_batch"], color="gray", linestyle="--", linewidth=1, label="fixed batch")
    axes.plot(runs["step"], runs["growing_batch"], color="C1", drawstyle="steps-pre", label="batch_growth")
    axes.set(xlabel="step", ylabel="tokens", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)


def draw_timeline(path: Path, name: str, overrides: list[str]) -> None:
    """Compile the step of a config for 8 H100s and draw its memory timeline."""
    config = on_gpus(load(str(ROOT / "configs" / f"{name}.yaml"), overrides), 8, "h100")
    found = compile_step(config, "h100", memory_timeline=True)["timeline"]
    svg = timeline.picture(found, estimate(config, "h100").limit_bytes)
    path.write_text(svg.replace(">", '><rect width="100%" height="100%" fill="#fff"/>', 1) + "\n")


def main() -> None:
    """Write PICTURES/<schedule>.png, ZIGZAG, NOISE and TIMELINES/<step>.svg."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in SCHEDULES:
            shutil.copyfile(draw(name, folder), PICTURES / f"{name}.png")
            print(PICTURES / f"{name}.png")
    ZIGZAG.parent.mkdir(exist_ok=True)
    draw_zigzag(ZIGZAG)
    print(ZIGZAG)
    draw_noise_scale(NOISE)
    print(NOISE)
    TIMELINES.mkdir(exist_ok=True)
    for name, (config, overrides) in STEPS.items():
        draw_timeline(TIMELINES / f"{name}.svg", config, overrides)
        print(TIMELINES / f"{name}.svg")


if __name__ == "__main__":
    main()
