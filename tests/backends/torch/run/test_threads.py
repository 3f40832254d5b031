"""Lanes on threads of the CPU: the same results to the bit, errors as they were, nothing left running."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import graph_cases
import pytest
import torch
from graph_cases import run_on
from support import at_once, run_python

from manyhands.parallel import trials
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import AS_WRITTEN


@torch.library.custom_op("manyhands_tests::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("on purpose")


fails.register_fake(torch.empty_like)


SLEPT: list[int] = []
NAP = 0.05  # seconds
LONG = 50  # sleeps: more than a busy machine takes to notice


@torch.library.custom_op("manyhands_tests::sleeps", mutates_args=())
def sleeps(x: torch.Tensor) -> torch.Tensor:
    SLEPT.append(1)
    time.sleep(NAP)
    return x.clone()


sleeps.register_fake(torch.empty_like)


# Errors, interrupts, memory, processes


def two_branches(first: Callable[..., Any], second: Callable[..., Any], length: int = 5) -> Callable[..., Any]:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(length):
            x, y = first(x), second(y)
        return x + y, x - y

    return function


def all_lanes_rest() -> bool:
    before = len(SLEPT)
    time.sleep(2 * NAP)
    return len(SLEPT) == before


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_comes_with_its_traceback_and_stops_the_other_lanes(place: int) -> None:
    x, y = torch.ones(2), torch.ones(2)
    ways = [fails, sleeps] if place == 0 else [sleeps, fails]
    run = run_on(two_branches(*ways, length=LONG), 2, x, y)
    assert run.lanes == 2
    for _ in range(2):
        SLEPT.clear()
        with pytest.raises(ArithmeticError, match="on purpose") as caught:
            run.replay([x, y])
        assert len(SLEPT) < LONG
        shown = "".join(traceback.format_exception(caught.value))
        assert 'raise ArithmeticError("on purpose")' in shown
        assert "lane" in shown  # the line of its code
        assert all_lanes_rest()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_interrupt_stops_and_joins(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    x, y = torch.ones(2), torch.ones(2)
    run = run_on(two_branches(sleeps, sleeps, LONG), lanes, x, y)
    threads = torch.get_num_threads()
    timer = threading.Timer(0.12, os.kill, (os.getpid(), signal.SIGINT))
    SLEPT.clear()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.replay([x, y])
    assert len(SLEPT) < 2 * LONG
    assert all_lanes_rest()
    assert torch.get_num_threads() == threads
    timer.join()
    monkeypatch.setattr(sys.modules[__name__], "NAP", 0.0)
    assert all(map(torch.equal, run.replay([x, y]), (x + y, x - y)))


def test_memory_is_let_go_with_its_last_use_on_any_lane() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    @torch.library.custom_op("manyhands_tests::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(value() is not None for value in seen))
        result = x + 1
        seen.append(weakref.ref(result))
        return result

    watched.register_fake(torch.empty_like)

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x, y = watched(x), watched(y)
        return x + y

    x, y = torch.ones(2), torch.ones(2)
    gc.disable()
    try:
        assert torch.equal(run_on(chain, 2, x, y).replay([x, y])[0], torch.full((2,), 26.0))
    finally:
        gc.enable()
    assert max(alive) <= 4
    assert sum(value() is not None for value in seen) == 0


def test_two_callers_at_once() -> None:
    x, y = torch.randn(30, 30), torch.randn(30, 30)
    run = run_on(two_branches(lambda a: (a @ a).tanh(), lambda b: (b @ b).sin()), 2, x, y)
    expected = run.replay([x, y])

    def work(_: int) -> bool:
        return all(all(map(torch.equal, run.replay([x, y]), expected)) for _ in range(30))

    assert at_once(work, 3) == [True] * 3


PROCESS = """
import atexit, os, sys, threading, torch
sys.path[:0] = {path!r}
from graph_cases import run_on
def workers():
    return sum(thread.name.startswith("manyhands") for thread in threading.enumerate())

torch.set_num_threads(1)
x, y = torch.randn(8, 8), torch.randn(8, 8)
run = run_on(lambda x, y: [x.sin().cos(), y.cos().sin()], 2, x, y)
expected = run.replay([x, y])
def replays():
    assert all(map(torch.equal, run.replay([x, y]), expected))
child = os.fork()
replays()
if not child: os._exit(0)
print("forked:", os.waitpid(child, 0)[1])

def late():
    replays()
    print("late")
atexit.register(late)
atexit.register(lambda: print("at exit:", workers()))
print("running:", workers() > 0)
"""


def test_a_process_that_forks_and_ends_while_it_has_workers() -> None:
    """The child gets workers of its own; they are joined before the interpreter ends."""
    done = run_python(PROCESS.format(path=[os.path.dirname(graph_cases.__file__)]))
    assert done.stdout.splitlines() == ["forked: 0", "running: True", "at exit: 0", "late"], done.stderr
    assert done.returncode == 0


# The choice


def test_what_is_chosen_is_right_and_not_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is stood in for: of the ways that were tried the first is twice as fast, or all are nearly as fast."""

    def branches(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            for _ in range(4):
                x = (x @ x).tanh_()
            results.append(x)
        return results

    inputs = [torch.randn(64, 64) for _ in range(4)]
    expected = branches(*inputs)
    for fastest, others in ((0.5, 1.0), (0.98, 0.99)):
        raced: list[int] = []

        def in_turns(*_: Any, last: float = fastest, usual: float = others, raced: Any = raced) -> Any:
            raced.append(1)
            return [last if len(raced) == 1 else usual] * 3, [1.0] * 3

        monkeypatch.setattr(trials, "in_turns", in_turns)
        fast = Parallel(branches, pure=True)
        results = fast(*inputs)
        assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(results, expected, strict=True))
        assert (fast.planned.method == AS_WRITTEN) == (fastest != 0.5)


def test_synchronous_runs_the_schedules_order_in_the_callers_thread() -> None:
    where: list[int] = []

    @torch.library.custom_op("manyhands_tests::told", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        where.append(threading.get_ident())
        return x + 1

    told.register_fake(torch.empty_like)
    slow = Parallel(two_branches(told, told), synchronous=True)
    x = torch.ones(2)
    where.clear()
    sums, differences = slow(x, x.clone())
    assert sums.tolist() == [12, 12]
    assert differences.tolist() == [0, 0]
    assert set(where) == {threading.get_ident()}
    assert "synchronous" in slow.explain()
    assert slow.planned.schedule is not None


def test_autocast_is_not_applied_twice() -> None:
    x = torch.randn(8, 8)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ x
        return y + (x @ x).float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = run_on(mixed, 2, x)
        assert torch.equal(run.replay([x])[0], mixed(x))
        assert torch.is_autocast_enabled("cpu")
