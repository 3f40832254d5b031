"""Results that are, or share, what their tasks were given: the order is right whether they are there already or not."""

from __future__ import annotations

import time
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from manyhands.tasks.scope import Future, parallel, task

Box = list[Any]
# A kind, two places among the boxes and the results before, whether to wait for the first and take it itself, a pause.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["same", "either", "fresh", "write", "copy into", "write both"]),
        st.integers(0, 40),
        st.integers(0, 40),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([0.0, 0.0, 0.001, 0.003]),
    ),
    max_size=18,
)


def step(kind: str, number: int, first: Box, second: Box, pause: float) -> Box:
    time.sleep(pause)
    if kind == "same":
        return first
    if kind == "either":
        return first if number % 2 else second
    if kind == "fresh":
        return [len(first), *first[-3:], *second[-3:]]
    if kind == "copy into":
        second.append((number, *map(str, first[-2:])))
        return second
    first.append(number)
    if kind == "write both":
        second.append(-number)
    return first


def written_by(kind: str, first: Any, second: Any) -> tuple[Any, ...]:
    return {"write": (first,), "copy into": (second,), "write both": (first, second)}.get(kind, ())


@given(STEPS, st.integers(1, 4))
@settings(max_examples=250, deadline=None)
def test_programs_with_aliases_give_what_sequential_execution_gives(steps: Any, threads: int) -> None:
    plain: list[Any] = [[], [], []]
    for number, (kind, one, other, _, _) in enumerate(steps):
        plain.append(step(kind, number, plain[one % len(plain)], plain[other % len(plain)], 0))
    pool: list[Any] = [[], [], []]
    with parallel(threads=threads):
        for number, (kind, one, other, wait, pause) in enumerate(steps):
            first, second = pool[one % len(pool)], pool[other % len(pool)]
            if wait and isinstance(first, Future):
                first = first.result()
            given_task = task(step, writes=written_by(kind, first, second))
            pool.append(given_task(kind, number, first, second, pause))
    found = [one.result() if isinstance(one, Future) else one for one in pool]
    assert found == plain
    assert [[a is b for a in found] for b in found] == [[a is b for a in plain] for b in plain]
