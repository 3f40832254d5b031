"""Who does explicit tasks, and what is kept of them.

As many threads as there is work for, nobody forgotten, no order lost; and a scope holds no result and no argument of a
task that has gone well.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support import at_once, eventually

from manyhands.tasks.scope import Future, parallel, task, waitall


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads are interrupted wherever they are."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_chain_stays_with_one_thread() -> None:
    go = threading.Event()

    def link(before: frozenset[int]) -> frozenset[int]:
        return before | {threading.get_ident()}

    with parallel(threads=3):
        chain: Future[Any] = task(lambda: frozenset() if go.wait(60) else None)()
        for _ in range(30):
            chain = task(link)(chain)
        go.set()
        assert len(chain.result()) == 1
        assert sum(thread.name.startswith("manyhands task") for thread in threading.enumerate()) == 1


def test_what_becomes_ready_at_once_is_done_at_once() -> None:
    """The threads are hired, or rest; in both cases each of three tasks needs one."""
    meet = threading.Barrier(3)
    with parallel(threads=3):
        for _ in range(3):
            first = task(time.sleep)(0.002)
            together = [task(lambda _: meet.wait(60))(first) for _ in range(3)]
            assert sorted(value.result() for value in together) == [0, 1, 2]


def test_all_who_wait_for_a_task_are_called() -> None:
    go = threading.Event()
    with parallel(threads=1):
        future = task(lambda: go.wait(60))()
        threading.Timer(0.02, go.set).start()
        assert at_once(lambda _: future.result(60), 4) == [True] * 4


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_nothing_is_lost_however_threads_are_interrupted(threads: int) -> None:
    """Independent tasks, chains and writes in turns, given while others end; results asked for while they are given."""
    for _ in range(3):
        boxes: list[list[int]] = [[] for _ in range(3)]
        with parallel(threads=threads):
            chains: list[Future[int]] = [task(int)(0) for _ in range(3)]
            for number in range(120):
                place = number % 3
                chains[place] = task(lambda one, n: one + n)(chains[place], number)
                task(boxes[place].append, writes=(boxes[place],))(number)
                if number % 10 == 0:
                    assert task(len)(boxes[place]).result() == number // 3 + 1
            assert [chain.result() for chain in chains] == [sum(range(place, 120, 3)) for place in range(3)]
        assert boxes == [list(range(place, 120, 3)) for place in range(3)]


@pytest.mark.usefixtures("hasty")
def test_tasks_that_wait_and_threads_do_not_do_one_twice() -> None:
    """A task that waits does what it waits for, unless a thread has begun it just then."""
    with parallel(threads=3):
        for _ in range(30):
            done: list[int] = []
            arguments = threading.Event()
            later: list[Future[Any]] = []

            def asks(given: threading.Event = arguments, later: list[Future[Any]] = later) -> list[Any]:
                given.wait(60)
                return [value.result() for value in later]

            waiting = [task(asks)() for _ in range(2)]
            later += [task(done.append, writes=(done,))(number) for number in range(6)]
            arguments.set()
            assert [value.result() for value in waiting] == [[None] * 6] * 2
            assert sorted(done) == list(range(6))


def test_what_an_earlier_task_puts_into_a_list_is_seen() -> None:
    box: list[Any] = [1]

    def put(box: list[Any], value: Any) -> None:
        time.sleep(0.01)
        box[0] = value

    with parallel(threads=2):
        two = task(lambda: time.sleep(0.01) or 2)()
        task(put, writes=(box,))(box, two)
        assert task(lambda pair: pair[1][0] + 1)((0, box)).result() == 3


class Runner:
    """It keeps the futures of its own methods, as one does."""

    def __init__(self) -> None:
        self.futures: list[Future[int]] = []
        self.meet = threading.Barrier(3)

    def run(self) -> list[int]:
        with parallel(threads=3):
            for number in range(3):
                self.futures.append(task(self.step)(number))
        return [future.result() for future in self.futures]

    def step(self, number: int) -> int:
        self.meet.wait(60)
        return 2 * number


def test_an_object_is_not_looked_into() -> None:
    """Tasks that reach the futures before them would wait for these, and never meet."""
    assert Runner().run() == [0, 2, 4]


# What is kept


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
