"""Draw the pictures of the guides: Gantt charts of pipeline schedules.

python scripts/draw_guides.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "nanotrain_jax" / "parallel" / "pipeline" / "docs"
SCHEDULES = "1f1b", "zero_bubble"
STAGES, MICROBATCHES, COSTS = 4, 12, "1,1.3,0.9"  # costs of F, dX and W


def draw(name: str, folder: str) -> Path:
    """-> the picture of a schedule, as PNG."""
    command = [sys.executable, str(ROOT / "scripts" / "draw_schedule.py"), "--schedule", name, "--out", folder]
    command += ["--stages", str(STAGES), "--microbatches", str(MICROBATCHES), "--costs", COSTS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (picture,) = Path(folder).glob(f"{name}_*.png")
    return picture


def main() -> None:
    """Write PICTURES/<schedule>.png."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in SCHEDULES:
            shutil.copyfile(draw(name, folder), PICTURES / f"{name}.png")
            print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
