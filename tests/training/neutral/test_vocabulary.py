"""The book's small words: they need no framework."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from manyhands.book.vocabulary import Animator, HyperParameters, Timer, add_to_class


class Parent(HyperParameters):
    def __init__(self, lr: float, *layers: int, depth: int = 2, _secret: int = 0, **more: Any) -> None:
        self.save_hyperparameters(ignore=["skipped"])


class Child(Parent):
    def __init__(self, lr: float, width: int) -> None:
        super().__init__(lr * 10, depth=5)
        temporary = width + 1
        self.save_hyperparameters("nothing")
        del temporary


def test_arguments_become_attributes() -> None:
    made = Parent(0.1, 3, 4, color="red", skipped=1)
    assert made.hparams == {"lr": 0.1, "layers": (3, 4), "depth": 2, "color": "red"}
    assert (made.lr, made.layers, made.color) == (0.1, (3, 4), "red")  # type: ignore[attr-defined]
    assert not hasattr(made, "_secret")
    assert not hasattr(made, "self")


def test_a_child_adds_to_what_its_parent_saved() -> None:
    made = Child(0.1, width=7)
    assert made.hparams == {"lr": 0.1, "layers": (), "depth": 5, "width": 7}
    assert Parent(0.5).hparams["lr"] == 0.5  # nothing is shared between objects


def test_members_are_added_to_a_class() -> None:
    class Plain:
        b = 1

    made = Plain()

    @add_to_class(Plain)
    def double(self: Any) -> int:
        return 2 * self.b  # type: ignore[no-any-return]

    @add_to_class(Plain)
    @property
    def half(self: Any) -> float:
        return self.b / 2  # type: ignore[no-any-return]

    assert made.double() == 2  # type: ignore[attr-defined]
    assert made.half == 0.5  # type: ignore[attr-defined]
    assert double(made) == 2  # the decorated name still is the function
    with pytest.raises(TypeError, match="wants a class"):
        add_to_class(made)  # type: ignore[arg-type]


def test_timer() -> None:
    timer = Timer()
    time.sleep(0.01)
    first = timer.stop()
    timer.start()
    second = timer.stop()
    assert first >= 0.01
    assert second >= 0
    assert timer.times == [first, second]
    assert timer.sum() == first + second
    assert timer.avg() == (first + second) / 2
    assert timer.cumsum() == [first, first + second]


def test_animator_keeps_points() -> None:
    animator = Animator("epoch", legend=["loss", "accuracy"])
    animator.add(1, (0.5, None))
    animator.add(2, [0.25, 0.9])
    animator.add([3, 4], (0.125, 0.95))
    assert animator.X == [[1, 2, 3], [2, 4]]
    assert animator.Y == [[0.5, 0.25, 0.125], [0.9, 0.95]]
    single = Animator()
    single.add(1, 3)
    assert single.Y[0][-1] == 3
    with pytest.raises(ValueError):
        animator.add([1, 2], [1, 2, 3])


def test_animator_writes_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    had_pyplot = "matplotlib.pyplot" in sys.modules
    animator = Animator("epoch", "value", ["loss", "accuracy"], xlim=[1, 3], ylim=(0, 1), figsize=(4, 3))
    animator.add(1, (0.5, 0.8))
    animator.add(2, (0.25, 0.9))
    path = animator.save(tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert Animator().save(str(tmp_path / "empty.png")).stat().st_size > 0
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot  # no window, no change to the user's own metrics
    assert "".join(capfd.readouterr()) == ""


def test_animator_replaces_one_picture_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda image: shown.append("update"))

    def display(image: Any, display_id: bool) -> Any:
        assert image["data"].startswith(b"\x89PNG")
        shown.append("display")
        return handle

    ipython: Any = ModuleType("IPython")
    ipython.display = ModuleType("IPython.display")
    ipython.display.display, ipython.display.Image = display, dict
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    animator = Animator(legend=["loss"])
    for shell in (None, SimpleNamespace(), SimpleNamespace(kernel=object())):  # script, terminal, notebook
        ipython.get_ipython = lambda shell=shell: shell
        animator.add(len(animator.Y), 1)
    animator.add(4, 1)
    assert shown == ["display", "update"]
