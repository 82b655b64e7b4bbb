"""Matmul FLOPs of a compiled program, 2 per multiply-add, read from its HLO text (audit/hlo.py)."""

from __future__ import annotations

import math
import re

from nanotrain_jax.audit import hlo
from nanotrain_jax.audit.hlo import Instruction, Program

GEMM = re.compile(r'"__cublas\$(gemm|lt\$matmul)')  # custom calls that multiply; others solve triangular systems
GROUPED = re.compile(r"ragged_(?:contracting_dim_)?dot")  # in the op_name of a Mosaic kernel: those of tokamax
AS_NEEDED = re.compile(r"as_needed_(\w+)")


def flops(text: str, rates: hlo.Rates = hlo.NO_RATES) -> float:
    """Return the matmul FLOPs of a compiled program per device, 2 per multiply-add.

    cuDNN attention counts as full attention, whatever the mask, with a sliding window as that many keys: 2 matmuls
    forward, 4 backward; the recomputation of scores in its backward is not counted. A grouped matmul of tokamax counts
    as the rows of its buffer times rates[NAME], without what its tiles multiply beside the rows of a group.
    """
    program = hlo.parse(text)
    return sum(count * _flops(program, name, index, rates) for name, index, count in hlo.walk(program, rates))


def _flops(program: Program, name: str, index: int, rates: hlo.Rates) -> float:
    """Return the FLOPs of one instruction, without the computations it calls."""
    block = program.computations[name]
    i = block[index]
    if is_grouped_matmul(i):
        return _grouped_flops(block, i) * rates.get((AS_NEEDED.findall(hlo.op_name(i)) or [""])[-1], 1)
    is_cublas = GEMM.search(i.attributes)
    if i.opcode != "dot" and not is_cublas and '"__cudnn$fmha' not in i.attributes:
        return 0.0
    shape = hlo.shapes(next(other.type for other in block if other.name == i.operands[0]))[0]
    if i.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)[1]
    elif is_cublas:
        contracted = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', i.attributes)[1]
    else:
        scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', i.attributes)[1]
        window = re.search(r'"sliding_window_length":\s*(\d+)', i.attributes)
        *queries, keys = (int(n) for n in re.findall(r"\d+", scores))
        keys = min(keys, int(window[1]) or keys) if window else keys
        return (4 if "Backward" in i.attributes else 2) * 2.0 * math.prod(queries) * keys * shape[-1]
    return 2.0 * math.prod(hlo.shapes(i.type)[0]) * math.prod(shape[int(d)] for d in re.findall(r"\d+", contracted))


def is_grouped_matmul(i: Instruction) -> bool:
    """True for a kernel that multiplies rows with the matrices of their groups."""
    is_mosaic = i.opcode == "custom-call" and 'custom_call_target="mosaic_gpu' in i.attributes
    return is_mosaic and GROUPED.search(hlo.op_name(i)) is not None


def _grouped_flops(block: list[Instruction], i: Instruction) -> float:
    """Return the FLOPs of x[M D], w[E D F] -> y[M F], or of x[D M], g[M F] -> w[E D F]: 2 M D F, of all M rows."""
    types = {other.name: other.type for other in block}
    *_, result = hlo.shapes(i.type)
    operands = [shape for name in i.operands for shape in hlo.shapes(types[name])]
    if len(result) == 3:
        g = [shape for shape in operands if len(shape) == 2][-1]
        return 2.0 * g[0] * math.prod(result[1:])
    w = next(shape for shape in operands if len(shape) == 3)
    return 2.0 * result[0] * math.prod(w[1:])


def flops_inside(program: Program, name: str, index: int) -> float:
    """Return the FLOPs of one instruction and of the computations it calls; of kernels for groups of all rows."""
    called = hlo.CALLED.findall(program.computations[name][index].attributes)
    inner = (
        count * _flops(program, *place, hlo.NO_RATES) for c in called for *place, count in hlo.walk_from(program, c, 1)
    )
    return _flops(program, name, index, hlo.NO_RATES) + sum(inner)
