"""Memory by its addresses: regions against a plain count of bytes."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
from hypothesis import given

from manyhands.addresses import Span, content, share
from manyhands.tasks.dependencies import Regions

SPANS = st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda pair: Span(pair[0], sum(pair)))


@given(st.lists(st.tuples(SPANS, st.booleans()), max_size=20))
def test_spans_share_a_region_if_they_overlap(steps: list[tuple[Span, bool]]) -> None:
    regions, used = Regions(), list[tuple[Span, set[Span]]]()
    for span, drops in steps:
        found = {one for one in regions.of({span, "else"}) if isinstance(one, Span)}
        assert {byte for one in found for byte in range(one.start, one.end)} >= {*range(*span)}
        for other, theirs in used:
            if share([span], {other}):
                assert found & theirs
        used.append((span, found))
        if drops:
            _, gone = used.pop(0)
            for region in gone:
                if not any(region in theirs for _, theirs in used):
                    regions.drop(region)


def test_memories_that_are_no_spans_stay_what_they_are() -> None:
    memories = frozenset({1, "a"})
    assert Regions().of(memories) is memories
    assert not share([Span(0, 4)], {Span(4, 8), 0})
    assert share([1, Span(0, 5)], {Span(4, 8)})


def test_the_content_of_a_large_memory_is_taken_in_places() -> None:
    data = bytearray(10_000)
    start = ctypes.addressof(ctypes.c_char.from_buffer(data))
    span = Span(start, start + len(data))
    before = content(span, 1000, 4)
    assert len(before) == 4 * 64
    data[-1] = 1
    assert content(span, 1000, 4) != before
    assert content(span, 10_000, 4) == bytes(data)
