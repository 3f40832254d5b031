"""Functions that reach into an installed package: what did not run does not matter, what ran is guarded."""

from __future__ import annotations

import cProfile
import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

# A library as they are: code for other cases, which cannot be guarded, beside the code that runs.
LIBRARY = """
import contextlib
import logging
import random
import sys

FACTOR = [2.0]
numbers = random.Random(0)
handler = logging.StreamHandler(sys.stderr)

def factor():
    return FACTOR[0]

def for_another_processor(x):
    return x * globals()["FACTOR"][0]

def noisy(x):
    return x * numbers.random()

def loud(x):
    handler.setLevel(logging.INFO)
    return x

@contextlib.contextmanager
def nothing():
    yield

@nothing()
def scaled(x, mode=""):
    if mode == "another processor":
        return for_another_processor(x)
    if mode == "noisy":
        return noisy(x)
    if mode == "loud":
        return loud(x)
    return x * factor()
"""

_numbers = itertools.count()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    name = f"library_of_others_{next(_numbers)}"  # Dynamo remembers modules by their names
    (folder / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module(name)
    del sys.modules[name]


X = torch.arange(4.0)


def planned(library: Any, mode: str = "") -> Parallel:
    return Parallel(lambda x: library.scaled(x, mode), planning, synchronous=True)


def test_code_that_did_not_run_is_no_reason_to_refuse(library: Any) -> None:
    fast = planned(library)
    for _ in range(3):
        assert torch.equal(fast(X), X * 2)
    assert "schedule's order" in fast.explain()


@pytest.mark.parametrize(
    ("mode", "words"),
    [("another processor", "uses globals"), ("noisy", "random numbers")],
)
def test_code_that_ran_is(library: Any, mode: str, words: str) -> None:
    fast = planned(library, mode)
    results = [fast(X) for _ in range(3)]
    assert words in fast.explain()
    numbers = random.Random(0)
    for result in results:
        factor = numbers.random() if mode == "noisy" else 2.0
        assert torch.equal(result, X * factor)


def test_what_the_code_that_ran_reads_is_guarded(library: Any) -> None:
    fast = planned(library)
    fast(X)
    library.FACTOR[0] = 5.0
    assert torch.equal(fast(X), X * 5)
    library.factor = lambda: 7.0
    assert torch.equal(fast(X), X * 7)


def test_the_code_of_a_function_that_ran_is_guarded(library: Any) -> None:
    fast = planned(library)
    fast(X)
    library.factor.__code__ = (lambda: 3.0).__code__
    assert torch.equal(fast(X), X * 3)


def test_under_the_profiler_of_the_user_all_code_may_have_run(library: Any) -> None:
    fast = planned(library)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        assert torch.equal(fast(X), X * 2)
        assert profiler.getstats(), "the user's profile goes on"
    finally:
        profiler.disable()
    assert "cannot be traced" in fast.explain()
