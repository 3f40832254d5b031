"""The drawing, held by tests: import directions, equal doors, no framework imported in passing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands

PACKAGE = Path(manyhands.__file__).parent
FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")

# Lowest first; a module may import from its own row and from the rows before it.
LAYERS = [
    ["errors", "device", "shares", "tree", "machine", "code_names", "addresses", "generated"],
    ["schedule"],
    ["backends"],
    ["tasks"],
    ["placement"],
    ["parallel"],
    ["training"],
    list(FRAMEWORKS),
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
MODULES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    """The layer's name: a file of the package or a folder of it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside its functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_a_layer() -> None:
    rooms = {_room(path) for path in MODULES} - {"__init__"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "manyhands" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= LEVEL[room], f"{room} imports {name}, which stands above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_a_frameworks_own_rooms_import_it(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    for name in _imports(path):
        root = name.split(".")[0]
        if root in FRAMEWORKS:
            assert relative.parts[0] in ("backends", "training"), f"{relative} imports {root}"
            assert relative.parts[1] == root, f"{relative} imports {root}"


def _public_names(door: str) -> dict[str, str]:
    """The names a door binds, and what to: read from its source, so that no framework is needed."""
    module = ast.parse((PACKAGE / f"{door}.py").read_text())
    bound: dict[str, str] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound[node.targets[0].id] = ast.unparse(node.value)
    return bound


def test_the_doors_have_equal_names() -> None:
    doors = [
        {name: value for name, value in _public_names(door).items() if value.startswith("_verbs.")}
        for door in FRAMEWORKS
    ]
    assert doors.count(doors[0]) == len(doors)
    assert {"cpu", "gpu", "to", "copy", "split", "gather"} <= set(doors[0])


def test_the_doors_offer_the_same() -> None:
    """Training and parallel too; what only PyTorch has is named here."""
    offered = [set(ast.literal_eval(_public_names(door)["__all__"])) for door in FRAMEWORKS]
    assert offered[0] - offered[1] == {"compile_backend"}
    assert offered[1] == offered[2] == offered[3] <= offered[0]


def test_doors_offer_every_verb() -> None:
    from manyhands.placement.verbs import Verbs

    verbs = {name for name in vars(Verbs) if not name.startswith("_")}
    bound = {name for name, value in _public_names("torch").items() if value.startswith("_verbs.")}
    assert bound == verbs
    assert bound <= set(ast.literal_eval(_public_names("torch")["__all__"]))


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
