"""Run the planner's command in-process; a small config for it."""

from functools import partial
from pathlib import Path

from nanotrain_jax import plan
from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.planner import estimate, search

ROOT = Path(__file__).parents[1]


def small(batch=32, **parallel):
    tree = {
        "model": {"num_layers": 8, "d_model": 512, "num_heads": 8, "vocab_size": 4096},
        "parallel": {"data": 1} | parallel,
        "data": {"source": "synthetic", "batch_size": batch, "seq_len": 512},
    }
    config = load.parse(tree)
    return resolve(config, config.parallel.axes)


def run(*arguments):
    return plan.main([str(a) for a in arguments])


def as_with_the_newest_compiler(monkeypatch):
    """Let the planner take the margin of jax 0.12, whose estimates the guides show."""
    newest = partial(estimate.margin, jax_version=(0, 12))
    for module in estimate, search:
        monkeypatch.setattr(module, "margin", newest)
