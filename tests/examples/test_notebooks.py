"""The notebooks are what their sources say, and run from the first cell to the last without an error."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


build = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "build.py")))
# What these show is shown by other tests, and each takes seconds to start.
LONG = {"own_model", "frameworks", "audit", "lab_and_forecast"}
RUN = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in build.names()]


def _committed(name: str) -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)


def _cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("name", build.names())
def test_a_notebook_is_what_its_source_says(name: str) -> None:
    committed = _committed(name)
    assert _cells(committed) == _cells(build.from_source(name)), f"run: python examples/build.py {name}"
    nbformat.validate(committed)
    assert not build.complaints(committed, EXAMPLES)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run as a whole, in order"


def test_every_notebook_has_a_source_and_a_place_in_the_list() -> None:
    notebooks = {path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb")}
    assert notebooks == set(build.names())
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"(notebooks/{name}.ipynb)" in text for name in notebooks)
    size = sum(path.stat().st_size for path in (EXAMPLES / "notebooks").glob("*.ipynb"))
    assert size < 1_500_000


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    notebook = build.execute(build.from_source(name), tmp_path)
    assert not build.complaints(notebook, tmp_path)
    for cell, committed in zip(notebook.cells, _committed(name).cells, strict=True):
        assert _pictures(cell) == _pictures(committed), f"{cell.id} shows other pictures"


def _pictures(cell: Any) -> list[str]:
    return [kind for output in cell.get("outputs", []) for kind in output.get("data", {}) if kind.startswith("image/")]
