"""The drawing, held by tests: import directions, equal doors, no framework imported in passing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import manyhands
from manyhands import door

PACKAGE = Path(manyhands.__file__).parent
FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")

# Lowest first; a module may import from its own row and from the rows before it.
LAYERS = [
    ["amounts", "errors", "files", "device", "shares", "tree", "machine", "addresses"],
    ["schedule"],
    ["backends"],
    ["tasks"],
    ["placement"],
    ["parallel"],
    ["training"],
    ["book"],
    ["forecast"],
    ["audit"],
    ["door", "door_names", *FRAMEWORKS],
    ["lab"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
MODULES = sorted(PACKAGE.rglob("*.py"))


MOST_FILES = 504  # Python files of the package; it only goes down


def _room(path: Path) -> str:
    """The layer's name: a file of the package or a folder of it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _module_name(path: Path) -> str:
    parts = ("manyhands", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


TEXTS = {path: path.read_text() for path in MODULES}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
NAMES = {_module_name(path) for path in MODULES}


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside its functions."""
    found: set[str] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS = {path: _imports(path) for path in MODULES}


def test_modules_that_are_referred_to_exist() -> None:
    """``:mod:`.pending``` in a docstring: after a rename nothing else would notice."""
    for path, text in TEXTS.items():
        package = _module_name(path) if path.name == "__init__.py" else _module_name(path).rpartition(".")[0]
        for reference in re.findall(r":mod:`([^`]+)`", text):
            up = len(reference) - len(reference.lstrip("."))
            base = package.split(".")[: len(package.split(".")) - up + 1] if up else []
            name = ".".join([*base, reference.lstrip(".")])
            assert name in NAMES or not name.startswith("manyhands"), f"{path}: there is no {reference}"


def test_every_module_has_a_layer() -> None:
    rooms = {_room(path) for path in MODULES} - {"__init__"}
    assert rooms == set(LEVEL)


def test_there_are_few_files_and_few_in_a_folder() -> None:
    """A newcomer reads a list of fifteen; a longer one hides a concept that wants a folder."""
    files = Counter(str(path.parent.relative_to(PACKAGE)) for path in MODULES if path.name != "__init__.py")
    assert {folder: count for folder, count in files.items() if count > 15} == {}
    assert len(MODULES) <= MOST_FILES


def test_imports_point_down() -> None:
    for path, imports in IMPORTS.items():
        room = _room(path)
        for name in imports if room != "__init__" else ():
            parts = name.split(".")
            if parts[0] == "manyhands" and len(parts) > 1 and parts[1] in LEVEL:
                assert LEVEL[parts[1]] <= LEVEL[room], f"{path} imports {name}, which stands above it"


def test_only_a_frameworks_own_folders_import_it() -> None:
    for path, imports in IMPORTS.items():
        relative = path.relative_to(PACKAGE)
        for root in {name.split(".")[0] for name in imports} & set(FRAMEWORKS):
            allowed = relative.parts[0] in ("backends", "training", "book", "forecast", "audit")
            if str(relative) not in ("lab/operations.py", "lab/experiments/unequal_devices.py"):
                assert allowed, f"{relative} imports {root}"
                assert relative.parts[1].removesuffix(".py") == root, f"{relative} imports {root}"


PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]|\b(from|import) torch(\.\w+)*\._|\._cdata\b|\btensor\._version\b")


def test_private_names_of_pytorch_stand_in_one_folder() -> None:
    """A new release of PyTorch may move them: then there is one folder to mend.

    Attributes of PyTorch's objects: tests/backends/torch/compat/test_private_names.py, which needs PyTorch.
    """
    for path, text in TEXTS.items():
        if path.parent != PACKAGE / "backends" / "torch" / "compat":
            code = [line.partition("#")[0] for line in text.splitlines()]
            assert not [line for line in code if PRIVATE.search(line)], path
            assert not [name for name in IMPORTS[path] if re.match(r"torch\.(.*\.)?_[a-zA-Z]", name)], path


# Where values of users and of frameworks pass through: `object`, type variables and protocols say so, `Any` hides it.
TYPED = ("schedule", "parallel", "placement", "tasks")
PROTOCOLS = ("planning", "protocol", "exactness")


def _signatures(path: Path) -> list[str]:
    """The annotations of arguments, results and fields; of what is inside functions only inner functions'."""
    found: list[ast.expr | None] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            every = node.args
            arguments = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
            found += [node.returns, *(argument.annotation for argument in arguments if argument is not None)]
        elif isinstance(node, ast.ClassDef):
            found += [*node.bases, *(inner.annotation for inner in node.body if isinstance(inner, ast.AnnAssign))]
    return [ast.unparse(annotation) for annotation in found if annotation is not None]


def test_seams_are_typed() -> None:
    """One name stands for `Any`, with the reason where it is defined: `Tensor` of the planner."""
    for path in MODULES:
        folder = _room(path)
        of_backends = folder == "backends" and path.parent.name == folder and path.stem in PROTOCOLS
        if folder in TYPED or of_backends:
            assert not [annotation for annotation in _signatures(path) if re.search(r"\bAny\b", annotation)], path


def _bound(door: str) -> tuple[set[str], set[str]]:
    """The names that a door binds at once and those that it shows to a type checker; no framework is needed."""
    at_once: set[str] = set()
    for_types: set[str] = set()
    for node in ast.parse((PACKAGE / f"{door}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("_verbs."):
            assert ast.unparse(node) == f"{node.targets[0].id} = _verbs.{node.targets[0].id}"
            at_once.add(node.targets[0].id)
        elif isinstance(node, ast.ImportFrom):
            at_once |= {alias.asname for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                if isinstance(inner, ast.AnnAssign):
                    for_types.add(inner.target.id)
                elif isinstance(inner, ast.ImportFrom):
                    for_types |= _offered(inner)
    return at_once, for_types


def _offered(node: ast.ImportFrom) -> set[str]:
    """The names that a type checker lets a program import from here: `import x as x`, or all of the doors' list."""
    if node.module == "manyhands.door_names":
        shared = ast.parse((PACKAGE / "door_names.py").read_text()).body
        return {name for inner in shared if isinstance(inner, ast.ImportFrom) for name in _offered(inner)}
    return {alias.asname for alias in node.names if alias.asname == alias.name}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_door_shows_type_checkers_what_it_has(framework: str) -> None:
    at_once, for_types = _bound(framework)
    assert at_once == {"Arrival", "errors", *door.VERBS}
    assert sorted(at_once | for_types) == door.names(framework)


def test_only_pytorch_has_a_backend_for_torch_compile() -> None:
    assert set(door.names("torch")) - set(door.names("jax")) == {"compile_backend", "whole_batch"}
    assert door.names("jax") == door.names("tensorflow") == door.names("mxnet")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_of_a_door_stands_where_the_list_says(framework: str) -> None:
    """Type checkers and programs get it from the same module."""
    imported = {
        alias.name: node.module
        for file in ("door_names.py", f"{framework}.py")
        for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    late = {**door.LOADED_LATE, **(door.OF_TORCH if framework == "torch" else {})}
    for name, module in late.items():
        if name != "parallel" or framework == "torch":
            assert imported[name] == module.format(framework=framework)


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_importing_manyhands_imports_no_framework() -> None:
    loaded = _modules_after("import manyhands, manyhands.cli, manyhands.placement.verbs, manyhands.cli.probe")
    assert not loaded & {*FRAMEWORKS, "numpy", "flax", "keras"}


def test_a_missing_framework_is_a_lesson() -> None:
    code = "import sys; sys.modules['jax'] = None; import manyhands.jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'manyhands[jax]'" in result.stderr
