"""Frozen parts (train.freeze): weights without gradients, float32 master weights and moments.

A frozen weight is stored in the compute dtype, 2 bytes per parameter in 16 bit, sharded as its ZeRO stage shards
parameters. It is no input of what is differentiated, so no matmul of its gradient and no reduction is in the program.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import tree_map_with_path

from nanotrain_jax.parallel.collectives import Tree
from nanotrain_jax.parallel.sharding import path_name


def trainable(patterns: Sequence[str], shapes: Tree, key: str = "train.freeze") -> Tree:
    """Return False for each weight in whose path ("layers/attention/query_DNH") a pattern is found. key: has them.

    Raises ValueError if a pattern is found in no path, or nothing is left to train.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            folders = ", ".join(dict.fromkeys(path.rpartition("/")[0] for path in paths))
            raise ValueError(f"{key}: no weight has {pattern!r} in its path; use parts of these: {folders}")

    def is_trainable(path: tuple, _: Any) -> bool:
        return not any(re.search(pattern, path_name(path)) for pattern in patterns)

    result = tree_map_with_path(is_trainable, shapes)
    if not any(jax.tree.leaves(result)):
        raise ValueError(f"{key}={list(patterns)} freezes all weights; leave something to train")
    return result
