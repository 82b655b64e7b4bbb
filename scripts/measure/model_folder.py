"""Measure memory and time of reading a large random model folder: onto simulated devices, into a run, and out again.

    python scripts/measure/model_folder.py --layers 32 --scratch /mnt/scratch

The sizes are those of Llama 2 7B, in bfloat16; scratch needs three times the folder. Memory is the largest sum of
anonymous pages of a process (RssAnon, sampled): pages of files, which the system can drop, are not in it.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from nanotrain_jax.checkpoint import safetensors
from nanotrain_jax.config.load import Parser, at_least, folder_argument
from nanotrain_jax.models import hugging_face, hugging_face_config
from nanotrain_jax.run.model_config import CONFIG, resolved_model

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
LOAD = """
import sys, time, numpy as np
from pathlib import Path
from nanotrain_jax.parallel import mesh
mesh.configure(simulate=8)
import jax
from jax.sharding import NamedSharding, PartitionSpec
from nanotrain_jax.models import decoder
from nanotrain_jax.parallel.sharding import specs
from nanotrain_jax.run import hugging_face, sources
source = hugging_face.opened(Path(sys.argv[1]))
devices = mesh.make(data=1, tensor=8)
split = decoder.Split("tensor", 8, vocab_axes=("tensor",), vocab_shards=8)
_, shapes = decoder.abstract(source.model, split)
layouts = specs(decoder.rules(source.model, split), shapes, devices)
like = jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(x.shape, source.dtype, sharding=NamedSharding(devices, spec)), shapes, layouts
)
arrays = jax.block_until_ready(sources.on_mesh(source, like, None))
print(sum(x.nbytes for x in jax.tree.leaves(arrays)) / 1e9, "GB on the devices")
"""


def write_folder(folder: Path, layers: int) -> None:
    """Write a random model folder, file by file."""
    config = {"model_type": "llama", "num_hidden_layers": layers, "torch_dtype": "bfloat16"} | SIZES
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    model = resolved_model(hugging_face_config.section(config, CONFIG))
    shapes = {x.name: x.shape for x in hugging_face.inventory("llama", model)}
    bits = np.random.default_rng(0)

    def random(name: str) -> np.ndarray:
        return (bits.standard_normal(shapes[name], np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    safetensors.write(folder, shapes, np.dtype(ml_dtypes.bfloat16), random)


def read_once(path: Path) -> int:
    """Read a file; -> its bytes."""
    size = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 24):
            size += len(chunk)
    return size


def core_seconds(who: int) -> float:
    """Return the time that processes have spent on cores so far."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measured(what: str, command: Sequence[str]) -> None:
    """Run a command; print its time, that of its threads on the cores, and the largest RssAnon."""
    started, largest, cores = time.monotonic(), 0.0, core_seconds(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = [line.split() for line in status.read_text().splitlines() if line.startswith("RssAnon")]
        largest = max([largest, *(int(line[1]) / 1e6 for line in lines)])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{what} failed")
    seconds, cores = time.monotonic() - started, core_seconds(resource.RUSAGE_CHILDREN) - cores
    said = " ".join(process.stdout.read().split())
    print(f"{what}: {seconds:.1f} s, {cores:.1f} s on cores, {largest:.2f} GB; {said}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each command."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=at_least(1), default=32, help="of 405 MB each (default: 32)")
    parser.add_argument("--scratch", type=folder_argument, required=True, help="folder to write to")
    options = parser.parse_args(argv)
    folder, run, back = (options.scratch / name for name in ("model", "run", "back"))
    try:
        write_folder(folder, options.layers)
        started, cores = time.monotonic(), core_seconds(resource.RUSAGE_SELF)
        size = sum(map(read_once, folder.glob("*.safetensors"))) / 1e9
        seconds, cores = time.monotonic() - started, core_seconds(resource.RUSAGE_SELF) - cores
        print(f"{size:.2f} GB; reading its files once: {seconds:.1f} s, {cores:.1f} s on cores", flush=True)
        measured("onto 8 devices", ["-c", LOAD, str(folder)])
        convert = "-m", "nanotrain_jax.convert"
        measured("into a run", [*convert, "--from", str(folder), "--out", str(run), "--no-check"])
        measured("out of the run, checked", [*convert, "--run", str(run), "--to", str(back)])
    finally:
        for path in (folder, run, back):
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
