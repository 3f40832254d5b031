"""Schedules that are held back for memory's sake."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from schedule_cases import known_before
from test_schedule import PROGRAMS, lanes

from manyhands.schedule.check import check
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Lane, Schedule, limit_memory, schedule
from manyhands.schedule.memory import Footprint, one_after_the_other, peak
from manyhands.schedule.simulate import simulate

FIRST = 10_000  # the number of the first result


def to_the_host(count: int, product: float, copy: float) -> tuple[Schedule, Footprint]:
    """Products of a size of 10, each copied out; the copies, of the same size, are results and stay.

    No two products take the same time, so that the schedule does not keep the program's order.
    """
    program, chance = [], random.Random(0)
    for number in range(count):
        product *= chance.uniform(0.98, 1.02)
        program.append(Task("mm", frozenset({0}), frozenset({1 + number}), "gpu:0", seconds=product))
        out = Task("out", frozenset({1 + number}), frozenset({FIRST + number}), "gpu:0", "copy out", seconds=copy)
        program.append(out)
    sizes = dict.fromkeys(range(1 + count), 10) | {FIRST + number: 10 for number in range(count)}
    results = frozenset(range(FIRST, FIRST + count))
    made = schedule(graph(program), [Lane("gpu:0"), Lane("gpu:0", "copy out")])
    return made, Footprint(sizes, frozenset({0}), results)


def known_over(made: Schedule, footprint: Footprint) -> dict[int, int]:
    """By brute force: for each memory the first task of its maker's lane that stands behind all its users."""
    before = known_before(made)
    found: dict[int, int] = {}
    for memory in footprint.sizes:
        users = [t for t in made.order if memory in made.graph.tasks[t].reads | made.graph.tasks[t].writes]
        makers = [t for t in made.order if memory in made.graph.tasks[t].writes]
        if makers and memory not in footprint.inputs | footprint.results:
            lane = [task for task in made.order if made.lane_of[task] == made.lane_of[makers[0]]]
            over = [task for task in lane if before[task] >= set(users)]
            if over:
                found[memory] = over[0]
    return found


def peak_of(made: Schedule, footprint: Footprint) -> int:
    return peak(made.graph.tasks, footprint, one_after_the_other(made.order), known_over(made, footprint))


def limited(made: Schedule, footprint: Footprint, most: int) -> Schedule:
    return limit_memory(made, lambda planned: peak_of(planned, footprint), most)


@pytest.mark.parametrize(("product", "copy"), [(2e-3, 1e-3), (1e-3, 3e-3)])
def test_products_wait_for_copies_only_when_too_many_are_held(product: float, copy: float) -> None:
    made, footprint = to_the_host(20, product, copy)
    assert peak_of(made, footprint) == 10 + 20 * 10 + 20 * 10
    held_back = limited(made, footprint, 260)
    check(held_back)
    assert peak_of(held_back, footprint) <= 260
    assert held_back.lane_of == made.lane_of
    # Either the copies were done long before, or they take longest anyway.
    assert simulate(held_back).seconds == pytest.approx(simulate(made).seconds, rel=1e-2)
    assert limited(made, footprint, 1000).wait_count() == made.wait_count()


@given(PROGRAMS, st.integers(1, 3), st.integers(0, 60))
@settings(max_examples=200)
def test_a_schedule_that_is_held_back_is_still_right(program: list[Task], count: int, most: int) -> None:
    made = schedule(graph(program), lanes(count))
    footprint = Footprint(dict.fromkeys(range(6), 10), frozenset({0}), frozenset({1}))
    held_back = limited(made, footprint, most)
    check(held_back)
    assert held_back.lane_of == made.lane_of
