"""What accelerators can do: figures from their makers' data sheets."""

from __future__ import annotations

# Dense 16-bit matmul FLOP/s per device, without sparsity, by a word of `jax.Device.device_kind`.
# NVIDIA data sheets: A100 (2021), H100 and H200 SXM (2023), B200 (2024).
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device, or None if it is not in the table (a CPU, say)."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)
