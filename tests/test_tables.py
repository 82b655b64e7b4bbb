"""Guides: generated tables are up to date, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanotrain_jax

ROOT = Path(__file__).parents[1]
FOLDERS = "nanotrain_jax", "scripts", "tests", "configs"
GUIDES = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of a guide's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    """Relative links that lead to no file, or to no heading of it."""
    for link in LINK.findall(CODE.sub("", path.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if target.is_dir() or not target.exists():
            yield f"{path.relative_to(ROOT)}: {link}: no such file; link to the README.md of a folder"
        elif anchor and anchor not in anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: no such heading"


def test_the_tables_in_the_guides_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "draw" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    broken = list(broken_links(path))
    assert not broken, "\n".join(broken)


def test_python_files_named_in_guides_exist():
    files = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    named = {(path, name) for path in GUIDES for name in re.findall(r"\b\w+\.py\b", path.read_text())}
    missing = sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in files)
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_scripts_named_in_guides_exist(path):
    text = path.read_text()
    modules = set(re.findall(r"(?<![\w/.])(?:nanotrain_jax|scripts)(?:\.[a-z_0-9]+)+", text))
    dead = [name for name in modules if not exists(name)]
    dead += [name for name in re.findall(r"(?<![\w/])scripts/[a-z_0-9/]+\.\w+", text) if not (ROOT / name).exists()]
    assert not dead, f"{path.relative_to(ROOT)}: {', '.join(sorted(dead))}: no such module or file"


def exists(name):
    """True for a module, a package, or a public name of one (`nanotrain_jax.build`)."""
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file() or name.rpartition(".")[2] in nanotrain_jax.__all__


def test_the_first_page_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    assert len(text.split()) < 2000
