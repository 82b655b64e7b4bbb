"""compare_restores.py: each layout is valid, so that a chain reaches its end. Its runs: test_several_processes.py."""

import sys

import pytest
import yaml
from conftest import ROOT

from nanotrain_jax.config.load import load
from nanotrain_jax.config.resolve import resolve

sys.path.insert(0, str(ROOT / "scripts" / "prove"))
import compare_restores


@pytest.mark.parametrize("model", compare_restores.CHAINS)
def test_every_layout_is_valid(model, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(compare_restores.CONFIG | {"model": compare_restores.MODELS[model]}))
    for count, layout in compare_restores.CHAINS[model]:
        disk = [f"memory.nvme_dir={tmp_path}"] if "nvme" in layout else []
        config = load(file, [*compare_restores.overrides(layout), *disk])
        assert 8 % count == 0 and resolve(config, config.parallel.axes)
