"""Files with a schedule's graph or timeline: where they can be written, how lanes are named, what has which colour."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from manyhands.errors import EngineError, PackageMissing
from manyhands.parallel import explain
from manyhands.parallel.plan import Plan
from manyhands.schedule import graph_svg
from manyhands.schedule.graph import Kind, Task, graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule
from manyhands.schedule.simulate import simulate


def program(*places: tuple[str, Kind]) -> Schedule:
    """A chain of tasks in these places, on one lane."""
    tasks = []
    for number, (device, kind) in enumerate(places, 1):
        reads, writes = frozenset({number - 1}), frozenset({number})
        tasks.append(Task(f"t{number}", reads, writes, device, kind, seconds=1e-3))
    return one_lane(graph(tasks))


def drawn(path: Path) -> Path:
    return graph_svg.save(program(("cpu", "compute")), path)


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


def test_without_matplotlib_a_trace_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure"):  # the second one may have been imported before
        monkeypatch.setitem(sys.modules, module, None)
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


def boxes(made: Schedule) -> list[tuple[float, float, str]]:
    """Where the boxes of tasks stand, and their colours."""
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" [^>]*rx="4" fill="(#[0-9a-f]+)"', graph_svg.svg(made))
    return [(float(x), float(y), colour) for x, y, colour in found]


def test_one_lane_of_several_devices_is_named_by_what_it_holds() -> None:
    made = program(*MIXED)
    assert made.names() == ["one lane (cpu, cpu:0, cpu:1)"]
    assert simulate(made).lanes() == made.names()
    assert "one lane (cpu, cpu:0, cpu:1): 5 tasks" in told(made)
    assert program(("gpu:0", "copy in"), ("gpu:0", "compute")).names() == ["one lane (gpu:0)"]
    many = program(*((f"gpu:{number}", "compute") for number in range(16)))
    assert many.names() == ["one lane (16 devices)"]


def test_on_one_lane_columns_are_devices() -> None:
    made = program(*MIXED)
    assert len({x for x, _, _ in boxes(made)}) == 3
    text = graph_svg.svg(made)
    for name in (">cpu:0<", ">cpu:1<", ">cpu<", ">from one device to another<"):
        assert name in text
    assert text.count('stroke="#c00"') == 1 + 2  # the legend's; from cpu:0 to cpu:1, from there to the host
    alone = program(("cpu", "compute"), ("cpu", "compute"))
    assert len({x for x, _, _ in boxes(alone)}) == 1
    assert ">cpu compute 0<" in graph_svg.svg(alone)


def chain(*names: str, **changes: Any) -> list[Task]:
    """Tasks that need each other, one after the other."""
    return [Task(name, frozenset({number}), frozenset({number + 1}), **changes) for number, name in enumerate(names)]


def test_views_are_left_out_and_what_needs_them_needs_their_base() -> None:
    tasks = chain("mm", "view", "relu")
    tasks[1] = replace(tasks[1], is_view=True)
    made = one_lane(graph(tasks))
    assert graph_svg.visible_needs(made) == {0: set(), 2: {0}}
    assert "view" not in graph_svg.svg(made)


def test_a_block_that_comes_again_is_drawn_once() -> None:
    made = one_lane(graph(chain("conv", *["mm", "relu"] * 5, "sum")))
    assert len(boxes(made)) == 4
    assert ">x 5<" in graph_svg.svg(made)
    assert len(boxes(one_lane(graph(chain("mm", "relu", "mm", "relu"))))) == 4  # twice is no pattern


def test_updates_that_wait_for_the_same_task_are_one_box() -> None:
    source = Task("mm", writes=frozenset({1}))
    updates = [Task("add_", frozenset({1}), frozenset({number}), seconds=1e-6) for number in range(2, 6)]
    made = one_lane(graph([source, *updates]))
    assert len(boxes(made)) == 2
    assert ">x 4<" in graph_svg.svg(made)
    assert len(boxes(one_lane(graph([source, *updates[:2]])))) == 3, "two are drawn one by one"
    reader = Task("sum", frozenset({2}), frozenset({7}))
    assert len(boxes(one_lane(graph([source, *updates, reader])))) == 4, "one of them is needed: it stands alone"
    counters = [Task("count_", writes=frozenset({number})) for number in range(11, 15)]
    with_block = [task for pair in zip(counters, chain(*["relu"] * 4), strict=True) for task in pair]
    assert len(boxes(one_lane(graph(with_block)))) == 2, "counters are no part of a block that they stand between"
    others = [Task("sin", frozenset({1}), frozenset({number})) for number in range(2, 6)]
    assert len(boxes(one_lane(graph([source, *others])))) == 5, "results are branches"


def test_branches_on_one_lane_stand_side_by_side() -> None:
    source = Task("split", writes=frozenset({1}))
    branches = [Task(name, frozenset({1}), frozenset({number})) for number, name in enumerate(("mm", "sin"), 2)]
    join = Task("add", frozenset({2, 3}), frozenset({4}))
    _, left, right, below = boxes(one_lane(graph([source, *branches, join])))
    assert left[0] != right[0]
    assert left[1] == right[1] < below[1]


def test_no_edge_runs_through_a_box() -> None:
    """Random graphs: points of all curves and lines are outside of all boxes, but for their ends."""
    draws, width, height = random.Random(0), graph_svg._WIDTH, graph_svg._HEIGHT
    for _ in range(30):
        tasks = []
        for number in range(1, draws.randint(4, 25)):
            reads = frozenset(draws.sample(range(number), min(number, draws.randint(0, 3))))
            tasks.append(Task(draws.choice(["mm", "sin", "add_"]), reads, frozenset({number}), seconds=1e-3))
        lanes = draws.choice([1, 1, 3])
        program = graph(tasks)
        made = one_lane(program) if lanes == 1 else schedule(program, lanes_for(program, lanes))
        picture = ElementTree.fromstring(graph_svg.svg(made))
        rects = [box.find("{*}rect") for box in picture.iter("{http://www.w3.org/2000/svg}g")]
        corners = [(float(rect.attrib["x"]), float(rect.attrib["y"])) for rect in rects if rect is not None]
        assert corners
        edges = [path.attrib["d"] for path in picture.iter("{http://www.w3.org/2000/svg}path")]
        for edge in (edge for edge in edges if "C" in edge):  # the legend has a straight line
            for x, y in _points(edge):
                inside = [(left, top) for left, top in corners if 1 < x - left < width - 1 and 1 < y - top < height - 1]
                assert not inside, edge


def _points(path: str) -> list[tuple[float, float]]:
    """Points of a path of M, C and L commands."""
    points: list[tuple[float, float]] = []
    for command, text in re.findall(r"([MCL])([^MCL]*)", path):
        numbers = [float(number) for number in text.split()]
        places = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "M":
            points += places
            continue
        hull = [points[-1], *places]
        for step in range(1, 21):
            level, t = hull, step / 20
            while len(level) > 1:  # de Casteljau's construction; of two points it is the line
                level = [((1 - t) * a + t * c, (1 - t) * b + t * d) for (a, b), (c, d) in itertools.pairwise(level)]
            points += level
    return points


def test_a_box_says_operation_module_shape_and_time() -> None:
    long = "encoder.layers.11.attention.projection"
    tasks = [
        Task("mm", writes=frozenset({1}), seconds=1e-3, detail="4x4", module="head"),
        Task("mm", writes=frozenset({2}), seconds=1e-3, module=long),
        Task("sin", writes=frozenset({3}), seconds=1e-3),
    ]
    picture = ElementTree.fromstring(graph_svg.svg(one_lane(graph(tasks))))
    boxes = [list(box.itertext()) for box in picture.iter("{http://www.w3.org/2000/svg}g")]
    assert boxes[0] == ["mm in head 4x4: 1000.0 us on cpu", "mm", "head", "4x4, 1 ms"]
    assert boxes[1][0] == f"mm in {long}: 1000.0 us on cpu"
    assert boxes[1][2].startswith("\u2026")
    assert long.endswith(boxes[1][2][1:])
    assert boxes[2][1:] == ["sin", "1 ms"]


def test_a_picture_is_xml_whatever_the_names_are() -> None:
    made = one_lane(graph(chain("<a & b>", "c", detail="1 < 2")))
    assert ElementTree.fromstring(graph_svg.svg(made)).tag.endswith("svg")
    assert ElementTree.fromstring(graph_svg.svg(one_lane(graph([])))).tag.endswith("svg")


def told(made: Schedule) -> str:
    return explain.explain("fn", Plan(lambda tensors: [], schedule=made))
