"""The drawing, held by tests: import directions, equal names, no framework imported in passing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import manyhands
from manyhands import names

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
    ["names", "names_for_types", *FRAMEWORKS],
    ["lab"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
MODULES = sorted(PACKAGE.rglob("*.py"))


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


def test_there_are_few_files_in_a_folder() -> None:
    """A newcomer reads a list of fifteen; a longer one hides a concept that wants a folder."""
    files = Counter(str(path.parent.relative_to(PACKAGE)) for path in MODULES if path.name != "__init__.py")
    assert {folder: count for folder, count in files.items() if count > 15} == {}


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


def _for_types(file: str) -> dict[str, str]:
    """The names that a type checker lets a program import from this file, and the module that has each.

    They are imported as themselves (`import x as x`), or with a star from a file that has such imports.
    """
    shown = {}
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            shown |= _for_types(f"{node.module.removeprefix('manyhands.').replace('.', '/')}.py")
        elif isinstance(node, ast.ImportFrom):
            shown |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    return shown


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_type_checkers_see_the_names_where_programs_get_them(framework: str) -> None:
    text = (PACKAGE / f"{framework}.py").read_text()
    assert re.findall(r"^(\w+) = _verbs\.(\w+)$", text, re.MULTILINE) == [(name, name) for name in names.VERBS]
    late = names.loaded_late(framework)
    if framework != "torch":
        del late["parallel"]
        assert "    parallel: _Offer" in text
    shown = _for_types(f"{framework}.py")
    assert shown.pop("errors") == "manyhands"
    assert shown | {"loggers": f"{shown['loggers']}.loggers"} == late


def test_only_pytorch_has_a_backend_for_torch_compile() -> None:
    assert set(names.names("torch")) - set(names.names("jax")) == {"compile_backend", "whole_batch"}
    assert names.names("jax") == names.names("tensorflow") == names.names("mxnet")


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
