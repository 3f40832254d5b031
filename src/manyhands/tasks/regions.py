"""Splits memory into regions that do not overlap, so that the users of a memory can be looked up.

If ``a[4:]`` is used first, it is one region; ``a``, used next, is that region and a second one for the part before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Set

from manyhands.addresses import Span


class Region:
    """A piece of memory that is used by tasks as a whole."""

    __slots__ = ("end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end


class Regions:
    """The regions in use, in the order of their addresses."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def of(self, memories: Set[Hashable]) -> Set[Hashable]:
        """These memories, with regions in place of spans."""
        spans = [memory for memory in memories if type(memory) is Span]
        if not spans:
            return memories
        regions = {memory for memory in memories if type(memory) is not Span}
        for span in spans:
            regions.update(self._overlapping(span))
        return regions

    def _overlapping(self, span: Span) -> list[Region]:
        first = bisect.bisect_right(self._starts, span.start) - 1
        if first < 0 or self._regions[first].end <= span.start:
            first += 1
        regions, cursor, place = [], span.start, first
        while cursor < span.end:
            at_end = place == len(self._regions) or self._starts[place] >= span.end
            if at_end or self._starts[place] > cursor:
                region = Region(cursor, span.end if at_end else self._starts[place])
                self._starts.insert(place, cursor)
                self._regions.insert(place, region)
            region = self._regions[place]
            regions.append(region)
            cursor, place = region.end, place + 1
        return regions

    def drop(self, region: Region) -> None:
        """Forget a region that is no longer used: its addresses may be allocated anew."""
        place = bisect.bisect_left(self._starts, region.start)
        if place < len(self._regions) and self._regions[place] is region:
            del self._starts[place], self._regions[place]
