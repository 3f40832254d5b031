"""Benchmarks and GPU tests run by hand: what they import of the library exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for folder in ("benchmarks", "tests/gpu") for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_imported_from_the_library_exist(file: Path) -> None:
    if "jax" in file.name:
        pytest.importorskip("jax")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands"):
            exec(ast.unparse(node), {})
