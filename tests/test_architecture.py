"""The laws of the house, held by a walk over the syntax trees (and nothing is imported to do so)."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanotrain_jax"

# A file may import from lower floors only; __init__ stands on none.
FLOORS = [
    {"fields", "loading", "models.families", "models.parameters"},
    {
        "config", "mesh", "processes", "ops", "sharding", "parallel.collectives", "parallel.schedule", "parallel.remat",
        "parallel.pullback", "parallel.offload", "parallel.layered_model", "audit.hlo", "audit.hardware",
        "runtime.corpus", "runtime.durable", "runtime.watchdog", "runtime.link", "runtime.curves", "runtime.profiling",
    },
    {
        "execution", "models.contract", "models.decoder_table", "parallel.tensor", "parallel.update", "runtime.optim",
        "runtime.data", "runtime.checksums", "runtime.compatibility", "runtime.metrics", "runtime.request",
        "runtime.leader", "runtime.host", "parallel.chart", "parallel.loops", "audit.topology", "audit.copies",
        "nvme.store",
    },
    {
        "runtime.checkpoint", "model", "resolved", "parallel.zero", "parallel.pipeline.stage", "parallel.streamed",
        "parallel.gantt", "audit.cost",
    },
    {"models.factory", "runtime.restore", "audit.offloaded", "parallel.pipeline.executor"},
    {"step.plan", "audit.memory"},
    {"step.state", "step.forward"},
    {"step.gradients", "step.optimizer", "capacity"},
    {"step.build"},
    {"nvme.update", "words", "planner.estimate"},
    {"nvme.checkpointing", "resume", "planner.search", "planner.compiled", "planner.explain", "planner.markup"},
    {"planner.page", "planner.tables", "planner.output"},
    {"plan", "loop", "launch", "generate"},
    {"train"},
]  # fmt: skip
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute", "pshuffle", "pcast",
    "axis_index",
}  # fmt: skip
MAY_READ_ENVIRONMENT = {"mesh", "processes", "loading", "launch", "audit.topology"}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {module_name(p): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"}
every_file = pytest.mark.parametrize("name", FILES)


def imports(tree):
    """The package's own modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("nanotrain_jax.") for a in node.names if a.name.startswith("nanotrain_jax.")
            )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanotrain_jax":
            inside = node.module.removeprefix("nanotrain_jax").lstrip(".")
            for alias in node.names:
                whole = f"{inside}.{alias.name}".lstrip(".")
                yield whole if whole in FLOOR else inside


def dotted(node):
    """`a.b.c` as text, or '' for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@every_file
def test_a_file_stands_on_a_floor_and_imports_from_lower_floors_only(name):
    assert name in FLOOR, f"{name} stands on no floor"
    assert not any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(FILES[name])), f"{name}: relative import"
    for other in imports(FILES[name]):
        assert FLOOR[other] < FLOOR[name], f"{name} (floor {FLOOR[name]}) imports {other} (floor {FLOOR[other]})"


@every_file
def test_techniques_and_audit_know_no_config(name):
    if name.startswith(("parallel.", "audit.")) or name == "sharding":
        allowed = {"config"} if name in ("audit.cost", "audit.memory", "audit.offloaded") else set()
        assert not {"config", "model", "step.build", "step.plan"} & set(imports(FILES[name])) - allowed


@every_file
def test_collectives_are_called_in_one_file_and_shard_map_in_one_other(name):
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.Attribute):
            if node.attr in COLLECTIVES and dotted(node) in {f"lax.{node.attr}", f"jax.lax.{node.attr}"}:
                assert name == "parallel.collectives", f"{name} calls {dotted(node)}"
            if node.attr == "shard_map":
                assert name == "step.build"
        elif isinstance(node, ast.ImportFrom):
            names = {a.name for a in node.names}
            assert not (node.module == "jax.lax" and names & COLLECTIVES), f"{name} imports {names & COLLECTIVES}"
            assert "shard_map" not in names
            assert not any(a.name == "lax" and a.asname for a in node.names), f"{name} hides lax behind another name"
        elif isinstance(node, ast.Import):
            assert not any(a.name.startswith("jax.") and a.asname and a.name != "jax.numpy" for a in node.names)


@every_file
def test_only_public_jax_and_its_checker_stays_on(name):
    for node in ast.walk(FILES[name]):
        if isinstance(node, ast.keyword) and node.arg == "check_vma":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is True
        text = dotted(node) if isinstance(node, ast.Attribute) else getattr(node, "module", None) or ""
        assert "jax._src" not in text


@every_file
def test_the_environment_is_read_at_the_doors_only(name):
    if name not in MAY_READ_ENVIRONMENT:
        for node in ast.walk(FILES[name]):
            assert not (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"})
            assert not (isinstance(node, ast.ImportFrom) and node.module == "os")


@every_file
def test_public_functions_say_what_they_do(name):
    for node in FILES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


def test_the_oracle_knows_nothing_of_the_package():
    assert not list(imports(ast.parse((ROOT / "tests" / "oracle.py").read_text())))


def test_the_public_names_exist_and_nothing_is_imported_before_it_is_used():
    code = (
        "import sys, nanotrain_jax\n"
        "assert not {'jax', 'flax', 'pydantic'} & set(sys.modules)\n"
        "assert len(nanotrain_jax.__all__) <= 30\n"
        "assert all(getattr(nanotrain_jax, name) for name in nanotrain_jax.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tour_in_the_readme_runs_and_shows_one_all_reduce():
    readme = (ROOT / "README.md").read_text()
    tour = readme.split("```python\n")[1].split("```")[0]
    assert tour.count("\n") <= 42
    done = subprocess.run([sys.executable, "-c", tour], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3].startswith("1 ")


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")}


def test_the_readme_names_every_file():
    readme = (ROOT / "README.md").read_text()
    for name in FILES:
        assert f"  {name.replace('.', '/')}.py " in readme
