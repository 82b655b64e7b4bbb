"""The frozen weights that adapters belong to (train.lora): where they are, and the checksums of their files.

A checkpoint of such a run holds the adapters alone, and names its base so.
"""

from __future__ import annotations

from pathlib import Path

from nanotrain_jax.checkpoint import checksums, directory
from nanotrain_jax.checkpoint.compatibility import Base


def of(folder: Path, step: int | None) -> Base:
    """Describe a base: reads all of its files. Raises OSError."""
    names = _names(folder, step)
    sums = checksums.sums(folder, names)
    return Base(folder=str(folder.absolute()), step=step, files={name: [*sums[name]] for name in sorted(names)})


def moved(base: Base, folder: Path) -> Base:
    """Return a base in the folder where it is now."""
    return base.model_copy(update={"folder": str(folder.absolute())})


def check(base: Base, folder: Path) -> None:
    """Raise ValueError unless the files of a base are in a folder as they were, or OSError."""
    names = _names(folder, base.step)
    if {*names} != base.files.keys():
        raise ValueError(_differs(base, folder, sorted({*names} ^ base.files.keys())[:1]))
    wrong = [name for name, sum in checksums.sums(folder, names).items() if [*sum] != base.files[name]]
    if wrong:
        raise ValueError(_differs(base, folder, wrong))


def _differs(base: Base, folder: Path, names: list[str]) -> str:
    return (
        f"the adapters belong to other weights than those in {folder}: {', '.join(names)} is not as in {base.name} "
        "when they were trained; give the same base"
    )


def _names(folder: Path, step: int | None) -> list[str]:
    """Return the files that hold weights, largest first."""
    if step is not None:
        return checksums.files(folder, directory.parts(step))
    return [path.name for path in sorted(folder.glob("*.safetensors"), key=lambda path: -path.stat().st_size)]
