"""Architecture rules, checked on syntax trees without importing the package.

Each test checks one rule for all files and lists every violation: file, line, what it has, what is allowed.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanotrain_jax"

# The layers of the package, lowest first: a file imports from its own layer or lower ones, without cycles. A name is a
# folder or a file; the longest matching prefix decides. __init__ has no layer.
LAYERS = {
    "base": {
        "config", "parallel.mesh", "parallel.sharding", "parallel.transposed", "parallel.collectives",
        "parallel.xla_options", "kernels", "models.ops", "models.parameters", "costs.hardware", "run.shell",
    },
    "techniques": {"config.resolve", "config.layout_checks", "parallel", "audit", "data", "checkpoint", "distributed"},
    "models": {"models"},
    "step": {"step", "nvme", "costs", "run", "generation", "evaluation"},
    "commands": {
        "planner", "plan", "train", "launch", "generate", "evaluate", "convert", "compare", "prepare", "__main__",
    },
}  # fmt: skip
# The wings of parallel/, lowest first: a wing imports the ground (the files beside them) and the wings before it. The
# ground imports no wing.
WINGS = "offload", "tensor", "expert", "context", "gradients", "zero", "pipeline"
MAX_GROUND_FILES = 12
HEIGHT = {name: height for height, names in enumerate(LAYERS.values()) for name in names}
COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute", "pshuffle", "pcast",
    "axis_index",
}  # fmt: skip
MAY_READ_ENVIRONMENT = {"parallel.mesh", "distributed.ranks", "run.shell", "launch", "audit.topology"}

MAX_FUNCTION_LINES = 60  # docstring included
MAX_PARAMETERS = 6  # without self
MAX_NESTING = 2  # for, while, if, try
MAX_FILE_LINES = 400
CONTROL = ast.For | ast.While | ast.If | ast.Try
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
SCOPE = FUNCTION | ast.Lambda | ast.ClassDef
MAY_READ_MESSAGES = {  # file -> reason
    "checkpoint.directory": "tensorstore has the errno of a failed write only in its message",
    "scripts/measure/compare_jit.py": "XLA has no error type for a ptxas that failed to start",
}
TEXTS = {"why", "reason", "problem", "message"}  # attributes that hold prose
SEARCHES = {"startswith", "endswith", "partition", "find", "index", "search", "match", "fullmatch", "findall"}
TOP_LEVEL_KEYS = {"ends", "layers"}  # of a parameter tree; models.parameters defines constants for them
MAY_NAME_KEYS = {
    "costs.flops", "models.parameters", "nvme.checkpointing", "nvme.update",
    "parallel.pipeline.schedule_text", "parallel.zero.optimizer_step", "planner.explain",
    "scripts/measure/jit_step.py", "scripts/examples/your_model.py",
}  # fmt: skip
FAMILIES = {"llama", "gpt2"}
MAY_NAME_FAMILIES = {"config.model", "config.families", "models.hugging_face_kinds"}


def module_name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def parsed(folder):
    """Return the syntax trees of a folder by path in the repository."""
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in sorted((ROOT / folder).rglob("*.py"))}


FILES = {module_name(p): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"}
SCRIPTS, TESTS = parsed("scripts"), parsed("tests")
PROGRAM = FILES | SCRIPTS
EVERYTHING = PROGRAM | TESTS


def nodes(files, kind):
    """Yield (place, file, node) for each node of a kind."""
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{name}:{node.lineno}", name, node


def assert_none(violations):
    """Fail with one line per violation."""
    violations = list(violations)
    assert not violations, "\n" + "\n".join(violations)


def imports(tree):
    """Yield the package's modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("nanotrain_jax.") for a in node.names if a.name.startswith("nanotrain_jax.")
            )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanotrain_jax":
            module = node.module.removeprefix("nanotrain_jax").lstrip(".")
            for alias in node.names:
                submodule = f"{module}.{alias.name}".lstrip(".")
                yield submodule if submodule in FILES else module


def dotted(node):
    """Return `a.b.c` as text; '' for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def assert_only(allowed, actual, what):
    """Fail unless exactly the allowed files do something: remove files that no longer do it from the list."""
    assert_none(f"{name}: {what}; allowed in {', '.join(sorted(allowed))}" for name in sorted(actual - allowed))
    assert_none(f"{name}: no longer {what}; remove it from the list" for name in sorted(allowed - actual))


def parameters(function):
    """Count parameters; *args and **kwargs are one each."""
    a = function.args
    named = [x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")]
    return len(named) + (a.vararg is not None) + (a.kwarg is not None)


def nesting(node, outer=0):
    """Return the nesting depth of control blocks in a statement. elif counts as its if; inner functions do not count.

    outer: the number of blocks around the statement.
    """
    if isinstance(node, SCOPE):
        return outer
    level = outer + isinstance(node, CONTROL)
    deepest = level
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, level - is_elif))
    return deepest


def constants(files, values):
    """Return the files with a string constant equal to one of values."""
    return {name for _, name, node in nodes(files, ast.Constant) if node.value in values}


def too_long(files):
    for place, _, function in nodes(files, FUNCTION):
        lines = function.end_lineno - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{place}: {function.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


def too_many_parameters(files):
    for place, _, function in nodes(files, FUNCTION):
        count = parameters(function)
        if count > MAX_PARAMETERS:
            yield f"{place}: {function.name} takes {count} parameters; at most {MAX_PARAMETERS}"


def too_deep(files):
    for place, _, function in nodes(files, FUNCTION):
        depth = max(map(nesting, function.body))
        if depth > MAX_NESTING:
            yield f"{place}: {function.name} nests blocks {depth} deep; at most {MAX_NESTING}"


def named_lambdas(files):
    for place, _, node in nodes(files, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        is_field = isinstance(node, ast.AnnAssign)  # the default of a dataclass
        if isinstance(node.value, ast.Lambda) and not is_field:
            yield f"{place}: assigns a lambda; define a function"


def height(name):
    """Return the layer of a file as a number; None without a layer."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((HEIGHT[prefix] for prefix in prefixes if prefix in HEIGHT), None)


def upward_imports(files):
    names = list(LAYERS)
    for name, tree in files.items():
        if height(name) is None:
            yield f"{name}: has no layer; add it to LAYERS"
            continue
        for other in imports(tree):
            if height(other) > height(name):
                yield f"{name} ({names[height(name)]}) imports {other} ({names[height(other)]}); a higher layer"


def import_cycles(files):
    """Yield files that import each other, directly or through others."""
    remaining = {name: set(imports(tree)) & set(files) for name, tree in files.items()}
    while free := [name for name, needed in remaining.items() if not needed & set(remaining)]:
        for name in free:
            del remaining[name]
    for name, needed in remaining.items():
        yield f"{name} is in an import cycle, or imports one: {', '.join(sorted(needed & set(remaining)))}"


def misplaced_collectives(files):
    for place, name, node in nodes(files, ast.Attribute):
        is_collective = node.attr in COLLECTIVES and dotted(node) in {f"lax.{node.attr}", f"jax.lax.{node.attr}"}
        if is_collective and name != "parallel.collectives":
            yield f"{place}: calls {dotted(node)}; allowed in parallel.collectives"
        if node.attr == "shard_map" and name != "step.build":
            yield f"{place}: calls shard_map; allowed in step.build"


def hidden_collectives(files):
    """Yield imports that would hide a collective from `misplaced_collectives`."""
    for place, _, node in nodes(files, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if "shard_map" in names or (node.module == "jax.lax" and names & COLLECTIVES):
            yield f"{place}: imports {', '.join(names & (COLLECTIVES | {'shard_map'}))} by name"
        if any(alias.name == "lax" and alias.asname for alias in node.names):
            yield f"{place}: renames lax on import"
    for place, _, node in nodes(files, ast.Import):
        if any(a.name.startswith("jax.") and a.asname and a.name != "jax.numpy" for a in node.names):
            yield f"{place}: renames a jax module on import"


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
            yield f"{place}: uses the environment; allowed in {', '.join(sorted(MAY_READ_ENVIRONMENT))}"


def without_docstring(files):
    for name, tree in files.items():
        for node in tree.body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                yield f"{name}:{node.lineno}: {node.name} has no docstring"


def families_compared(files):
    for place, _, node in nodes(files, ast.Compare):
        if any(isinstance(side, ast.Attribute) and side.attr == "family" for side in (node.left, *node.comparators)):
            yield f"{place}: compares the family; use config.families.Family"


def is_prose(node):
    """True for str(error) and for attributes that hold prose."""
    is_message = isinstance(node, ast.Call) and dotted(node.func) == "str" and dotted(node.args[0]) == "error"
    return is_message or (isinstance(node, ast.Attribute) and node.attr in TEXTS)


def prose_in_logic(files):
    """Yield comparisons with prose, and searches in it. Splitting at white space, to print it, is allowed."""
    for place, name, node in nodes(files, ast.Compare | ast.Call):
        read = []
        if isinstance(node, ast.Compare):
            is_none = any(isinstance(side, ast.Constant) and side.value in (None, "") for side in node.comparators)
            read = [] if is_none else [node.left, *node.comparators]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            read = [node.func.value, *node.args]
        if any(map(is_prose, read)) and name not in MAY_READ_MESSAGES:
            yield f"{place}: logic reads prose; use an enum or an attribute"


def test_imports_go_down():
    assert_none(upward_imports(FILES))
    assert_none(import_cycles(FILES))
    assert_none(f"{place}: a relative import" for place, _, node in nodes(FILES, ast.ImportFrom) if node.level)


def wing(name):
    """Return the place of a file of parallel/ in WINGS; -1 for the ground."""
    folder = name.split(".")[1]
    return WINGS.index(folder) if name.count(".") > 1 else -1


def test_wings_import_the_ground_and_the_wings_before_them():
    files = {name: tree for name, tree in FILES.items() if name.startswith("parallel.")}
    assert len([name for name in files if wing(name) < 0]) <= MAX_GROUND_FILES
    for name, tree in files.items():
        higher = [other for other in imports(tree) if other in files and wing(other) > wing(name)]
        assert not higher, f"{name} imports {', '.join(higher)}: of a later wing; the order is {', '.join(WINGS)}"


def test_every_wing_has_a_page_and_few_scripts_lie_outside_a_folder():
    assert not [name for name in WINGS if not (PACKAGE / "parallel" / name / "README.md").is_file()]
    assert len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) <= 8


def test_techniques_and_audit_do_not_import_config_models_or_step():
    for name, tree in FILES.items():
        if name.startswith(("parallel.", "audit.")):
            known = {other for other in imports(tree) if other.startswith(("config.", "models.", "step."))}
            forbidden = known - {"config.values"}
            assert not forbidden, f"{name} imports {', '.join(forbidden)}"


def test_the_step_does_not_import_nvme():
    for name, tree in FILES.items():
        if name.startswith("step."):
            forbidden = [other for other in imports(tree) if other.startswith("nvme")]
            assert not forbidden, f"{name} imports {', '.join(forbidden)}; nvme is built on step"


def test_collectives_are_called_in_one_file_and_shard_map_in_one_other():
    assert_none(misplaced_collectives(FILES))
    assert_none(hidden_collectives(FILES))


def test_only_public_jax_is_used_and_check_vma_is_on():
    assert_none(private_jax(FILES))


def test_only_listed_files_use_the_environment():
    assert_none(reads_environment({name: tree for name, tree in FILES.items() if name not in MAY_READ_ENVIRONMENT}))


def test_public_functions_have_docstrings():
    assert_none(without_docstring(FILES))


def test_functions_are_short():
    assert_none(too_long(EVERYTHING))


def test_functions_take_few_parameters():
    assert_none(too_many_parameters(EVERYTHING))


def test_blocks_are_nested_two_deep():
    assert_none(too_deep(PROGRAM))


def test_files_are_short():
    for path in (path for folder in ("nanotrain_jax", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")):
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_FILE_LINES, f"{path.relative_to(ROOT)} has {lines} lines; at most {MAX_FILE_LINES}"


def test_logic_does_not_read_prose():
    assert_none(prose_in_logic(PROGRAM))
    unused = [name for name in MAY_READ_MESSAGES if not list(prose_in_logic({"?": PROGRAM[name]}))]
    assert not unused, f"{', '.join(unused)}: no exception needed"


def test_lambdas_are_not_assigned_to_names():
    assert_none(named_lambdas(EVERYTHING))


def test_keys_of_parameter_trees_and_families_are_named_in_few_files():
    assert_only(MAY_NAME_KEYS, constants(PROGRAM, TOP_LEVEL_KEYS), "names a key of the parameter tree")
    assert_only(MAY_NAME_FAMILIES, constants(FILES, FAMILIES), "names a family")
    assert_none(families_compared(PROGRAM))


def test_the_oracle_does_not_import_the_package():
    assert not list(imports(ast.parse((ROOT / "tests" / "oracle.py").read_text())))


def test_no_other_test_reads_a_guide():
    """Law 7: tables in guides come from golden files (`scripts/draw/tables.py`), and tests hold the golden files."""
    may = {"tests/test_tables.py", "tests/test_architecture.py", "tests/test_commands.py"}
    for place, name, node in nodes(TESTS, ast.Constant):
        is_guide = isinstance(node.value, str) and node.value.endswith(".md")
        assert not is_guide or name in may, f"{place}: reads {node.value}; put what it holds into tests/golden/"


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")}
    assert set(listed) == packages | {"nanotrain_jax.configs"}
