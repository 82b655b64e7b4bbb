"""XLA:GPU compiler options for communication: combine thresholds, latency hiding, host offload.

They change when data moves, never what moves.
"""

import jax

# Matmuls by cuBLAS, not by Triton: faster on an H100, it adds biases and residuals, computes GELU, and takes the scales
# of float8. Each alone: merged, q, k and v would have to be taken apart, and have several scales.
MATMUL_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def gpu_options(
    bucket_mb: float, gathered_bytes: int = 0, in_flight: int = 0, offload: bool = False, loops: bool = False
) -> dict[str, int | bool]:
    """Return XLA:GPU options for `jax.jit(compiler_options=...)`. What each does: parallel/XLA_FLAGS.md.

    bucket_mb: combine collectives of one kind that are ready together, up to this many MiB; all-gathers up to
    gathered_bytes, if these are more: those of a layer that is gathered ahead. in_flight: collectives in flight at a
    time, so that sends between stages, hops of ring attention, or the gather and the scatter of a turn of the layer
    loop overlap with each other (0: XLA's default, 1).
    offload: allow many host copies in flight at a time (default: two), and do not count host memory as device memory,
    which would make XLA rematerialize to save it.
    loops: the layers are in a loop. There jax 0.11 (not 0.10 or 0.12) would repeat each matmul whose result is kept for
    the backward, to have one of both write it into the stack of all layers: 13% more FLOPs in a step of Llama 3.2 3B.
    """
    kinds = "all_reduce", "all_gather", "reduce_scatter"
    options = {f"xla_gpu_{kind}_combine_threshold_bytes": int(bucket_mb * 2**20) for kind in kinds}
    gathers = "xla_gpu_all_gather_combine_threshold_bytes"
    options[gathers] = max(options[gathers], gathered_bytes)
    options |= MATMUL_OPTIONS
    if in_flight:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = in_flight
    if loops and (0, 11) <= jax.__version_info__ < (0, 12):
        options["xla_gpu_enable_dynamic_slice_fusion"] = False
    if offload:
        options["xla_gpu_experimental_parallel_async_compute_limit"] = 64
        options["xla_gpu_memory_limit_slop_factor"] = 10_000  # % of the device's memory
    return options
