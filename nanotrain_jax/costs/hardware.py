"""Accelerator specifications with sources: peak FLOP/s, memory, bandwidth, links, topology. No JAX.

Units: bytes, bytes per second, FLOP per second. Links: one direction.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints


class Gpu(NamedTuple):
    """Specifications of one accelerator, SXM form factor.

    peak_flops     dense 16-bit matmuls, without sparsity: NVIDIA's data sheets (A100 2021, H100 and H200 2023, B200 and
                   GB200 2024)
    matmul         fraction of peak_flops that large matmuls reach: assumed, from published training runs
    nvlink         half of the bidirectional bandwidth in the same data sheets: 600, 900, 1,800 GB/s
    network        one adapter per GPU: DGX A100 8 x 200 Gb/s, DGX H100, H200 and B200 8 x 400 Gb/s, GB200 NVL72 400
                   Gb/s each (NVIDIA's data sheets of these systems)
    to_host        one direction between a GPU and host memory: PCIe 4 or 5 with 16 lanes; GB200: half of the NVLink-C2C
                   of a Grace CPU, which two GPUs share
    host, joined   GPUs per host, and GPUs per NVLink domain: the host; GB200 NVL72: the rack
    others         what the CUDA runtime reports for the device, as OpenXLA publishes it for its own targets
    """

    kind: str  # jax.Device.device_kind
    peak_flops: float
    matmul: float
    memory_bytes: int
    memory_bandwidth: int
    nvlink: float
    network: float
    to_host: float
    host: int
    joined: int
    capability: int  # major CUDA compute capability
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # per core


_A100 = {"peak_flops": 312e12, "matmul": 0.65, "nvlink": 300e9, "network": 25e9, "to_host": 32e9}
_A100 |= {"host": 8, "joined": 8, "capability": 8, "cores": 108, "fpus_per_core": 64, "clock_ghz": 1.41}
_A100 |= {"l2_bytes": 41_943_040, "shared_bytes": 167_936}
_HOPPER = {"peak_flops": 989e12, "matmul": 0.55, "nvlink": 450e9, "network": 50e9, "to_host": 64e9}
_HOPPER |= {"host": 8, "joined": 8, "capability": 9, "cores": 132, "fpus_per_core": 128, "clock_ghz": 1.98}
_HOPPER |= {"l2_bytes": 52_428_800, "shared_bytes": 233_472}
_BLACKWELL = {"matmul": 0.55, "nvlink": 900e9, "network": 50e9}
_BLACKWELL |= {"capability": 10, "fpus_per_core": 128, "shared_bytes": 233_472}
_B200 = {"peak_flops": 2250e12, "to_host": 64e9, "host": 8, "joined": 8}
_B200 |= {"cores": 148, "clock_ghz": 1.965, "l2_bytes": 132_644_864}
_GB200 = {"peak_flops": 2500e12, "to_host": 225e9, "host": 4, "joined": 72}
_GB200 |= {"cores": 152, "clock_ghz": 2.062, "l2_bytes": 135_528_448}

# A simulated device: part of a laptop's CPU; assumed.
SIMULATED = "cpu"
_LAPTOP = {"peak_flops": 40e9, "matmul": 0.5, "nvlink": 5e9, "network": 5e9, "to_host": 5e9}
_LAPTOP |= {"host": 4096, "joined": 4096}
_LAPTOP |= dict.fromkeys(("capability", "cores", "fpus_per_core", "clock_ghz", "l2_bytes", "shared_bytes"), 0)

GPUS = {
    name: Gpu(kind=kind, memory_bytes=size, memory_bandwidth=bandwidth, **figures)
    for name, kind, size, bandwidth, figures in (
        ("a100-40", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 1_555_200_000_000, _A100),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000, _A100),
        ("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, _HOPPER),
        ("h200", "NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000, _HOPPER),
        ("b200", "NVIDIA B200", 191_514_411_008, 7_672_320_000_000, _BLACKWELL | _B200),
        ("gb200", "NVIDIA GB200", 197_897_748_480, 7_928_064_000_000, _BLACKWELL | _GB200),
        (SIMULATED, "cpu", 4_000_000_000, 10_000_000_000, _LAPTOP),
    )
}
PUBLISHED = frozenset(GPUS)


def find(name: str) -> Gpu:
    """Return a GPU by its name in GPUS. Raises ValueError that lists the names."""
    if name not in GPUS:
        raise ValueError(f"gpu={name!r} is unknown; use {', '.join(GPUS)}")
    return GPUS[name]


def add(name: str, figures: Mapping[str, Any]) -> None:
    """Add a GPU to GPUS. figures: fields of `Gpu` by name; `like`, a known GPU, provides those left out.

    Raises ValueError (one line) for a name that is taken, and for a figure that is unknown, missing or not above 0.
    """
    if name in PUBLISHED:
        raise ValueError(f"gpu file {name}: {name} is one of the known GPUs; give the file another name")
    given = dict(figures)
    like = given.pop("like", None)
    fields = find(str(like))._asdict() if like is not None else {}
    for key, value in given.items():
        if key not in Gpu._fields:
            near = difflib.get_close_matches(str(key), Gpu._fields, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(Gpu._fields)}"
            raise ValueError(f"gpu file {name}: unknown figure {key}; {remedy}")
        fields[key] = _figure(name, key, value)
    missing = [field for field in Gpu._fields if field not in fields]
    if missing:
        raise ValueError(
            f"gpu file {name}: {', '.join(missing)} missing; add them, or `like: h100` to copy them from it"
        )
    GPUS[name] = Gpu(**fields)


def _figure(name: str, key: str, value: Any) -> Any:
    """Return a figure in the type of its field of `Gpu`. Raises ValueError."""
    kind = get_type_hints(Gpu)[key]
    if kind is str:
        if isinstance(value, str) and re.fullmatch(r"[\w .+-]+", value):
            return value
        raise ValueError(f"gpu file {name}: {key}={value!r}: must be letters, digits, spaces and . + -")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e30 or (key == "matmul" and value > 1):
        raise ValueError(
            f"gpu file {name}: {key}={value!r}: must be a number above 0" + ", at most 1" * (key == "matmul")
        )
    if kind is int and value != int(value):
        raise ValueError(f"gpu file {name}: {key}={value!r}: must be a whole number")
    return kind(value)


def check_count(name: str, count: int) -> None:
    """Raise ValueError unless `count` GPUs are within one host or fill whole hosts."""
    host = find(name).host
    if count > 100_000:
        raise ValueError(f"gpus={count}: must be at most 100000")
    if count < 1 or (count > host and count % host):
        near = max(-(-count // host) * host, 1) if count else 1
        raise ValueError(f"gpus={count}: 1 to {host}, or whole hosts of {host}; use {near}")


def peak_flops(device_kind: str) -> float | None:
    """Return the dense 16-bit FLOP/s of one device; None if it is not in GPUS (a CPU, for example)."""
    name = name_of(device_kind)
    return name and GPUS[name].peak_flops


def name_of(device_kind: str) -> str | None:
    """Return the name in GPUS of a `jax.Device.device_kind`; None if it is not there.

    Of those with several sizes of memory the one whose size the kind has, else the first. Parts of a GPU (MIG), and
    slower cards of the same name, are none of them.
    """
    words = re.split(r"[ -]", device_kind)
    if "MIG" in words or ("H100" in words and {"PCIe", "NVL"} & set(words)):
        return None
    fitting = [name for name in GPUS if name.split("-")[0].upper() in words]
    of_size = [name for name in fitting if f"{name.split('-')[-1]}GB" in words]
    return next(iter(of_size + fitting), None)
