"""Random trainings are the same on one device and on three, and stopped and resumed.

A few cases are tried in every run of the suite. More of them, or one that failed::

    MANYHANDS_CASES=200 pytest tests/training/contract/test_random_jobs.py --framework torch
    MANYHANDS_SEED=17 MANYHANDS_CASES=1 pytest tests/training/contract/test_random_jobs.py --framework torch
"""

from __future__ import annotations

import dataclasses
import os

import pytest
from random_jobs import differences, draw
from training_bench import Bench

# As many as take less than half a minute on two cores: a case starts processes, compiles or traces several times.
_USUAL = {"torch": 2, "jax": 1, "tensorflow": 1, "mxnet": 6}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first = int(os.environ.get("MANYHANDS_SEED", "0"))
    usual = _USUAL.get(metafunc.config.getoption("--framework"), 3)
    metafunc.parametrize("seed", range(first, first + int(os.environ.get("MANYHANDS_CASES", usual))))


def test_a_random_training_is_the_same_everywhere(bench: Bench, seed: int) -> None:
    case = draw(seed, bench.words)
    told = "\n".join(f"    {name} = {value!r}" for name, value in dataclasses.asdict(case).items())
    again = f"MANYHANDS_SEED={seed} MANYHANDS_CASES=1 pytest {__file__} --framework {bench.framework}"
    print(f"{again}\n{told}")  # shown where it fails, by a difference or by an error
    found = list(differences(bench, case))
    assert not found, "\n".join(["", *found, told, again])
