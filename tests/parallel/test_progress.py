"""Planning that takes longer than a second says so, once; a quick one says nothing."""

from __future__ import annotations

import time

import pytest

from manyhands.parallel import planner as module
from manyhands.parallel.planner import PlanningProgress


def test_a_quick_one_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with PlanningProgress("step") as progress:
        progress.enters("capture")
        progress.enters("trials")
    assert list(progress.spent) == ["capture", "trials"]
    assert capsys.readouterr().err == ""


def test_a_long_one_says_what_it_does_and_what_took_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    with PlanningProgress("step") as progress:
        progress.enters("capture")
        while not progress._said:
            time.sleep(0.01)
        time.sleep(0.1)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("manyhands: planning step: ")
    assert last.startswith("manyhands: planned step in ")
    assert "capture" in last
