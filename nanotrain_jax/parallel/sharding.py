"""Sharding rules: text layouts such as "D/data F/tensor", matched to the parameters of any Flax model by path.

    layout("D/data F/tensor")        -> PartitionSpec
    Rules([(pattern, layout), ...])  layouts by path pattern; FLAX and HUGGING_FACE_LLAMA are predefined
    specs(rules, params, mesh)       -> a PartitionSpec for every parameter
    report(rules, params, mesh)      -> what does not fit, or each parameter's layout and bytes per device
    shard(params, mesh, specs)       -> sharded parameters

Parameters are any pytree of arrays, ShapeDtypeStructs or numbers: Linen variables, NNX state, nested dicts. A
parameter's path is its keys joined by slashes, as in "layers/0/attention/query/kernel". Independent of our model and
config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nanotrain_jax.parallel.collectives import Tree


class Rules(NamedTuple):
    """Ordered pairs (path pattern, layout); the first match of a parameter's path gives its layout.

    pattern: a regular expression for the end of the path, one or more whole keys: "kernel", "(query|key)/kernel",
    "layers/.*/bias". layout: text with one word per dim (`layout`), or a PartitionSpec. optional: patterns may match
    nothing, as in rules for a family of models. Functions accept a plain list of pairs as well.
    """

    pairs: Sequence[tuple[str, str | PartitionSpec]]
    optional: bool = False

    def renamed(self, **axes: str) -> Rules:
        """Return the same rules for a mesh with other axis names, as in FLAX.renamed(tensor="tp")."""

        def rename(spec: str | PartitionSpec) -> str | PartitionSpec:
            if isinstance(spec, str):
                return re.sub(r"(?<=[/,])\w+", lambda axis: axes.get(axis[0], axis[0]), spec)
            return PartitionSpec(*jax.tree.map(lambda axis: axes.get(axis, axis), tuple(spec)))

        return self._replace(pairs=[(pattern, rename(spec)) for pattern, spec in self.pairs])


# Megatron-LM's layout (arXiv 1909.08053): the first matmul of a pair split by columns, the second by rows.
# FLAX: Linen's MultiHeadDotProductAttention, NNX's MultiHeadAttention, Embed and norms of both, common MLP names.
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
        ("(scale|bias)", "D"),  # norms, and biases after the second matmul
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
    """Parse a layout into a PartitionSpec: a name for each dim, after a slash the mesh axes that shard it.

    "D/data F/tensor" -> PartitionSpec("data", "tensor"); "L D" -> PartitionSpec(None, None).
    A dim may be sharded over several axes, major first: "B/replica,data". Raises ValueError on a word that is not
    `dim` or `dim/axis[,axis]`, and on a mesh axis used twice.
    """
    entries = []
    used: set[str] = set()
    for word in text.split():
        match = re.fullmatch(r"(\w+)(?:/(\w+(?:,\w+)*))?", word)
        if not match:
            raise ValueError(
                f"layout {text!r}: {word!r} is not of the form dim or dim/axis; write e.g. 'D/data F/tensor'"
            )
        axes = tuple(match[2].split(",")) if match[2] else ()
        twice = next((axis for i, axis in enumerate(axes) if axis in {*used, *axes[:i]}), None)
        if twice:
            raise ValueError(f"layout {text!r}: mesh axis {twice!r} is used twice; an axis can split one dim only")
        used.update(axes)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def report(rules: Rules | Sequence[tuple], params: Tree, mesh: Mesh | None = None, layouts: bool = False) -> list[str]:
    """Return one line per problem of rules for these parameters; [] if they fit.

    Problems: a parameter without a rule (scalars need none), a layout with another number of dims than its parameter, a
    pattern that matches nothing; with a mesh also an unknown axis, and a dim that its axes do not divide. Equal lines
    of several layers are merged, as in "layers/{0..31}/up". layouts: if there are no problems, return `describe` of the
    resulting layouts; raises ValueError without a mesh.
    """
    if layouts and mesh is None:
        raise ValueError("layouts=True: needs a mesh to compute bytes per device; pass mesh=")
    problems = _match(rules, params, mesh)[1]
    if layouts and not problems:
        return describe(params, mesh, specs(rules, params, mesh))
    return [path + text for path, text, _ in _merged(problems)]


def describe(params: Tree, mesh: Mesh, specs: Tree) -> list[str]:
    """Return a line for each parameter, equal layers merged: path, dtype[dim/axes, ...], count x bytes per device.

    The last line is the total. Raises ValueError where an axis does not exist or does not divide its dim.
    """
    rows = []
    device_bytes = total_bytes = 0
    for path, x, spec in _laid_out(params, mesh, specs):
        shard_bytes = prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
        dims = (f"{n}/{','.join(_axes(entry))}" if entry else f"{n}" for n, entry in zip_longest(x.shape, spec))
        rows.append((path, (f"{x.dtype}[{', '.join(dims)}]", shard_bytes)))
        device_bytes += shard_bytes
        total_bytes += x.size * x.dtype.itemsize
    lines = []
    for path, (kind, shard_bytes), count in _merged(rows):
        lines.append([path, kind, f"{count} x {shard_bytes:,} bytes" if count > 1 else f"{shard_bytes:,} bytes"])
    paths, kinds = (max((len(line[i]) for line in lines), default=0) for i in range(2))
    lines = [f"{path:{paths}}  {kind:{kinds}}  {size}" for path, kind, size in lines]
    return [*lines, f"one device holds {device_bytes:,} of {total_bytes:,} bytes"]


def specs(rules: Rules | Sequence[tuple], params: Tree, mesh: Mesh | None = None) -> Tree:
    """Return a PartitionSpec for every parameter, in the same tree; without trailing None, as jit returns them.

    Raises ValueError with the first line of the report.
    """
    matched, problems = _match(rules, params, mesh)
    if problems:
        lines = report(rules, params, mesh)
        more = f" (and {len(lines) - 1} more: see report())" if len(lines) > 1 else ""
        raise ValueError(lines[0] + more)
    lengths = (max((d + 1 for d, axes in enumerate(spec) if axes), default=0) for spec in matched)
    trimmed = [PartitionSpec(*spec[:length]) for spec, length in zip(matched, lengths, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), trimmed)


def shard(params: Tree, mesh: Mesh, specs: Tree) -> Tree:
    """Shard params over mesh by specs. Raises ValueError where an axis does not exist or does not divide its dim."""
    shardings = [NamedSharding(mesh, spec) for _, _, spec in _laid_out(params, mesh, specs)]
    return jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), shardings))


def optimizer_specs(optimizer: optax.GradientTransformation, params: Tree, moment_specs: Tree) -> Tree:
    """Return PartitionSpecs of the state of optimizer.init(params).

    Arrays with the shape of their parameter (Adam's moments) get moment_specs (of `zero_specs`); counts and arrays of
    another shape (Adafactor's factors) are replicated. Parameters that an optax mask excludes have no state.
    """

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def place(x: Any, param: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Any:
        return x if is_masked(x) else spec if x.shape == param.shape else PartitionSpec()

    shapes = abstract(params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        place,
        jax.eval_shape(optimizer.init, shapes),
        shapes,
        moment_specs,
        transform_non_params=lambda _: PartitionSpec(),
        is_leaf=is_masked,
    )


def abstract(params: Tree) -> Tree:
    """Return params as ShapeDtypeStructs; a Python number is a scalar. Raises ValueError on other leaves."""

    def as_struct(keys: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, bool | int | float | complex):
            return jax.ShapeDtypeStruct((), jnp.result_type(leaf))
        if not hasattr(leaf, "shape"):
            kind = type(leaf).__name__
            raise ValueError(
                f"{path_name(keys)}: {leaf!r} is a {kind}, not an array or a number; leave it out of params"
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(as_struct, params)


def _laid_out(params: Tree, mesh: Mesh, specs: Tree) -> Iterable[tuple[str, jax.ShapeDtypeStruct, PartitionSpec]]:
    """Yield path, type and spec of each parameter. Raises ValueError if a spec does not fit its parameter or mesh."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract(params))
    for (keys, leaf), spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        for problem in _misfits(leaf.shape, spec, mesh):
            raise ValueError(f"{path_name(keys)} {leaf.shape}: {problem}")
        yield path_name(keys), leaf, spec


def path_name(keys: tuple) -> str:
    """Return a tree path as text: "layers/attention/query_DNH"."""
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):  # the array inside an NNX variable
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _merged(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
    """Merge rows (path, value) whose paths differ only in a number -> path with a set of numbers, value, count.

    Numbers are keys, or the end of a key after _: layers/0/up, Dense_0/kernel.
    """
    merged: dict[tuple, int] = {}  # (path as text and, at odd indices, sets of numbers; value) -> count
    for path, value in rows:
        parts = re.split(r"((?<![^/_])\d+(?![^/]))", path)
        merged[tuple(frozenset({part}) if i % 2 else part for i, part in enumerate(parts)), value] = 1
    for index in range(1, max((len(parts) for parts, _ in merged), default=0), 2):
        groups: dict[tuple, tuple[frozenset, int]] = {}  # all but the numbers at this index -> these numbers, count
        for (parts, value), count in merged.items():
            key = (parts[:index], parts[index + 1 :], value)
            numbers, total = groups.get(key, (frozenset(), 0))
            groups[key] = (numbers.union(*parts[index : index + 1]), total + count)
        merged = {}
        for (before, after, value), (numbers, count) in groups.items():
            middle = (numbers,) if numbers else ()
            merged[(*before, *middle, *after), value] = count
    return [("".join(map(_numbers, parts)), value, count) for (parts, value), count in merged.items()]


def _numbers(part: str | frozenset[str]) -> str:
    """Return a part of a path as text; several numbers as {0..31} or {0,2}."""
    if isinstance(part, str):
        return part
    numbers = sorted(part, key=int)
    if len(numbers) == 1:
        return numbers[0]
    is_range = int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
    return f"{{{numbers[0]}..{numbers[-1]}}}" if is_range else f"{{{','.join(numbers)}}}"


class _Rule(NamedTuple):
    pattern: str
    path: re.Pattern  # matches whole paths
    layout: str | PartitionSpec  # as given
    spec: PartitionSpec


def _parse(rules: Rules | Sequence[tuple]) -> list[_Rule]:
    pairs = rules.pairs if isinstance(rules, Rules) else rules
    form = "a pair (pattern, layout); write e.g. ('up/kernel', 'D F/tensor')"
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise ValueError(f"rules {pairs!r}: must be a list, each rule {form}")
    parsed = []
    for pair in pairs:
        types = [type(part) for part in pair] if isinstance(pair, tuple | list) else []
        if types not in ([str, str], [str, PartitionSpec]):
            raise ValueError(f"rule {pair!r}: must be {form}")
        pattern, spec = pair
        parsed.append(_Rule(pattern, _path_regex(pattern), spec, layout(spec) if isinstance(spec, str) else spec))
    return parsed


def _match(
    rules: Rules | Sequence[tuple], params: Tree, mesh: Mesh | None
) -> tuple[list[PartitionSpec], list[tuple[str, str]]]:
    """-> the spec of each leaf; problems: (path, rest of the line)."""
    parsed = _parse(rules)
    unused = {rule.pattern: None for rule in parsed}
    matched = []
    problems = []
    path = ""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract(params))[0]:
        path = path_name(keys)
        rule = next((rule for rule in parsed if rule.path.fullmatch(path)), None)
        if rule:
            unused.pop(rule.pattern, None)
        matched.append(rule.spec if rule and leaf.ndim else PartitionSpec())
        problems += [(path, f" {leaf.shape}: {problem}") for problem in _problems(rule, leaf.shape, mesh)]
    if not isinstance(rules, Rules) or not rules.optional:
        hint = f"paths are like {path!r}, and the first match wins"
        problems += [("", f"rule {pattern!r} matches no parameter; {hint}") for pattern in unused]
    return matched, problems


def _problems(rule: _Rule | None, shape: tuple[int, ...], mesh: Mesh | None) -> list[str]:
    """Return the problems of a parameter's rule, or of a missing one. Scalars need no rule."""
    if not shape:
        return []
    if rule is None:
        replicated = " ".join("D" * len(shape))
        return [f"no rule matches; add one, with {replicated!r} to replicate it"]
    says = f"rule {rule.pattern!r} says {rule.layout!r}"
    num_dims = len(rule.spec)
    if num_dims > len(shape) or (num_dims < len(shape) and isinstance(rule.layout, str)):
        return [f"{says}, {num_dims} dims; name all {len(shape)}"]
    return [] if mesh is None else [f"{says}, but {problem}" for problem in _misfits(shape, rule.spec, mesh)]


def _path_regex(pattern: str) -> re.Pattern:
    try:
        return re.compile(f"(.*/)?({pattern})")
    except re.error as error:
        raise ValueError(f"rule {pattern!r} is not a regular expression: {error}; see Python's re") from None


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes that shard one dim."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _misfits(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> list[str]:
    if len(spec) > len(shape):
        return [f"{spec} has {len(spec)} dims; give it at most {len(shape)}"]
    problems = []
    used = [axis for entry in spec for axis in _axes(entry)]
    twice = [axis for axis in dict.fromkeys(used) if used.count(axis) > 1]
    if twice:
        return [f"mesh axis {twice[0]!r} is used twice; an axis can split one dim only"]
    for dim, axes in enumerate(map(_axes, spec)):
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            problems.append(f"the mesh has no axis {unknown[0]!r}; it has {', '.join(mesh.shape)}")
        elif shape[dim] % prod(mesh.shape[axis] for axis in axes):
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            problems.append(f"{sizes} does not divide dim {dim} of {shape[dim]}; pad it, or replicate it")
    return problems
