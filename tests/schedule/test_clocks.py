"""What lanes know of each other."""

from __future__ import annotations

from manyhands.schedule.lanes import Clocks


def test_a_wait_brings_along_what_the_other_lane_knew() -> None:
    clocks = Clocks(3)
    a, b, c, d = range(4)
    clocks.issue(2, a)
    assert clocks.wait(1, a) == [(2, 0)]
    clocks.issue(1, b)
    assert clocks.known(0, 2) == -1
    assert clocks.wait(0, b) == [(2, 0), (1, 0)]
    clocks.issue(0, c)
    assert clocks.known(0, 2) == clocks.place[a]
    assert clocks.wait(0, a) == []  # nothing new
    clocks.issue(0, d, waited_for=False)
    assert clocks.place[d] == 1
