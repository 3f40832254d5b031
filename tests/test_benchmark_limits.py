"""Benchmarks: what is slower than plain execution is said and fails, and what they import exists."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "parallel_limits.py"


def test_what_is_below_is_named_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report_below = runpy.run_path(str(FILE))["report_below"]
    assert report_below({"chains, manyhands": 5.0, "resnet, reuse": 0.98}, 0.98, "eager") == 0
    assert capsys.readouterr().out == "never below 0.98 of eager (2 compared)\n"
    assert report_below({"chains, manyhands": 5.0, "resnet, reuse": 0.9751, "mlp, compile": 0.5}, 0.98, "eager") == 1
    assert (
        capsys.readouterr().out
        == "below 0.98 of eager: resnet, reuse, 0.975\nbelow 0.98 of eager: mlp, compile, 0.500\n"
    )


def test_rows_without_eager_or_without_a_way_are_left_out() -> None:
    against_eager = runpy.run_path(str(FILE))["against_eager"]
    rows = [
        {"name": "chains", "seconds": {"eager": 3.0, "ours": 2.0, "graph": 1.0}},
        {"name": "overhead", "seconds": {"ours": 2.0}},
    ]
    assert against_eager(rows, ["ours", "reuse"]) == {"chains, ours": 1.5}


def test_a_rival_that_gains_nothing_by_its_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FILE.parent))
    weak_rivals = runpy.run_path(str(FILE.parent / "training.py"))["weak_rivals"]
    rows = [{"row": "graph", "seconds": 1.166}, {"row": "graph-compiled", "seconds": 1.162}]
    assert [words.split(":")[0] for words in weak_rivals(rows)] == ["graph-compiled"]
    assert not weak_rivals([rows[0], {"row": "graph-compiled", "seconds": 0.803}])


def _names_of(source: Path) -> set[str]:
    """What a module defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_what_benchmarks_import_exists() -> None:
    """A benchmark that needs a GPU is rarely started: a renamed function must be noticed without one."""
    missing, checked = [], 0
    for benchmark in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(benchmark.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("manyhands."):
                continue
            place = ROOT / "src" / Path(*node.module.split("."))  # type: ignore[union-attr]
            if place.with_suffix(".py").exists() and place.parent.name == "manyhands":
                continue  # a framework's module, whose names are loaded when they are used
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            known = _names_of(source) | {path.stem for path in place.glob("*")}
            checked += len(node.names)
            missing += [f"{benchmark.name}: {node.module}.{a.name}" for a in node.names if a.name not in known]
    assert missing == []
    assert checked > 20
