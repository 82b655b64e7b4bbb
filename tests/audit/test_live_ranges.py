"""Memory over the instructions of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_cuda_compiler

from nanotrain_jax.audit import hlo, live_ranges, topology

LAYERS, SIZE = 6, 1024
SQUARE = 4 * SIZE * SIZE  # bytes


def scanned(weights, x):
    """Loss of a scan over layers: its backward keeps what each layer computes."""

    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def descend(weights, x):
    return weights - 0.1 * jax.grad(scanned)(weights, x)


def lowered(device):
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = (LAYERS, SIZE, SIZE), (SIZE, SIZE)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]
    return jax.jit(descend, donate_argnums=0).lower(*arrays)


@needs_cuda_compiler
def test_memory_in_use_has_the_compilers_peak_and_says_who_holds_it():
    compiled, dump = live_ranges.compile_and_dump(lowered(topology.compile_only("h100", 1)[0]))
    found = live_ranges.timeline(compiled.as_text(), dump)
    in_use = live_ranges.in_use(found, [0] * len(found.spans))[:, 0]
    assert in_use.max() == pytest.approx(hlo.memory(compiled)["peak_bytes"], rel=0.001)
    held = live_ranges.holders(found, int(in_use.argmax()))
    assert sum(held.values()) == in_use.max()
    origins = {n: found.spans[n].origin for n in held}
    arguments = {origins[n].op_name: size for n, size in held.items() if origins[n].opcode == "argument"}
    assert arguments == {"weights": LAYERS * SQUARE, "x": SQUARE}  # the donated one once
    stacked = [found.spans[n] for n in held if found.spans[n].size == LAYERS * SQUARE and found.spans[n].address]
    assert stacked
    for span in stacked:  # what is stored, not the loop that stacks it
        frame = span.origin.frames[0]
        assert frame.file == __file__
        assert frame.function in ("scanned.<locals>.layer", "scanned")


@needs_cuda_compiler
def test_the_compiled_program_is_the_same_without_the_dump():
    device = topology.compile_only("h100", 1)[0]
    compiled, _ = live_ranges.compile_and_dump(lowered(device))
    assert hlo.memory(compiled) == hlo.memory(lowered(device).compile())


def test_cpu_programs_have_no_live_ranges():
    with pytest.raises(RuntimeError, match="compile for GPUs"):
        live_ranges.compile_and_dump(lowered(jax.devices()[0]))
