"""Compare XLA:GPU flags that other trainers set with our options, in our compiled step, without a GPU: a table.

    python scripts/measure/compare_flags.py --config configs/llama3_8b.yaml [--gpu h100] [--gpus 8] [--flags NAME,NAME]
                                    [section.key=value ...]

Compiles the step once with our options, then once with each row of FLAGS besides (needs
`pip install 'nanotrain_jax[cuda12]'`). nanotrain_jax/parallel/XLA_FLAGS.md shows the results and says what we set.
"""

import argparse
import sys

import jax
from rich.console import Console
from rich.table import Table

from nanotrain_jax.config import schema as configs
from nanotrain_jax.config.load import load
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import on_gpus

MIB = 2**20
ON = "COLLECTIVE_PIPELINING_MODE_ON"
PIPELINED = {  # how a version of JAX spells it
    kind: {f"xla_gpu_pipeline_{kind}": ON}
    if jax.__version_info__ >= (0, 12)
    else {f"xla_gpu_enable_pipelined_{kind}": True}
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}
COMBINED = "xla_gpu_{}_combine_threshold_bytes"


def combined(all_reduce: int, all_gather: int, reduce_scatter: int) -> dict[str, int]:
    """Return options that combine collectives up to these many MiB."""
    sizes = {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
    return {COMBINED.format(kind): size * MIB for kind, size in sizes.items()}


FLAGS = {  # name -> options of `jax.jit(compiler_options=...)`
    "ours": {},
    "latency_hiding_scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "triton_gemm=false": {"xla_gpu_enable_triton_gemm": False},
    "command_buffer=off": {"xla_gpu_enable_command_buffer": ""},
    "highest_priority_async_stream": {"xla_gpu_enable_highest_priority_async_stream": True},
    "combine 128 128 64 MiB": combined(128, 128, 64),
    "combine 1024 1024 128 MiB": combined(1024, 1024, 128),
    "pipeline_all_gather": PIPELINED["all_gather"],
    "pipeline_reduce_scatter": PIPELINED["reduce_scatter"],
    "pipeline_all_reduce": PIPELINED["all_reduce"],
    "while_loop_double_buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
    "combine_by_dim=false": {
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    },
    "disable_hlo_passes=rematerialization": {"xla_disable_hlo_passes": "rematerialization"},
    "collective_overlap_limit=1": {"xla_gpu_experimental_parallel_collective_overlap_limit": 1},
    "collective_overlap_limit=8": {"xla_gpu_experimental_parallel_collective_overlap_limit": 8},
}


def compiled_with(config: configs.Config, gpu: str, name: str) -> dict[str, float]:
    """Compile the step of a resolved config with a row of FLAGS -> figures of the program."""
    compiled = compile_step(config, gpu, FLAGS[name])
    rows = compiled["collectives"]
    wire = max(sum(row["bytes_per_device"] for row in rows), 1)
    return {
        "behind": sum(row["behind_matmuls_bytes"] for row in rows) / wire,
        "exposed": sum(row["exposed_bytes"] for row in rows) / wire,
        "wire_bytes": wire,
        "peak_bytes": compiled["peak_bytes"],
        "seconds": compiled["compile_seconds"],
    }


def show(results: dict[str, dict[str, float]], title: str) -> Table:
    """Return results as a table: bytes behind matmuls, and with nothing beside them; peak memory."""
    table = Table(title=title)
    for name in ("flag", "wire GB", "behind matmuls", "exposed", "peak GB", "compile s"):
        table.add_column(name, justify="left" if name == "flag" else "right")
    for name, r in results.items():
        sizes = f"{r['wire_bytes'] / 1e9:.2f}", f"{r['behind']:.1%}", f"{r['exposed']:.1%}"
        table.add_row(name, *sizes, f"{r['peak_bytes'] / 1e9:.2f}", f"{r['seconds']:.0f}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Compile, print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--flags", default=",".join(FLAGS), help="rows of FLAGS")
    asked, overrides = parser.parse_known_args(argv)
    names = asked.flags.split(",")
    try:
        if unknown := set(names) - FLAGS.keys():
            raise ValueError(f"--flags={','.join(sorted(unknown))}: unknown; use {' | '.join(FLAGS)}")
        config = on_gpus(load(asked.config, overrides), asked.gpus, asked.gpu)
        results = {name: compiled_with(config, asked.gpu, name) for name in names}
    except (ValueError, OSError, RuntimeError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    Console(width=130).print(show(results, f"{asked.gpus} x {asked.gpu}, jax {jax.__version__}, {' '.join(overrides)}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
