"""Layouts in the notation of our docstrings, and rules that lay out the parameters of any Flax model.

    layout("D/data F/tensor")        a PartitionSpec
    Rules([(pattern, layout), ...])  which parameters are laid out how; FLAX and HUGGING_FACE_LLAMA are ready made
    specs(rules, params, mesh)       a PartitionSpec for every parameter
    shard(params, mesh, specs)       the parameters, so laid out

Parameters are any pytree of arrays or ShapeDtypeStructs: Linen variables, NNX state, nested dicts. A parameter's path
is its keys with slashes between, as in "layers/0/attention/query/kernel". Nothing here needs our model or its config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any  # a pytree of arrays


class Rules(NamedTuple):
    """Ordered pairs of a path pattern and a layout; the first that matches a parameter's path lays it out.

    pattern: a regular expression for the end of the path, from the beginning of a key to the end of the last: "kernel",
    "(query|key)/kernel", "layers/.*/bias". optional: patterns may match nothing, as in a set for a family of models.
    """

    pairs: Sequence[tuple[str, str]]
    optional: bool = False


# Megatron-LM's layout (arXiv 1909.08053): the first matmul of a pair split by columns, the second by rows.
# FLAX: Linen's MultiHeadDotProductAttention, NNX's MultiHeadAttention, Embed and norms of both, and the usual MLPs.
FLAX = Rules(
    [
        ("(query|key|value)/kernel", "D N/tensor H"),
        ("(query|key|value)/bias", "N/tensor H"),
        ("out/kernel", "N/tensor H D"),
        ("(Dense_0|linear1|fc1|wi\\w*|up\\w*|gate\\w*)/kernel", "D F/tensor"),
        ("(Dense_0|linear1|fc1|wi\\w*|up\\w*|gate\\w*)/bias", "F/tensor"),
        ("(Dense_1|linear2|fc2|wo|down\\w*)/kernel", "F/tensor D"),
        ("embedding", "V/tensor D"),
        ("(lm_head|head)/kernel", "D V/tensor"),
        ("(scale|bias)", "D"),  # of norms, and of what has gone through the second matmul
    ],
    optional=True,
)
HUGGING_FACE_LLAMA = Rules(
    [
        ("embed_tokens/embedding", "V/tensor D"),
        ("(q|k|v)_proj/kernel", "D N/tensor"),
        ("o_proj/kernel", "N/tensor D"),
        ("(gate|up)_proj/kernel", "D F/tensor"),
        ("down_proj/kernel", "F/tensor D"),
        ("\\w*norm/(weight|scale)", "D"),
        ("lm_head/kernel", "D V/tensor"),
    ],
    optional=True,
)


def layout(text: str) -> PartitionSpec:
    """Text -> PartitionSpec: each dim by name, after a slash the mesh axes it is split over.

    "D/data F/tensor" -> PartitionSpec("data", "tensor"); "L D" -> PartitionSpec(None, None).
    A dim may be split over several axes, major first: "B/replica,data". Raises ValueError on a word that is not
    `dim` or `dim/axis[,axis]`, and on a mesh axis used twice.
    """
    entries, used = [], set()
    for word in text.split():
        match = re.fullmatch(r"(\w+)(?:/(\w+(?:,\w+)*))?", word)
        if not match:
            raise ValueError(
                f"layout {text!r}: {word!r} is not of the form dim or dim/axis; write e.g. 'D/data F/tensor'"
            )
        axes = tuple(match[2].split(",")) if match[2] else ()
        for axis in axes:
            if axis in used:
                raise ValueError(f"layout {text!r}: mesh axis {axis!r} is used twice; an axis can split one dim only")
            used.add(axis)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def report(rules: Rules, params: Tree, mesh: Mesh | None = None) -> list[str]:
    """What is wrong with rules for these parameters, a line each: nothing, if they fit.

    A parameter that no rule covers (scalars need none), a layout with another number of dims than its parameter, a
    pattern that matches nothing; with a mesh also an axis that it lacks and a dim that its axes do not divide.
    """
    return _match(rules, params, mesh)[1]


def specs(rules: Rules, params: Tree, mesh: Mesh | None = None) -> Tree:
    """A PartitionSpec for every parameter, in the same tree; no None at its end, as jit returns them.

    Raises ValueError with the first line of the report.
    """
    found, problems = _match(rules, params, mesh)
    if problems:
        more = f" (and {len(problems) - 1} more: see report())" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)
    lengths = (max((d + 1 for d, axes in enumerate(spec) if axes), default=0) for spec in found)
    found = [PartitionSpec(*spec[:length]) for spec, length in zip(found, lengths, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def shard(params: Tree, mesh: Mesh, specs: Tree) -> Tree:
    """params, laid out on mesh by specs. Raises ValueError where an axis does not exist or does not divide its dim."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    found = tree.flatten_up_to(specs)
    for (path, leaf), spec in zip(leaves, found, strict=True):
        for problem in _misfits(leaf.shape, spec, mesh):
            raise ValueError(f"{_path(path)} {leaf.shape}: {problem}")
    return jax.device_put(params, tree.unflatten([NamedSharding(mesh, spec) for spec in found]))


def _path(keys: tuple) -> str:
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):  # the array inside an NNX variable
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _match(rules: Rules, params: Tree, mesh: Mesh | None) -> tuple[list[PartitionSpec], list[str]]:
    """-> the spec of each leaf, and the problems found."""
    found, problems, idle, path = [], [], dict(rules.pairs), ""
    table = [
        (_ending(pattern), f"rule {pattern!r} says {text!r}", layout(text), pattern) for pattern, text in rules.pairs
    ]
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path, spec = _path(keys), PartitionSpec()
        where = f"{path} {leaf.shape}"
        rule = next((rule for rule in table if rule[0].fullmatch(path)), None)
        if rule:
            _, says, spec, pattern = rule
            idle.pop(pattern, None)
            if not leaf.ndim:
                spec = PartitionSpec()
            elif len(spec) != leaf.ndim:
                problems.append(f"{where}: {says}, {len(spec)} dims; name all {leaf.ndim}")
            elif mesh is not None:
                problems += [f"{where}: {says}, but {problem}" for problem in _misfits(leaf.shape, spec, mesh)]
        elif leaf.ndim:
            whole = " ".join("D" * leaf.ndim)
            problems.append(f"{where}: no rule covers it; add one, with {whole!r} to keep it whole")
        found.append(spec)
    if not rules.optional:
        for pattern in idle:
            problems.append(
                f"rule {pattern!r} lays out no parameter; paths are like {path!r}, and the first rule counts"
            )
    return found, problems


def _ending(pattern: str) -> re.Pattern:
    try:
        return re.compile(f"(.*/)?({pattern})")
    except re.error as error:
        raise ValueError(f"rule {pattern!r} is not a regular expression: {error}; see Python's re") from None


def _misfits(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> list[str]:
    if len(spec) > len(shape):
        return [f"{spec} has {len(spec)} dims; give it at most {len(shape)}"]
    problems = []
    for dim, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            problems.append(f"the mesh has no axis {unknown[0]!r}; it has {', '.join(mesh.shape)}")
        elif shape[dim] % prod(mesh.shape[axis] for axis in axes):
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            problems.append(f"{sizes} does not divide dim {dim} of {shape[dim]}; pad it, or leave it whole")
    return problems
