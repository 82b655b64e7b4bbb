"""What a user meets first: the list of commands, configs by name, public names, and the tour of the README."""

import subprocess
import sys

import pytest
from conftest import ROOT

from nanotrain_jax import __main__ as commands
from nanotrain_jax.config import load


def test_every_command_is_listed():
    files = {path.stem for path in (ROOT / "nanotrain_jax").glob("[a-z]*.py")}
    assert set(commands.COMMANDS) == files
    done = subprocess.run([sys.executable, "-m", "nanotrain_jax", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(f"python -m nanotrain_jax.{name} " in done.stdout for name in files)


def test_an_argument_is_told_the_commands_in_one_line():
    done = subprocess.run([sys.executable, "-m", "nanotrain_jax", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'trian'" in done.stderr
    assert "train" in done.stderr


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_an_example_config_is_found_by_name_where_there_is_no_such_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = load.load(name)
    assert config.model == load.load(ROOT / "configs" / "quickstart.yaml").model
    assert config.logging.dir == "runs/quickstart"


def test_a_file_of_that_name_comes_first_and_another_folder_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("train: {steps: 7}")
    assert load.load("quickstart.yaml").train.steps == 7
    with pytest.raises(OSError, match="did you mean"):
        load.load("elsewhere/quickstart.yaml")


def test_public_names_exist_and_are_imported_lazily():
    code = (
        "import sys, nanotrain_jax\n"
        "assert not {'jax', 'flax', 'pydantic'} & set(sys.modules)\n"
        "assert len(nanotrain_jax.__all__) <= 34\n"
        "assert all(getattr(nanotrain_jax, name) for name in nanotrain_jax.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tour_in_the_readme_runs_and_shows_one_all_reduce():
    readme = (ROOT / "README.md").read_text()
    tour = readme.split("```python\n")[1].split("```")[0]
    assert tour.count("\n") <= 30
    done = subprocess.run([sys.executable, "-c", tour], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("1 ")
