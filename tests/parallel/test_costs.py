"""Costs are measured once, remembered across processes, and no broken file does any harm."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from manyhands.backends import cache
from manyhands.backends.cache import cache_folder
from manyhands.parallel import costs as module
from manyhands.parallel.costs import Cost, Costed, Remembered
from manyhands.schedule.graph import Task


class Counting:
    """A framework of three tasks, two of one kind; the third cannot be measured."""

    def __init__(self, hardware: str = "an abacus") -> None:
        self._hardware = hardware
        self.asked: list[int] = []

    def tasks(self, found: Any, device: Any) -> list[Task]:
        return [Task("add"), Task("add"), Task("odd")]

    def cost_keys(self, found: Any) -> list[str]:
        return ["add", "add", "odd"]

    def hardware(self, device: Any) -> str:
        return self._hardware

    def measure(self, found: Any, number: int, device: Any) -> tuple[float, float] | None:
        self.asked.append(number)
        return None if number == 2 else (2e-3, 0.25)

    def rates(self, device: Any) -> float:
        return 1e9

    def estimate(self, found: Any, number: int, device: Any, rates: float) -> tuple[float, float]:
        return 1 / rates, 0.5


def costs(framework: Any) -> Costed:
    """What is measured, in place of PyTorch, by such a framework."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measuring", framework)
        found: Any = None
        return module.costs(found, None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    return tmp_path


def the_file(folder: Path) -> Path:
    (result,) = (folder / "costs").iterdir()  # nothing temporary is left beside it
    return result


def test_each_kind_is_measured_once_and_never_again(folder: Path) -> None:
    first = Counting()
    result = costs(first)
    assert first.asked == [0, 2]
    assert [task.seconds for task in result.tasks] == [2e-3, 2e-3, 1e-9]
    assert [task.share for task in result.tasks] == [0.25, 0.25, 0.5]
    assert (result.measured, result.remembered, result.estimated) == (1, 0, 1)
    second = Counting()
    repeated = costs(second)
    assert second.asked == [2]  # the odd one cannot be remembered: it was not measured
    assert repeated.tasks == result.tasks
    assert (repeated.measured, repeated.remembered) == (0, 1)
    other = Counting("another abacus")
    costs(other)
    assert other.asked == [0, 2]
    assert len(list((folder / "costs").iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b'{"format": 99, "hardware": "an abacus", "costs": {"add": [1, 1]}}',
        b'{"format": 1, "hardware": "somebody else\'s", "costs": {"add": [1, 1]}}',
        b'{"format": 1, "hardware": "an abacus", "costs": {"add": [NaN, 1]}}',
        b'{"format": 1, "hardware": "an abacus", "costs": {"add": ["1", true]}}',
        b'{"format": 1, "hardware": "an abacus", "costs": 3}',
        b"[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_or_foreign_file_is_as_none(folder: Path, content: bytes) -> None:
    costs(Counting())
    the_file(folder).write_bytes(content)
    backend = Counting()
    assert costs(backend).tasks[0].seconds == 2e-3
    assert backend.asked == [0, 2]
    assert json.loads(the_file(folder).read_bytes())["costs"] == {"add": [2e-3, 0.25]}  # and it is replaced


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "file"))
    assert costs(Counting()).measured == 1


def test_where_costs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", "off")
    assert cache_folder() is None
    backend = Counting()
    costs(backend)
    costs(backend)
    assert backend.asked == [0, 2, 0, 2]
    monkeypatch.delenv("MANYHANDS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/manyhands")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # as the specification says: ignored
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/manyhands")


def test_the_oldest_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST", 3)
    for number in range(5):
        one = Remembered("x")
        one.add(f"k{number}", Cost(1.0, 1.0))
        one.save()
    assert list(json.loads(the_file(folder).read_bytes())["costs"]) == ["k2", "k3", "k4"]


def write_many(number: int) -> None:
    for turn in range(10):
        one = Remembered("shared")
        one.add(f"{number} {turn}", Cost(number, 1.0))
        one.save()


def test_processes_that_write_at_once_leave_a_good_file(folder: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=write_many, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert all(cost.share == 1.0 for cost in Remembered("shared")._known.values())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert Remembered("shared")._known


def test_what_takes_too_long_to_measure_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUDGET", -1.0)
    backend = Counting()
    result = costs(backend)
    assert backend.asked == []
    assert result.estimated == 2
