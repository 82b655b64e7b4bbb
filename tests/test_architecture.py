"""The laws of the house, held by a walk over the syntax trees (and nothing is imported to do so).

A test holds one law for all files. It fails with every place that breaks it: file, line, what is there, what may be.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

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
MAY_KNOW_CONFIG = {"audit.cost", "audit.memory", "audit.offloaded"}

LONGEST_FUNCTION = 60  # lines, docstring included
MOST_PARAMETERS = 6  # without self
DEEPEST_BLOCK = 2  # for, while, if, try
LONGEST_FILE = 400  # lines
CONTROL = ast.For | ast.While | ast.If | ast.Try
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
SCOPE = FUNCTION | ast.Lambda | ast.ClassDef
MAY_TAKE_MORE = {  # function -> why
    "zero_specs": "a user's program calls it, by keywords, with its own tree and mesh; no value of ours holds them",
}
BLOCKS = {"ends", "layers"}  # the parts of a tree of parameters, which models.parameters names
NAME_BLOCKS = {
    "audit.cost", "generate", "models.parameters", "nvme.checkpointing", "nvme.update", "parallel.chart",
    "parallel.update", "parallel.zero", "planner.explain", "scripts/compare_jit.py",
    "scripts/largest_model.py", "scripts/your_model.py",
}  # fmt: skip
FAMILIES = {"llama", "gpt2"}
NAME_FAMILIES = {"config", "models.families"}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def parsed(folder):
    """Path in the repository -> syntax tree."""
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted((ROOT / folder).rglob("*.py"))}


FILES = {module_name(p): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"}
SCRIPTS, TESTS = parsed("scripts"), parsed("tests")
PROGRAM = FILES | SCRIPTS
EVERYTHING = PROGRAM | TESTS


def nodes(files, kind):
    """-> (place, file, node) of each node of a kind."""
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{name}:{node.lineno}", name, node


def hold(broken):
    """broken: a line for each place that breaks the law."""
    broken = list(broken)
    assert not broken, "\n" + "\n".join(broken)


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


def only(listed, found, what):
    """Hold files to a list, which may only get shorter."""
    hold(f"{name}: {what}; only {', '.join(sorted(listed))} may" for name in sorted(found - listed))
    hold(f"{name}: {what} no more; take it off the list" for name in sorted(listed - found))


def parameters(function):
    """The number of parameters; *args and **kwargs are one each."""
    a = function.args
    named = [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
    return len(named) + (a.vararg is not None) + (a.kwarg is not None)


def depth(node, around=0):
    """How deep control blocks are nested in a statement. elif is no deeper than its if; functions inside do not count.

    around: blocks that the statement is in.
    """
    if isinstance(node, SCOPE):
        return around
    here = around + isinstance(node, CONTROL)
    deepest = here
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child, here - is_elif))
    return deepest


def constants(files, values):
    """Files in which one of these strings stands alone."""
    return {name for _, name, node in nodes(files, ast.Constant) if node.value in values}


def too_long(files):
    for place, _, function in nodes(files, FUNCTION):
        lines = function.end_lineno - function.lineno + 1
        if lines > LONGEST_FUNCTION:
            yield f"{place}: {function.name} has {lines} lines; at most {LONGEST_FUNCTION}"


def too_many_parameters(files):
    for place, _, function in nodes(files, FUNCTION):
        count = parameters(function)
        if count > MOST_PARAMETERS and function.name not in MAY_TAKE_MORE:
            yield f"{place}: {function.name} takes {count} parameters; at most {MOST_PARAMETERS}"


def too_deep(files):
    for place, _, function in nodes(files, FUNCTION):
        found = max(map(depth, function.body))
        if found > DEEPEST_BLOCK:
            yield f"{place}: {function.name} nests blocks {found} deep; at most {DEEPEST_BLOCK}"


def lambdas_with_names(files):
    for place, _, node in nodes(files, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        is_field = isinstance(node, ast.AnnAssign)  # the default of a dataclass
        if isinstance(node.value, ast.Lambda) and not is_field:
            yield f"{place}: a lambda is assigned; write a function"


def imports_from_above(files):
    for name, tree in files.items():
        if name not in FLOOR:
            yield f"{name}: stands on no floor"
            continue
        for other in imports(tree):
            if FLOOR[other] >= FLOOR[name]:
                yield f"{name} (floor {FLOOR[name]}) imports {other} (floor {FLOOR[other]}); lower floors only"


def collectives_elsewhere(files):
    for place, name, node in nodes(files, ast.Attribute):
        is_collective = node.attr in COLLECTIVES and dotted(node) in {f"lax.{node.attr}", f"jax.lax.{node.attr}"}
        if is_collective and name != "parallel.collectives":
            yield f"{place}: calls {dotted(node)}; parallel.collectives only"
        if node.attr == "shard_map" and name != "step.build":
            yield f"{place}: calls shard_map; step.build only"


def hidden_collectives(files):
    """Imports that would hide a collective from `collectives_elsewhere`."""
    for place, _, node in nodes(files, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if "shard_map" in names or (node.module == "jax.lax" and names & COLLECTIVES):
            yield f"{place}: imports {', '.join(names & (COLLECTIVES | {'shard_map'}))} by name"
        if any(alias.name == "lax" and alias.asname for alias in node.names):
            yield f"{place}: hides lax behind another name"
    for place, _, node in nodes(files, ast.Import):
        if any(a.name.startswith("jax.") and a.asname and a.name != "jax.numpy" for a in node.names):
            yield f"{place}: hides a part of jax behind another name"


def private_jax(files):
    for place, _, node in nodes(files, ast.keyword):
        if node.arg == "check_vma" and not (isinstance(node.value, ast.Constant) and node.value.value is True):
            yield f"{place}: check_vma is not True"
    for place, _, node in nodes(files, ast.Attribute | ast.ImportFrom):
        if "jax._src" in (dotted(node) if isinstance(node, ast.Attribute) else node.module or ""):
            yield f"{place}: uses jax._src, which is private"


def reads_environment(files):
    for place, _, node in nodes(files, ast.Attribute | ast.ImportFrom):
        is_read = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}
        if is_read or (isinstance(node, ast.ImportFrom) and node.module == "os"):
            yield f"{place}: reads the environment; {', '.join(sorted(MAY_READ_ENVIRONMENT))} only"


def without_docstring(files):
    for name, tree in files.items():
        for node in tree.body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                yield f"{name}:{node.lineno}: {node.name} has no docstring"


def families_compared(files):
    for place, _, node in nodes(files, ast.Compare):
        if any(isinstance(side, ast.Attribute) and side.attr == "family" for side in (node.left, *node.comparators)):
            yield f"{place}: asks for the family; ask what models.families says of it"


def test_a_file_stands_on_a_floor_and_imports_from_lower_floors_only():
    hold(imports_from_above(FILES))
    hold(f"{place}: a relative import" for place, _, node in nodes(FILES, ast.ImportFrom) if node.level)


def test_techniques_and_audit_know_no_config():
    for name, tree in FILES.items():
        if name.startswith(("parallel.", "audit.")) or name == "sharding":
            allowed = {"config"} if name in MAY_KNOW_CONFIG else set()
            found = {"config", "model", "step.build", "step.plan"} & set(imports(tree)) - allowed
            assert not found, f"{name} imports {', '.join(found)}"


def test_the_step_knows_no_files():
    for name, tree in FILES.items():
        if name.startswith("step."):
            found = [other for other in imports(tree) if other.startswith("nvme")]
            assert not found, f"{name} imports {', '.join(found)}; nvme is built on step"


def test_collectives_are_called_in_one_file_and_shard_map_in_one_other():
    hold(collectives_elsewhere(FILES))
    hold(hidden_collectives(FILES))


def test_only_public_jax_and_its_checker_stays_on():
    hold(private_jax(FILES))


def test_the_environment_is_read_at_the_doors_only():
    hold(reads_environment({name: tree for name, tree in FILES.items() if name not in MAY_READ_ENVIRONMENT}))


def test_public_functions_say_what_they_do():
    hold(without_docstring(FILES))


def test_functions_are_short():
    hold(too_long(EVERYTHING))


def test_functions_take_few_parameters():
    hold(too_many_parameters(EVERYTHING))
    functions = {node.name: node for _, _, node in nodes(FILES, FUNCTION) if node.name in MAY_TAKE_MORE}
    few = [name for name in MAY_TAKE_MORE if parameters(functions[name]) <= MOST_PARAMETERS]
    assert not few, f"{', '.join(few)}: no exception any more"


def test_blocks_are_nested_two_deep():
    hold(too_deep(PROGRAM))


def test_files_are_short():
    for path in (path for folder in ("nanotrain_jax", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")):
        lines = len(path.read_text().splitlines())
        assert lines <= LONGEST_FILE, f"{path.relative_to(ROOT)} has {lines} lines; at most {LONGEST_FILE}"


def test_a_function_with_a_name_is_no_lambda():
    hold(lambdas_with_names(EVERYTHING))


def test_names_of_blocks_and_families_stand_in_few_files():
    only(NAME_BLOCKS, constants(PROGRAM, BLOCKS), "names a block of parameters")
    only(NAME_FAMILIES, constants(FILES, FAMILIES), "names a family")
    hold(families_compared(PROGRAM))


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
