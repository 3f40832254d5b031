"""What tests of schedules share: who comes before whom, by brute force; a wait that is lost."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest

from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph
from manyhands.schedule.lanes import Schedule


def known_before(made: Schedule) -> dict[int, set[int]]:
    """By lane order and waits: each task with all that are over when it is."""
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for task in made.order:
        past = [*made.waits.get(task, ()), *([last[made.lane_of[task]]] if made.lane_of[task] in last else [])]
        before[task] = {task}.union(*(before[one] for one in past))
        last[made.lane_of[task]] = task
    return before


def needed_before(program: Graph) -> list[set[int]]:
    """By what tasks need, directly or not."""
    before: list[set[int]] = []
    for earlier in program.needs:
        before.append(set(earlier).union(*(before[task] for task in earlier)))
    return before


def no_wait_can_be_taken_away(planned: Schedule, data: st.DataObject) -> None:
    """The checker objects to the loss of any wait: none is superfluous, and none is missed."""
    if every := [(task, other) for task, others in planned.waits.items() for other in others]:
        task, other = data.draw(st.sampled_from(every))
        left = tuple(wait for wait in planned.waits[task] if wait != other)
        with pytest.raises(UnsafeSchedule, match="nothing makes"):
            check(dataclasses.replace(planned, waits={**planned.waits, task: left}))
