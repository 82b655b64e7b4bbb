"""The largest decoder that one GPU trains, by the compiler's word, with more and more of it in host memory.

    python scripts/largest_model.py [--gpu h100] [--host-gb 2000] [section.key=value ...]

Layers of the shape of Llama-3-70B's (or as overridden), as many as fit: the estimate says how many, the compiler has
the last word. A GPU gives what JAX takes of it: 75%. Needs `pip install 'nanotrain_jax[cuda12]'`.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from nanotrain_jax.audit import cost, topology
from nanotrain_jax.config import Config
from nanotrain_jax.planner.compiled import compile_step
from nanotrain_jax.planner.estimate import Estimate, estimate, on_gpus
from nanotrain_jax.runtime import request

MODEL = {"family": "llama", "d_model": 8192, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672, "vocab_size": 128256}
MODEL |= {"loss_chunk": 2048}
HOST, FULL = {"offload_optimizer": "host"}, {"remat": "full"}
NVME = {"offload_optimizer": "nvme", "nvme_dir": "."}
MODES = {  # what rests in host memory -> ZeRO stage (2 and 3 part with gradients, also of one device), keys of memory
    "nothing": (0, FULL),
    "optimizer": (0, FULL | HOST),
    "optimizer, gradients": (2, FULL | HOST),
    "optimizer, gradients, params": (3, FULL | HOST | {"offload_params": "host"}),
    "all, and activations": (3, FULL | HOST | {"offload_params": "host", "offload_activations": "host"}),
    "gradients, params; optimizer in files": (3, FULL | NVME | {"offload_params": "host"}),
}


def planned(mode: str, layers: int, overrides: list[str]) -> Config:
    """The config of a mode with so many layers, resolved for one GPU."""
    zero, memory = MODES[mode]
    tree = {"model": MODEL | {"num_layers": layers}, "parallel": {"data": 1, "zero": zero}, "memory": memory}
    tree |= {"data": {"source": "synthetic", "batch_size": 1, "seq_len": 4096}}
    for key, value in request.nested(overrides).items():
        tree[key] = tree.get(key, {}) | value
    return on_gpus(request.parse(tree), 1, "h100")


def fits(e: Estimate, peak: float, host: float, host_bytes: float) -> bool:
    """Whether so many bytes of device and host memory are there."""
    return peak <= e.limit_bytes and host <= host_bytes


def largest(mode: str, gpu: str, host_bytes: float, overrides: list[str]) -> tuple[Estimate, dict]:
    """-> estimate and compiled step of the model with the most layers that fits."""
    low, high = 1, 2
    look = lambda layers: estimate(planned(mode, layers, overrides), gpu)
    fitting = lambda layers: fits(e := look(layers), e.peak_bytes, sum(e.on_host.values()), host_bytes)
    while fitting(high) and high < 4096:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    compiled, best = {}, None
    while True:  # up as long as it fits, then down until it does
        if low not in compiled:
            compiled[low] = compile_step(planned(mode, low, overrides), gpu)
        e, found = look(low), compiled[low]
        if fits(e, found["peak_bytes"], found["host_bytes"], host_bytes):
            best = e, found
            if low + 1 in compiled:
                return best
            low += 1
        elif best or low == 1:
            return best or (e, found)
        else:
            low -= 1


def main(argv: list[str] | None = None) -> int:
    """Print a table; 2 if the request is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--host-gb", type=float, default=2000, help="host memory for this GPU, GB")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args(argv)
    table = Table("in host memory", "layers", "parameters", "GB on the GPU", "GB on the host", "GB on NVMe")
    try:
        for mode in MODES:
            e, found = largest(mode, arguments.gpu, arguments.host_gb * 1e9, arguments.overrides)
            m = e.config.model
            row = (
                m.num_layers,
                f"{cost.parameters(m) / 1e9:.1f}e9",
                found["peak_bytes"] / 1e9,
                found["host_bytes"] / 1e9,
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
