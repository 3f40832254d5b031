"""Functions written at run time: they work as written ones do, and tracebacks show their lines."""

from __future__ import annotations

import gc
import linecache
import traceback

import pytest

from manyhands.backends.torch.run.codegen import function


def test_a_traceback_shows_the_line() -> None:
    fails = function("fails", "def fails(x):\n    y = x + 1\n    return y / nothing", {"nothing": 0})
    linecache.checkcache()
    with pytest.raises(ZeroDivisionError) as caught:
        fails(1)
    assert "return y / nothing" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_the_source_goes_with_the_function() -> None:
    filename = (made := function("gone", "def gone(): return 1", {})).__code__.co_filename
    assert filename in linecache.cache
    del made
    gc.collect()
    assert filename not in linecache.cache
