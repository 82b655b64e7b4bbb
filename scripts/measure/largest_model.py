"""Find the largest decoder that fits on one GPU, as compiled, with more and more state offloaded.

    python scripts/measure/largest_model.py [--gpu h100] [--host-gb 2000] [section.key=value ...]

Searches for the number of layers of the shape of Llama-3-70B's (or as overridden): first by the estimate, then by
compiling. The memory limit is what JAX allocates of a GPU: 75%. Needs `pip install 'nanotrain_jax[cuda12]'`.
"""

import argparse
import functools
import sys

from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import topology
from nanotrain_jax.config import load
from nanotrain_jax.config.schema import Config
from nanotrain_jax.costs import counts
from nanotrain_jax.parallel import mesh as meshes
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import Estimate, estimate, on_gpus

MODEL = {"family": "llama", "d_model": 8192, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672, "vocab_size": 128256}
MODEL |= {"loss_chunk": 2048}
HOST, FULL = {"offload_optimizer": "host"}, {"remat": "full"}
NVME = {"offload_optimizer": "nvme", "nvme_dir": "."}
MODES = {  # what is offloaded -> ZeRO stage (from 2 on gradients are offloaded, also on one device), keys of memory
    "nothing": (0, FULL),
    "optimizer": (0, FULL | HOST),
    "optimizer, gradients": (2, FULL | HOST),
    "optimizer, gradients, params": (3, FULL | HOST | {"offload_params": "host"}),
    "all, and activations": (3, FULL | HOST | {"offload_params": "host", "offload_activations": "host"}),
    "gradients, params; optimizer in files": (3, FULL | NVME | {"offload_params": "host"}),
}


def planned(mode: str, layers: int, overrides: list[str]) -> Config:
    """Return the config of a mode with this number of layers, resolved for one GPU."""
    zero, memory = MODES[mode]
    tree = {"model": MODEL | {"num_layers": layers}, "parallel": {"data": 1, "zero": zero}, "memory": memory}
    tree |= {"data": {"source": "synthetic", "batch_size": 1, "seq_len": 4096}}
    for key, value in load.nested(overrides).items():
        tree[key] = tree.get(key, {}) | value
    return on_gpus(load.parse(tree), 1, "h100")


def fits(e: Estimate, peak: float, host: float, host_bytes: float) -> bool:
    """True if these bytes of device and host memory are available."""
    return peak <= e.limit_bytes and host <= host_bytes


def largest(mode: str, gpu: str, host_bytes: float, overrides: list[str]) -> tuple[Estimate, dict]:
    """Return the estimate and the compiled step of the largest model that fits."""

    @functools.cache
    def estimated(layers: int) -> Estimate:
        return estimate(planned(mode, layers, overrides), gpu)

    @functools.cache
    def compiled(layers: int) -> dict:
        return compile_step(planned(mode, layers, overrides), gpu)

    def is_estimated_to_fit(layers: int) -> bool:
        e = estimated(layers)
        return fits(e, e.peak_bytes, sum(e.on_host.values()), host_bytes)

    def fits_when_compiled(layers: int) -> bool:
        memory = compiled(layers)
        return fits(estimated(layers), memory["peak_bytes"], memory["host_bytes"], host_bytes)

    low, high = 1, 2
    while is_estimated_to_fit(high) and high < 4096:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_estimated_to_fit(middle) else (low, middle)
    while low > 1 and not fits_when_compiled(low):
        low -= 1
    while fits_when_compiled(low) and fits_when_compiled(low + 1):
        low += 1
    return estimated(low), compiled(low)


def main(argv: list[str] | None = None) -> int:
    """Print a table; 2 if the request is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--host-gb", type=float, default=2000, help="host memory of the GPU, GB (default: 2000)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args(argv)
    meshes.configure(simulate=1)  # leaves GPUs alone
    table = Table("offloaded", "layers", "parameters", "GB on the GPU", "GB on the host", "GB on NVMe")
    try:
        for mode in MODES:
            e, memory = largest(mode, arguments.gpu, arguments.host_gb * 1e9, arguments.overrides)
            m = e.config.model
            row = (
                m.num_layers,
                f"{counts.parameters(m) / 1e9:.1f}e9",
                memory["peak_bytes"] / 1e9,
                memory["host_bytes"] / 1e9,
                e.nvme_bytes / 1e9,
            )
            table.add_row(mode, *(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row))
    except (ValueError, topology.NoCompiler) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
