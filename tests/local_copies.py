"""Look at local copies of checkpoints (checkpoint.local_dir), and damage them."""

import shutil

from nanotrain_jax.checkpoint import local


def kept(folder):
    """Return the steps of the complete local copies of one process."""
    (run,) = (path.name for path in folder.iterdir() if path.is_dir())
    return local.complete(folder, run)


def remove_checkpoint(run, step):
    """Remove a shared checkpoint, as if the run had been killed before it."""
    shutil.rmtree(run / "checkpoints" / str(step))
    shutil.rmtree(run / "checkpoints" / "checksums" / str(step))


def flip(folder, step, at=-100):
    """Flip a bit of the newest array file of a step."""
    (file,) = folder.glob(f"*/{step}/*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)
