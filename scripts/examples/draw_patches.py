"""Draw which patches a vision-language model keeps of held-out pictures, and the question that they are kept for.

    python scripts/examples/draw_patches.py --run runs/vision_language [--out patches.png] [--rows 8]

The data are those of make_shapes.py. A kept patch has a frame, blue at the finest scale and orange at coarser
ones; the wider, the more relevant.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from matplotlib.patches import Rectangle

from nanotrain_jax import Config, load_params
from nanotrain_jax.config.load import Parser, path_argument, refuse
from nanotrain_jax.data import batches
from nanotrain_jax.models import vision_language
from nanotrain_jax.models.parameters import ENDS
from nanotrain_jax.models.vision import patches, relevance
from nanotrain_jax.parallel import mesh as meshes

COLUMNS = 4


class Looked(NamedTuple):
    """Pictures, and the patches that are kept of each."""

    images: np.ndarray  # uint8 [B H W 3]
    candidate: np.ndarray  # index of each kept patch [B K]
    is_kept: np.ndarray  # False: padding [B K]
    weight: np.ndarray  # relevance of each candidate, relative to an even one [B C]


def look(weights: dict, config: Config, rows: list[dict]) -> Looked:
    """Run the part of the model that chooses patches."""
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    text_BQ, targets_BQ = (batch[name][:, config.vision.max_tokens :] for name in ("inputs", "targets"))
    embedding_VD = jnp.asarray(weights[ENDS][vision_language.EMBEDDING])
    question = relevance.Question(embedding_VD[text_BQ], vision_language.not_predicted(targets_BQ))
    of_vision = jax.tree.map(jnp.asarray, weights["vision"])
    x_BCE = patches.embed(config.vision, of_vision["patches"], batch["images"])
    around = patches.surroundings(config.vision)
    log_BC = relevance.relevance(of_vision["relevance"], x_BCE, question, around)
    budget = relevance.allocate(log_BC, config.vision)
    weight_BC = jnp.exp(log_BC) * log_BC.shape[1]
    return Looked(*map(np.asarray, (batch["images"], budget.candidate_BK, budget.is_kept_BK, weight_BC)))


def question(row: dict, config: Config, words: list[str]) -> str:
    """Return the text of the question of a row, and its answer."""
    place = int(np.argmax(row["targets"] >= 0))
    asked = [words[token] for token in row["inputs"][config.vision.max_tokens : place + 1]]
    return " ".join(word for word in asked if not word.startswith("<")) + f" {words[row['targets'][place]]}"


def draw(looked: Looked, titles: list[str], config: Config, path: Path) -> None:
    """Draw the pictures with frames around the patches that are kept."""
    lines = -(-len(titles) // COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(3 * COLUMNS, 3.3 * lines), layout="constrained")
    places, size = patches.places(config.vision), config.vision.image_size
    axes = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for i, title in enumerate(titles):
        axes[i].imshow(looked.images[i], extent=(0, size, size, 0))
        axes[i].set_title(title, fontsize="small")
        for candidate in looked.candidate[i][looked.is_kept[i]]:
            y, x, scale = places[candidate]
            side = scale * config.vision.patch_size
            corner = (x + 1) * size / 2 - side / 2, (y + 1) * size / 2 - side / 2
            colour = "tab:blue" if scale == min(config.vision.scales) else "tab:orange"
            width = 1 + min(looked.weight[i][candidate], 3)
            axes[i].add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=width))
    for one in axes:
        one.set_axis_off()
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    """Draw; 2 if the request is wrong."""
    parser = Parser(description="Draw which patches a vision-language model keeps of held-out pictures.")
    parser.add_argument("--run", required=True, type=path_argument, help="folder of a run, with a checkpoint")
    parser.add_argument("--out", type=path_argument, default="patches.png", help="PNG file (default: patches.png)")
    parser.add_argument("--rows", type=int, default=8, help="number of pictures (default: 8)")
    asked: argparse.Namespace = parser.parse_args(argv)
    try:
        meshes.configure(simulate=1)
        weights, config = load_params(asked.run)
        if config.vision is None:
            raise ValueError(f"--run={asked.run} has no section vision; give a run of configs/vision_language.yaml")
        rows = batches.load(config.data).val
        words = json.loads((Path(config.data.source.partition(":")[2]) / "meta.json").read_text())["words"]
        with_one = [row for row in (rows[i] for i in range(len(rows))) if (row["targets"] >= 0).sum() == 1]
        chosen = with_one[: asked.rows]
        titles = [question(row, config, words) for row in chosen]
        draw(look(weights, config, chosen), titles, config, Path(asked.out))
    except (ValueError, OSError) as error:
        return refuse(error)
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
