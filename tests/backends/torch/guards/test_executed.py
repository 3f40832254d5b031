"""Functions that reach into an installed package: what did not run does not matter, what ran is guarded."""

from __future__ import annotations

import contextlib
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
from manyhands.python_code.names import is_foreign  # noqa: E402

# A library as they are: code for other cases, which cannot be guarded, beside the code that runs.
LIBRARY = """
import contextlib
import functools
import logging
import random
import sys

FACTOR = [2.0]
numbers = random.Random(0)
handler = logging.StreamHandler(sys.stderr)

def factor():
    return FACTOR[0]

calls = [0]

def counted_and_noisy(x):
    calls[0] += 1
    return x * numbers.random()

@functools.lru_cache(maxsize=1)
def remembered(size):
    return factor() * size

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
    scaled = library.scaled
    return Parallel(lambda x: scaled(x, mode), planning, synchronous=True)


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


def test_under_the_profiler_of_the_user_nothing_changes_but_the_plan(library: Any) -> None:
    fast = planned(library)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        assert torch.equal(fast(X), X * 2)
        assert profiler.getstats(), "the user's profile goes on"
    finally:
        profiler.disable()
    # From Python 3.12 on, what runs is noted without a profiler. Before that, all code may have run.
    assert ("cannot be traced" in fast.explain()) == (sys.version_info < (3, 12))


def test_a_profiler_inside_the_function_hides_nothing(library: Any) -> None:
    scaled = library.scaled

    def profiled(x: Any) -> Any:
        with cProfile.Profile():
            y = x * 1
        return scaled(y, "noisy")

    fast = Parallel(profiled, planning, synchronous=True)
    numbers = random.Random(0)
    for _ in range(3):
        assert torch.equal(fast(X), X * numbers.random())


def test_random_numbers_are_put_back_whatever_the_reason_to_refuse(library: Any) -> None:
    noisy = library.counted_and_noisy
    fast = Parallel(lambda x: noisy(x), planning, synchronous=True)
    numbers = random.Random(0)
    for _ in range(3):
        assert torch.equal(fast(X), X * numbers.random())
    assert library.calls == [3]


def test_code_below_a_cache_runs_again(library: Any) -> None:
    scaled, remembered = library.scaled, library.remembered
    fast = Parallel(lambda x: scaled(x) * remembered(len(x)), planning, synchronous=True)
    for _ in range(3):
        assert torch.equal(fast(X), X * 2 * 8)
    library.factor.__code__ = (lambda: 3.0).__code__
    remembered(99)  # it remembers one result
    assert torch.equal(fast(X), X * 3 * 12)


def test_a_context_manager_is_not_used_up() -> None:
    """It can be entered once, and tracing would do so."""
    once = contextlib.contextmanager(lambda: iter([3.0]))()

    def scaled(x: Any) -> Any:
        with once as factor:
            return x * factor

    assert torch.equal(Parallel(scaled, planning)(X), X * 3)


def test_what_a_context_manager_gives_is_guarded() -> None:
    context = contextlib.nullcontext(2.0)

    def scaled(x: Any) -> Any:
        with context as factor:
            return x * factor

    fast = Parallel(scaled, planning, synchronous=True)
    assert torch.equal(fast(X), X * 2)
    context.enter_result = 5.0
    assert torch.equal(fast(X), X * 5)


def test_packages_are_known_wherever_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, contents in (("target", "some.dist-info"), ("project", "some.egg-info")):
        package = tmp_path / folder / f"package_in_{folder}" / "inner"
        package.mkdir(parents=True)
        (tmp_path / folder / contents).mkdir()
        for place in (package.parent, package):
            (place / "__init__.py").write_text("def function(): pass\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        for name in (f"package_in_{folder}", f"package_in_{folder}.inner"):
            assert is_foreign(importlib.import_module(name).function) == (folder == "target")
