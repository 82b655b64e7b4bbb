"""Layouts in the notation of our docstrings, and rules that lay out the parameters of any Flax model.

    layout("D/data F/tensor")        a PartitionSpec
    Rules([(pattern, layout), ...])  which parameters are laid out how; FLAX and HUGGING_FACE_LLAMA are ready made
    specs(rules, params, mesh)       a PartitionSpec for every parameter
    report(rules, params, mesh)      what does not fit, or the layout of each parameter and its bytes on a device
    shard(params, mesh, specs)       the parameters, so laid out

Parameters are any pytree of arrays, ShapeDtypeStructs or numbers: Linen variables, NNX state, nested dicts. A
parameter's path is its keys with slashes between, as in "layers/0/attention/query/kernel". Nothing here needs our model
or its config.
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

Tree = Any  # a pytree of arrays


class Rules(NamedTuple):
    """Ordered pairs of a path pattern and a layout; the first that matches a parameter's path lays it out.

    pattern: a regular expression for the end of the path, from the beginning of a key to the end of the last: "kernel",
    "(query|key)/kernel", "layers/.*/bias". A layout: text with a word for each dim (`layout`), or a PartitionSpec.
    optional: patterns may match nothing, as in a set for a family of models. Functions take a list of pairs as well.
    """

    pairs: Sequence[tuple[str, str | PartitionSpec]]
    optional: bool = False

    def renamed(self, **axes: str) -> Rules:
        """Return the same rules for a mesh whose axes have other names, as in FLAX.renamed(tensor="tp")."""

        def of_mesh(laid: str | PartitionSpec) -> str | PartitionSpec:
            if isinstance(laid, str):
                return re.sub(r"(?<=[/,])\w+", lambda axis: axes.get(axis[0], axis[0]), laid)
            return PartitionSpec(*jax.tree.map(lambda axis: axes.get(axis, axis), tuple(laid)))

        return self._replace(pairs=[(pattern, of_mesh(laid)) for pattern, laid in self.pairs])


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
    """What is wrong with rules for these parameters, a line each: nothing, if they fit.

    A parameter that no rule covers (scalars need none), a layout with another number of dims than its parameter, a
    pattern that matches nothing; with a mesh also an axis that it lacks and a dim that its axes do not divide. Equal
    lines of several layers are one, as in "layers/{0..31}/up". layouts: if nothing is wrong, return `describe` of the
    resulting layouts; raises ValueError without a mesh.
    """
    if layouts and mesh is None:
        raise ValueError("layouts=True needs a mesh to know the bytes of a device; pass mesh=")
    problems = _match(rules, params, mesh)[1]
    if layouts and not problems:
        return describe(params, mesh, specs(rules, params, mesh))
    return [path + text for path, text, _ in _folded(problems)]


def describe(params: Tree, mesh: Mesh, specs: Tree) -> list[str]:
    """A line for each parameter, layers that are equal in one: path, dtype[dim/axes, ...], count x bytes on a device.

    The last line is their sum. Raises ValueError where an axis does not exist or does not divide its dim.
    """
    rows = []
    held = whole = 0
    for path, x, spec in _laid_out(params, mesh, specs):
        shard_bytes = prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
        dims = (f"{n}/{','.join(_axes(entry))}" if entry else f"{n}" for n, entry in zip_longest(x.shape, spec))
        rows.append((path, (f"{x.dtype}[{', '.join(dims)}]", shard_bytes)))
        held += shard_bytes
        whole += x.size * x.dtype.itemsize
    lines = []
    for path, (kind, shard_bytes), count in _folded(rows):
        lines.append([path, kind, f"{count} x {shard_bytes:,} bytes" if count > 1 else f"{shard_bytes:,} bytes"])
    paths, kinds = (max((len(line[i]) for line in lines), default=0) for i in range(2))
    lines = [f"{path:{paths}}  {kind:{kinds}}  {size}" for path, kind, size in lines]
    return [*lines, f"one device holds {held:,} of {whole:,} bytes"]


def specs(rules: Rules | Sequence[tuple], params: Tree, mesh: Mesh | None = None) -> Tree:
    """A PartitionSpec for every parameter, in the same tree; no None at its end, as jit returns them.

    Raises ValueError with the first line of the report.
    """
    found, problems = _match(rules, params, mesh)
    if problems:
        lines = report(rules, params, mesh)
        more = f" (and {len(lines) - 1} more: see report())" if len(lines) > 1 else ""
        raise ValueError(lines[0] + more)
    lengths = (max((d + 1 for d, axes in enumerate(spec) if axes), default=0) for spec in found)
    found = [PartitionSpec(*spec[:length]) for spec, length in zip(found, lengths, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def shard(params: Tree, mesh: Mesh, specs: Tree) -> Tree:
    """params, laid out on mesh by specs. Raises ValueError where an axis does not exist or does not divide its dim."""
    placed = [NamedSharding(mesh, spec) for _, _, spec in _laid_out(params, mesh, specs)]
    return jax.device_put(params, jax.tree.unflatten(jax.tree.structure(params), placed))


def optimizer_specs(optimizer: optax.GradientTransformation, params: Tree, moment_specs: Tree) -> Tree:
    """-> PartitionSpecs of the state that optimizer.init(params) makes.

    moment_specs (of `zero_specs`) for what has the shape of its parameter, as Adam's moments have; whole are counts,
    and what has another shape, as Adafactor's factors have. What an optax mask leaves out stays out.
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
    """params as ShapeDtypeStructs; a Python number is a scalar. Raises ValueError on a leaf of another kind."""

    def one(keys: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, bool | int | float | complex):
            return jax.ShapeDtypeStruct((), jnp.result_type(leaf))
        if not hasattr(leaf, "shape"):
            kind = type(leaf).__name__
            raise ValueError(f"{_path(keys)}: {leaf!r} is a {kind}, not an array or a number; leave it out of params")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def _laid_out(params: Tree, mesh: Mesh, specs: Tree) -> Iterable[tuple[str, jax.ShapeDtypeStruct, PartitionSpec]]:
    """Path, type and spec of each parameter. Raises ValueError on what does not fit the mesh."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract(params))
    for (keys, leaf), spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        for problem in _misfits(leaf.shape, spec, mesh):
            raise ValueError(f"{_path(keys)} {leaf.shape}: {problem}")
        yield _path(keys), leaf, spec


def _path(keys: tuple) -> str:
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):  # the array inside an NNX variable
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _folded(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
    """Rows (path, what is said of it) -> those that differ in a number of their path only as one, and how many it is.

    Numbers are keys, or stand at the end of a key behind _: layers/0/up, Dense_0/kernel.
    """
    folded: dict[tuple, int] = {}  # (path as text and, at odd places, sets of numbers; what is said) -> how many
    for path, said in rows:
        parts = re.split(r"((?<![^/_])\d+(?![^/]))", path)
        folded[tuple(frozenset({part}) if i % 2 else part for i, part in enumerate(parts)), said] = 1
    for place in range(1, max((len(parts) for parts, _ in folded), default=0), 2):
        alike: dict[tuple, tuple[frozenset, int]] = {}  # all but the numbers at this place -> these, and how many
        for (parts, said), count in folded.items():
            key = (parts[:place], parts[place + 1 :], said)
            numbers, total = alike.get(key, (frozenset(), 0))
            alike[key] = (numbers.union(*parts[place : place + 1]), total + count)
        folded = {}
        for (before, behind, said), (numbers, count) in alike.items():
            here = (numbers,) if numbers else ()
            folded[(*before, *here, *behind), said] = count
    return [("".join(map(_numbers, parts)), said, count) for (parts, said), count in folded.items()]


def _numbers(part: str | frozenset[str]) -> str:
    """A part of a path as text: of several numbers {0..31} or {0,2}."""
    if isinstance(part, str):
        return part
    found = sorted(part, key=int)
    if len(found) == 1:
        return found[0]
    is_range = int(found[-1]) - int(found[0]) == len(found) - 1
    return f"{{{found[0]}..{found[-1]}}}" if is_range else f"{{{','.join(found)}}}"


class _Rule(NamedTuple):
    """A rule, parsed."""

    pattern: str
    path: re.Pattern  # of the parameters that the pattern covers
    layout: str | PartitionSpec  # as it was given
    spec: PartitionSpec


def _table(rules: Rules | Sequence[tuple]) -> list[_Rule]:
    pairs = rules.pairs if isinstance(rules, Rules) else rules
    form = "a pair of a pattern and a layout; write e.g. ('up/kernel', 'D F/tensor')"
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise ValueError(f"rules {pairs!r} are not a list; each is {form}")
    table = []
    for pair in pairs:
        types = [type(part) for part in pair] if isinstance(pair, tuple | list) else []
        if types not in ([str, str], [str, PartitionSpec]):
            raise ValueError(f"rule {pair!r} is not {form}")
        pattern, laid = pair
        table.append(_Rule(pattern, _ending(pattern), laid, layout(laid) if isinstance(laid, str) else laid))
    return table


def _match(
    rules: Rules | Sequence[tuple], params: Tree, mesh: Mesh | None
) -> tuple[list[PartitionSpec], list[tuple[str, str]]]:
    """-> the spec of each leaf, and the problems found: path, and the rest of the line."""
    table = _table(rules)
    unused = {rule.pattern: None for rule in table}
    found = []
    problems = []
    path = ""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract(params))[0]:
        path = _path(keys)
        rule = next((rule for rule in table if rule.path.fullmatch(path)), None)
        if rule:
            unused.pop(rule.pattern, None)
        found.append(rule.spec if rule and leaf.ndim else PartitionSpec())
        problems += [(path, f" {leaf.shape}: {problem}") for problem in _problems(rule, leaf.shape, mesh)]
    if not isinstance(rules, Rules) or not rules.optional:
        hint = f"paths are like {path!r}, and the first rule counts"
        problems += [("", f"rule {pattern!r} lays out no parameter; {hint}") for pattern in unused]
    return found, problems


def _problems(rule: _Rule | None, shape: tuple[int, ...], mesh: Mesh | None) -> list[str]:
    """What is wrong with the rule for a parameter, or with having none. Scalars need none."""
    if not shape:
        return []
    if rule is None:
        whole = " ".join("D" * len(shape))
        return [f"no rule covers it; add one, with {whole!r} to keep it whole"]
    says = f"rule {rule.pattern!r} says {rule.layout!r}"
    named = len(rule.spec)
    if named > len(shape) or (named < len(shape) and isinstance(rule.layout, str)):
        return [f"{says}, {named} dims; name all {len(shape)}"]
    return [] if mesh is None else [f"{says}, but {problem}" for problem in _misfits(shape, rule.spec, mesh)]


def _ending(pattern: str) -> re.Pattern:
    try:
        return re.compile(f"(.*/)?({pattern})")
    except re.error as error:
        raise ValueError(f"rule {pattern!r} is not a regular expression: {error}; see Python's re") from None


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one dim is split over."""
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
            problems.append(f"{sizes} does not divide dim {dim} of {shape[dim]}; pad it, or leave it whole")
    return problems
