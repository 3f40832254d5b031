"""Effects are noted for the thread that has them, and Python's functions are put back."""

from __future__ import annotations

import builtins
import getpass
import random
import threading

import pytest

from manyhands.errors import CannotTrace
from manyhands.parallel.side_effects import Effects


def test_what_is_printed_opened_and_drawn_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    before = print, open, input
    with Effects() as quiet:
        sum(range(3))
    with Effects() as printing:
        print("seen")
    with Effects() as drawing:
        random.random()
    with Effects() as opening, open(__file__):
        pass
    assert capsys.readouterr().out == "seen\n"
    assert quiet.seen is None
    assert "prints" in str(printing.seen)
    assert "random" in str(drawing.seen)
    assert "opens" in str(opening.seen)
    assert (builtins.print, builtins.open, builtins.input) == before


def test_several_threads_at_once() -> None:
    before = builtins.print
    inside, leave = threading.Barrier(2), threading.Event()
    found: list[str | None] = []

    def quiet() -> None:
        with Effects() as effects:
            inside.wait(60)
            leave.wait(60)
        found.append(effects.seen)

    thread = threading.Thread(target=quiet)
    with Effects() as mine:
        thread.start()
        inside.wait(60)
        print(end="")
    assert builtins.print is not before  # the other one is still watching
    leave.set()
    thread.join()
    assert "prints" in str(mine.seen)
    assert found == [None]
    assert builtins.print is before


def test_an_error_inside_puts_everything_back() -> None:
    before = builtins.open
    with pytest.raises(KeyError), Effects():
        raise KeyError("on purpose")
    assert builtins.open is before


def test_a_trace_has_no_effects_but_packages_may_do_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotTrace, match="prints"), Effects(refuse=True):
        print("not seen")
    before = random.getstate()
    with Effects(refuse=True) as drawing:
        random.random()
    assert "random" in str(drawing.seen)
    assert random.getstate() == before
    with Effects(refuse=True) as quiet:
        exec("print('seen')", vars(getpass))  # as code of an installed module would
    assert quiet.seen is None
    assert capsys.readouterr().out == "seen\n"
