"""Run the planner's command in-process; a small config for it."""

from pathlib import Path

from nanotrain_jax import plan
from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve

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
