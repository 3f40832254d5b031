"""Explicit tasks: the results of the same calls one after the other, errors where they are read, nothing left over."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support import eventually, run_python

from manyhands.errors import EngineError, TaskCancelled, WaitsForItself
from manyhands.tasks.scope import Future, parallel, task, waitall


def add(*values: Any) -> Any:
    return sum(values)


def slowly(value: Any, seconds: float = 0.03) -> Any:
    time.sleep(seconds)
    return value


def fails(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def append(box: list[Any], value: Any) -> list[Any]:
    time.sleep(0.002)
    box.append(value)
    return box


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    # A scope that ends by an error does not wait for its threads: they end by themselves, soon.
    for thread in threading.enumerate():
        if thread.name.startswith("manyhands task"):
            thread.join(10)
            assert not thread.is_alive()


def test_futures_are_inputs_of_tasks() -> None:
    with parallel(threads=3) as scope:
        a, b = task(slowly)(1), task(slowly)(2)
        c = task(add)(a, b)
        d = task(lambda tree: tree["x"][0] + tree["y"])({"x": [c], "y": 10})
        assert isinstance(c, Future)
        assert d.result() == 13
        assert "Future of" in repr(c)
        assert isinstance(scope, parallel)
    assert c.done()
    assert c.exception() is None


def test_threads_are_not_more_than_asked_for() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def count() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.003)
        with lock:
            running -= 1

    with parallel(threads=2):
        for _ in range(12):
            task(count)()
    assert most <= 2


# Order


def test_a_result_of_another_threads_scope_is_waited_for() -> None:
    go = threading.Event()
    theirs: list[Future[Any]] = []
    given = threading.Event()

    def other() -> None:
        with parallel(threads=1):
            theirs.append(task(lambda: go.wait(60) and [7])())
            given.set()

    thread = threading.Thread(target=other)
    thread.start()
    given.wait(60)
    threading.Timer(0.02, go.set).start()
    with parallel(threads=1):
        assert task(lambda box: box[0])(theirs[0]).result() == 7
    thread.join()


CALLS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=2),  # boxes that it reads
        st.lists(st.integers(0, 3), max_size=2),  # boxes that it writes
        st.lists(st.integers(0, 30), max_size=2),  # earlier results that it takes
        st.booleans(),  # whether it fails
        st.sampled_from([0.0, 0.0, 0.001]),
    ),
    max_size=20,
)


def call(number: int, pause: float, fail: bool, read: list[Any], written: list[Any], taken: list[Any]) -> Any:
    time.sleep(pause)
    if fail:
        raise ArithmeticError(number)
    value = hash((number, tuple(map(tuple, read)), tuple(map(tuple, written)), tuple(taken)))
    for box in written:
        box.append(value)
    return value


@given(CALLS, st.integers(1, 4), st.booleans())
@settings(max_examples=120, deadline=None)
def test_random_programs_give_what_sequential_execution_gives(calls: Any, threads: int, fail: bool) -> None:
    expected: list[Any] = []
    plain: list[list[int]] = [[] for _ in range(4)]
    spoiled: set[int] = set()
    for number, (reads, writes, takes, failing, _) in enumerate(calls):
        takes = [place % number for place in takes] if number else []
        if any(expected[place] is None for place in takes) or spoiled & {*reads, *writes}:
            expected.append(None)
            spoiled |= set(writes)
            continue
        try:
            boxes, written = [plain[n] for n in reads], [plain[n] for n in writes]
            expected.append(call(number, 0, fail and failing, boxes, written, [expected[place] for place in takes]))
        except ArithmeticError:
            expected.append(None)
            spoiled |= set(writes)
    boxes = [[] for _ in range(4)]
    futures: list[Future[Any]] = []
    failed = False
    try:
        with parallel(threads=threads):
            for number, (reads, writes, takes, failing, pause) in enumerate(calls):
                own = [boxes[n] for n in writes]
                taken = [futures[place % number] for place in takes] if number else []
                given_task = task(call, writes=tuple(own))
                futures.append(given_task(number, pause, fail and failing, [boxes[n] for n in reads], own, taken))
    except ArithmeticError:
        failed = True
    assert failed == (None in expected)
    assert [None if future.exception() else future.result() for future in futures] == expected
    assert boxes == plain


# Errors


def test_an_error_surfaces_where_the_result_is_read_with_its_traceback() -> None:
    with parallel(threads=2):
        future = task(fails)()
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="on purpose") as caught:
                future.result()
            shown = "".join(traceback.format_exception(caught.value))
            assert 'raise ArithmeticError("on purpose")' in shown
            assert shown.count("in fails") == 1
        assert isinstance(future.exception(), ArithmeticError)
    # it has been seen: leaving the scope does not raise it again


def test_an_error_that_nobody_has_seen_surfaces_at_the_end_of_the_scope() -> None:
    ran: list[int] = []

    def body() -> None:
        with parallel(threads=2):
            task(fails)()
            task(fails)()
            task(lambda: slowly(ran.append(1)), writes=(ran,))()

    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        body()
    assert ran == [1]
    assert "failed as well: fails" in caught.value.__notes__


def test_waitall_waits_and_raises() -> None:
    waitall()
    with parallel(threads=2):
        future = task(slowly)(1)
        waitall()
        assert future.done()
        task(fails)()
        with pytest.raises(ArithmeticError):
            waitall()
        waitall()


def test_what_needs_a_failed_task_is_cancelled_by_name() -> None:
    box: list[int] = []
    with parallel(threads=2):
        first = task(fails, writes=(box,))(box)
        second = task(add)(first, 1)
        third = task(list)(second)
        reader = task(list)(box)
        unconcerned = task(add)(1, 1)
        assert unconcerned.result() == 2
        for future in (second, third, reader):
            with pytest.raises(TaskCancelled, match="it needs fails, which failed with ArithmeticError: on purpose"):
                future.result()
            assert isinstance(future.exception().__cause__, ArithmeticError)  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            first.result()
        assert task(list)(box).result() == []  # the error has been seen: the box counts as repaired
        with pytest.raises(TaskCancelled):
            task(add)(first).result()  # but there is no result to take


def test_an_error_in_the_scope_cancels_what_has_not_begun() -> None:
    ran: list[int] = []
    futures: list[Future[Any]] = []

    def body() -> None:
        with parallel(threads=1):
            futures.append(task(lambda: slowly(ran.append(1), 0.05), writes=(ran,))())
            futures.extend(task(ran.append, writes=(ran,))(2) for _ in range(5))
            while repr(futures[0]).endswith("waiting>"):
                time.sleep(0.001)
            raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    assert futures[0].exception() is None
    assert ran == [1]
    with pytest.raises(TaskCancelled, match="its scope was left by KeyError"):
        futures[-1].result()


def test_bad_input() -> None:
    with pytest.raises(EngineError, match="at least 1"):
        parallel(threads=0)
    with pytest.raises(TypeError, match=r"writes=\(x,\)"):
        task(add, writes=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="5 cannot be written to"):
        task(add, writes=(5,))
    with parallel(threads=1) as scope, pytest.raises(EngineError, match="open already"), scope:
        pass
    with parallel(threads=1):
        future = task(slowly)(1, 0.1)
        with pytest.raises(TimeoutError, match="not over after"):
            future.result(timeout=0.01)


# Scopes


def test_outside_a_scope_a_task_is_a_plain_call() -> None:
    here: list[int] = []
    future = task(lambda: here.append(threading.get_ident()))()
    assert future.done()
    assert here == [threading.get_ident()]
    assert task(add)(task(add)(1, 2), 3).result() == 6
    with pytest.raises(ArithmeticError):
        task(fails)()


def test_inside_a_task_a_task_is_a_plain_call_and_a_scope_is_its_own() -> None:
    def inner() -> tuple[bool, int]:
        at_once = task(slowly)(1)
        was_done = at_once.done()
        with parallel(threads=2):
            parts = [task(slowly)(n, 0.001) for n in range(4)]
            return was_done, task(add)(*parts).result()

    with parallel(threads=2):
        assert [one.result() for one in [task(inner)() for _ in range(4)]] == [(True, 6)] * 4


def test_waiting_inside_a_task_does_not_starve() -> None:
    """One thread, and a task that waits for another: it does it itself."""
    with parallel(threads=1):
        later: list[Future[int]] = []
        ready = threading.Event()

        def waits() -> int:
            ready.wait(60)
            return later[0].result() + 1

        first = task(waits)()
        a = task(slowly)(1, 0.001)
        later.append(task(add)(a, 1))
        ready.set()
        assert first.result(timeout=60) == 3


@pytest.mark.parametrize("threads", [1, 3])
def test_a_task_that_waits_for_itself_gets_an_error(threads: int) -> None:
    """A circle of one, of two that ask, and of one that asks and two that take."""
    held: dict[str, Future[Any]] = {}
    ready = threading.Event()

    def asks(name: str, *_: Any) -> Any:
        ready.wait(60)
        return held[name].result()

    for circle in (("a",), ("a", "b")):
        ready.clear()
        with parallel(threads=threads):
            for one, other in zip(circle, (*circle[1:], circle[0]), strict=True):
                held[one] = task(asks)(other)
            ready.set()
            for name in circle:
                with pytest.raises(WaitsForItself, match="asks asks for the result of"):
                    held[name].result(timeout=60)
    ready.clear()
    with parallel(threads=threads):
        held["a"] = task(asks)("c")
        held["b"] = task(add)(held["a"], 1)
        held["c"] = task(list)(held["b"])
        ready.set()
        with pytest.raises(WaitsForItself, match=r"result of list, which waits for add, which waits for .*asks:"):
            held["a"].result(timeout=60)
        with pytest.raises(TaskCancelled):
            held["c"].result(timeout=60)


def test_a_circle_through_an_inner_scope_is_seen() -> None:
    held: list[Future[Any]] = []
    ready = threading.Event()

    def outer() -> None:
        ready.wait(60)
        with parallel(threads=1):
            task(lambda: held[0].result())()

    with parallel(threads=1):
        held.append(task(outer)())
        ready.set()
        with pytest.raises(WaitsForItself):
            held[0].result(timeout=60)


def test_nested_scopes_share_order_and_wait_for_their_own() -> None:
    box: list[int] = []
    release = threading.Event()
    with parallel(threads=3):
        outer = task(release.wait)(5)
        task(append, writes=(box,))(box, 1)
        with parallel():
            task(append, writes=(box,))(box, 2)
        assert box == [1, 2]
        assert not outer.done()
        with pytest.raises(EngineError, match="inner scope"), parallel(threads=2):
            pass
        release.set()
        task(append, writes=(box,))(box, 3)
    assert box == [1, 2, 3]


def test_synchronous_scopes_run_in_the_callers_thread_when_given() -> None:
    here: list[int] = []
    with parallel(synchronous=True):
        task(lambda: here.append(threading.get_ident()), writes=(here,))()
        assert here == [threading.get_ident()]
        bad = task(fails)()
        with pytest.raises(TaskCancelled):
            task(add)(bad).result()
        with pytest.raises(ArithmeticError):
            bad.result()


@pytest.mark.parametrize("inside", [True, False])
def test_an_interrupt_cancels_and_waits(inside: bool) -> None:
    ran: list[int] = []
    futures: list[Future[Any]] = []

    def body() -> None:
        with parallel(threads=1):
            futures.extend(task(lambda: slowly(ran.append(1), 0.05), writes=(ran,))() for _ in range(200))
            if inside:
                futures[-1].result()

    def interrupt() -> None:
        # The caller waits then. In a callback of Python's, of a weak reference say, an interrupt would be lost.
        eventually(lambda: len(ran) > 0 and len(futures) == 200)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        body()
    thread.join()
    assert 1 <= len(ran) < 200
    assert all(future.done() for future in futures)


FORK = """
import os, threading
from manyhands.tasks.scope import parallel, task, waitall
from manyhands.errors import EngineError
go = threading.Event()
with parallel(threads=2):
    over = task(int)("7"); over.result()
    unfinished = task(go.wait)(20)
    child = os.fork()
    if not child:
        assert over.result() == 7
        assert task(int)("8").done()          # as if there were no scope
        try: unfinished.result()
        except EngineError as error: assert "forked" in str(error)
        else: os._exit(2)
        waitall()
        with parallel(threads=2):             # a new one works
            assert task(sum)([task(int)("1"), 2]).result() == 3
    else:
        assert os.waitpid(child, 0)[1] == 0
        go.set()
if not child: os._exit(0)
assert unfinished.result()
print("parent")
"""


def test_a_forked_child_is_outside_the_scope() -> None:
    result = run_python(FORK)
    assert result.stdout.strip() == "parent", result.stderr
