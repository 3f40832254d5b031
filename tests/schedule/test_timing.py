"""Plans that are nearly alike are timed in turns: what disturbs the host must not choose among them."""

from __future__ import annotations

from manyhands.schedule.timing import in_turns


def test_turns_alternate() -> None:
    order: list[str] = []

    def seconds_of(one: str) -> float:
        order.append(one)
        return float(len(order))

    assert in_turns("a", "b", seconds_of) == (1.0, 2.0)
    assert order == ["a", "b", "b", "a", "a", "b"]  # each turn begins with another
