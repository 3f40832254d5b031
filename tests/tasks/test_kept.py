"""What explicit tasks keep: a scope holds no result and no argument of a task that has gone well."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support import eventually

from manyhands.tasks.scope import Future, parallel, task, waitall


class Large:
    """Something that one would not want to be kept."""


def fails(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_result_lives_as_long_as_its_future(synchronous: bool) -> None:
    made: list[weakref.ref[Large]] = []

    def make(*_: Any) -> Large:
        large = Large()
        made.append(weakref.ref(large))
        return large

    with parallel(None if synchronous else 2, synchronous=synchronous):
        kept = task(make, writes=(made,))()
        waitall()
        for _ in range(5):
            future = task(make, writes=(made,))(task(make, writes=(made,))(kept, Large()))
            future.result()
        del future
        waitall()
        # A thread may still be leaving the function.
        assert eventually(lambda: [one() is not None for one in made] == [True] + [False] * 10)
        assert kept.result() is made[0]()


def test_arguments_are_let_go_of_and_so_are_failures_that_were_seen() -> None:
    gone: list[weakref.ref[Any]] = []
    with parallel(threads=2) as scope:
        for _ in range(3):
            large = Large()
            gone.append(weakref.ref(large))
            task(lambda one: type(one))(large)
            bad: Future[Any] = task(fails)()
            assert bad.exception() is not None
            task(fails)(bad)  # is cancelled
        del large
        waitall()
        assert eventually(lambda: [one() for one in gone] == [None] * 3)
        assert not scope.jobs


@pytest.mark.parametrize("synchronous", [False, True])
def test_tasks_leave_nothing_to_the_garbage_collector(synchronous: bool) -> None:
    """Circles would stay until it comes, with all that they hold; and to come is what many tasks cost most."""

    def body() -> None:
        box: list[int] = []
        with parallel(None if synchronous else 2, synchronous=synchronous):
            future: Future[Any] = task(int)(1)
            for number in range(20):
                future = task(lambda one, n: one + n)(future, number)
                task(box.append, writes=(box,))(number)
            future.result()

    body()
    gc.collect()
    gc.disable()
    try:
        body()
        assert gc.collect() == 0
    finally:
        gc.enable()
