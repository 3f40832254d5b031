"""What ``parallel(...)`` takes, and what it says of what it cannot take."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.errors import EngineError


def twice(x: Any) -> Any:
    return x * 2


def test_what_is_no_function_is_told_what_to_write(mh: Any) -> None:
    with pytest.raises(EngineError, match=r"takes a function, not an int: write parallel\(threads=3\)"):
        mh.parallel(3)
    with pytest.raises(EngineError, match=r"takes a function, not a list: write parallel\(fn\)\(x\), not"):
        mh.parallel([twice])


@pytest.mark.parametrize("threads", ["2", 1.5, True])
def test_threads_are_a_whole_number(mh: Any, threads: Any) -> None:
    with pytest.raises(EngineError, match=r"parallel\(threads=.*\): .* a whole number of tasks that run at once"):
        mh.parallel(threads=threads)


@pytest.mark.parametrize("memory", ["a", None, True, float("nan"), 0.5])
def test_memory_is_a_number_from_one_on(mh: Any, memory: Any) -> None:
    with pytest.raises(EngineError, match="memory="):
        mh.parallel(twice, memory=memory)
