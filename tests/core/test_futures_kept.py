"""What explicit tasks keep: a scope holds no result and no argument of a task that has gone well."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest

from manyhands.engine.futures import Future, parallel, task, waitall


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
        kept = task(make)()
        waitall()
        for _ in range(5):
            future = task(make)(task(make)(kept, Large()))
            future.result()
        del future
        waitall()
        time.sleep(0.01)  # a thread may still be leaving the function
        assert [one() is not None for one in made] == [True] + [False] * 10
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
        time.sleep(0.01)
        assert [one() for one in gone] == [None] * 3
        assert not scope._jobs


def test_an_error_that_nobody_has_seen_is_kept_although_its_future_is_gone() -> None:
    def body() -> None:
        with parallel(threads=2):
            task(fails)()
            for _ in range(10):
                task(time.sleep)(0)

    with pytest.raises(ArithmeticError):
        body()
