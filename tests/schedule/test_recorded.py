"""What was issued becomes a schedule: tasks on their lanes, waits where marks were waited for."""

from __future__ import annotations

import pytest

from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Lane
from manyhands.schedule.recorded import Journal

LANES = [Lane("cpu"), Lane("cpu", number=1)]


def test_a_wait_holds_for_the_next_task_of_its_lane() -> None:
    journal = Journal(LANES)
    journal.task(0, Task("a", writes=frozenset({1})))
    journal.wait(1, journal.mark(0))
    journal.task(0, Task("c", writes=frozenset({2})))
    journal.task(1, Task("b", reads=frozenset({1})))
    journal.task(1, Task("d", reads=frozenset({1})))
    made = journal.schedule()
    assert made.lane_of == (0, 0, 1, 1)
    assert made.waits == {2: (0,)}
    assert (journal.count(0), journal.count(1)) == (2, 2)
    check(made)


def test_a_mark_stands_behind_what_was_issued_before_it() -> None:
    journal = Journal(LANES)
    early = journal.mark(0)  # before everything: waiting for it is no wait
    journal.task(0, Task("a", writes=frozenset({1})))
    journal.wait(1, early)
    journal.task(1, Task("b", reads=frozenset({1})))
    assert not journal.schedule().waits
    with pytest.raises(UnsafeSchedule, match="nothing makes b"):
        check(journal.schedule())
