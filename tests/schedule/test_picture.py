"""Files with a schedule's graph or timeline: where they can be written, how lanes are named, what has which colour."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.errors import EngineError, PackageMissing
from manyhands.parallel import explain
from manyhands.parallel.plan import Planned
from manyhands.schedule import picture
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule
from manyhands.schedule.simulate import simulate
from manyhands.schedule.task import Kind, Task


def program(*places: tuple[str, Kind]) -> Schedule:
    """A chain of tasks in these places, on one lane."""
    tasks = []
    for number, (device, kind) in enumerate(places, 1):
        reads, writes = frozenset({number - 1}), frozenset({number})
        tasks.append(Task(f"t{number}", reads, writes, device, kind, seconds=1e-3))
    return one_lane(graph(tasks))


def drawn(path: Path) -> Path:
    return picture.save(program(("cpu", "compute")), path)


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


# Lanes and colours

MIXED: list[tuple[str, Kind]] = [
    ("cpu:0", "copy"),
    ("cpu:0", "compute"),
    ("cpu:1", "copy"),
    ("cpu:1", "compute"),
    ("cpu", "copy"),
]


def colours(made: Schedule) -> set[str]:
    """Of the boxes of tasks; those of the legend have no rounded corners."""
    return set(re.findall(r'rx="4" fill="(#[0-9a-f]+)"', picture.svg(made)))


def test_one_lane_of_several_devices_is_named_by_what_it_holds() -> None:
    made = program(*MIXED)
    assert made.names() == ["one lane (cpu, cpu:0, cpu:1)"]
    assert simulate(made).lanes() == made.names()
    assert "one lane (cpu, cpu:0, cpu:1): 5 tasks" in told(made)
    assert program(("gpu:0", "copy in"), ("gpu:0", "compute")).names() == ["one lane (gpu:0)"]
    many = program(*((f"gpu:{number}", "compute") for number in range(16)))
    assert many.names() == ["one lane (16 devices)"]


def test_one_lane_of_one_device_and_several_lanes_are_named_as_lanes() -> None:
    assert program(("cpu", "compute"), ("cpu", "compute")).names() == ["cpu compute 0"]
    measured = program(*MIXED).graph
    several = schedule(measured, lanes_for(measured, 1))
    assert several.names() == [f"{device} {kind} 0" for device, kind in MIXED]


def test_on_one_lane_colours_are_those_of_devices() -> None:
    made = program(*MIXED)
    assert len(colours(made)) == 3
    text = picture.svg(made)
    for name in (">cpu:0<", ">cpu:1<", ">cpu<", ">from one device to another<"):
        assert name in text
    assert text.count('stroke="#c00"') == 1 + 2  # the legend's; from cpu:0 to cpu:1, from there to the host
    alone = program(("cpu", "compute"), ("cpu", "compute"))
    assert len(colours(alone)) == 1
    assert ">cpu compute 0<" in picture.svg(alone)


def told(made: Schedule) -> str:
    return explain.explain("fn", Planned(lambda *_: None, schedule=made))
