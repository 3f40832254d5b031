"""Files with a schedule's graph or timeline: where they can be written, how lanes are named, what has which colour."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.engine import draw
from manyhands.engine.graph import graph
from manyhands.engine.schedule import Schedule, one_lane
from manyhands.engine.simulate import simulate
from manyhands.errors import EngineError, PackageMissing
from manyhands.task import Kind, Task


def program(*places: tuple[str, Kind]) -> Schedule:
    """A chain of tasks in these places, on one lane."""
    tasks = []
    for number, (device, kind) in enumerate(places, 1):
        reads, writes = frozenset({number - 1}), frozenset({number})
        tasks.append(Task(f"t{number}", reads, writes, device, kind, seconds=1e-3))
    return one_lane(graph(tasks))


def drawn(path: Path) -> Path:
    return draw.save(program(("cpu", "compute")), path)


def timed(path: Path) -> Path:
    return simulate(program(("cpu", "compute"))).save(path)


# Where


@pytest.mark.parametrize("save", [drawn, timed])
@pytest.mark.parametrize("name", ["x", "x.txt", "missing/x.svg", "", "folder.svg"])
def test_a_file_that_cannot_be_written_is_a_lesson(tmp_path: Path, save: Callable[[Path], Path], name: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    words = {"x": "write 'x.svg'", "x.txt": "write 'x.svg'", "missing/x.svg": "no folder"}
    with pytest.raises(EngineError, match=words.get(name, "is a folder")):
        save(tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.svg"]


def test_capitals_are_a_suffix_too(tmp_path: Path) -> None:
    assert "traceEvents" in json.loads(timed(tmp_path / "T.JSON").read_text())
    assert drawn(tmp_path / "G.SVG").read_text().startswith("<svg")


def test_without_matplotlib_a_trace_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PackageMissing, match=r"write 't.json'"):
        timed(tmp_path / "t.png")
    assert timed(tmp_path / "t.json").stat().st_size
