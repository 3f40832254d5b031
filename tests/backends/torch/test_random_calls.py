"""Programs that change what they depend on between calls: ``parallel`` gives what plain execution gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_calls import Program, difference
from support import examples

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="proved without virtual devices: the same CPU tensors"
)
COUNT = examples(100)
PER_TEST = 20
PER_TEST_IN_PIECES = 8


def parts(size: int) -> list[Any]:
    """The first seed of each test; all but the first test are long."""
    return [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(size, COUNT, size))]


@pytest.mark.parametrize("first", parts(PER_TEST))
def test_calls_equal_plain_execution(first: int) -> None:
    """A failing seed is printed with its program; ``random_calls.py --seed N --count 1`` shows it alone."""
    _run("--seed", str(first), "--count", str(min(PER_TEST, COUNT - first)))


@pytest.mark.parametrize("first", parts(PER_TEST_IN_PIECES))
def test_calls_in_pieces_equal_plain_execution(first: int) -> None:
    """Programs that print, read values, branch on them, catch errors; ``--breaks --seed N`` shows one alone."""
    _run("--breaks", "--seed", str(first), "--count", str(PER_TEST_IN_PIECES))


def _run(*options: str) -> None:
    """In a process of its own: after hundreds of other captures in one process Dynamo's own code fails in some."""
    command = [sys.executable, str(Path(__file__).with_name("random_calls.py")), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


def test_a_difference_is_found() -> None:
    """The comparison itself: each world counts on from the one before."""
    program = Program.of(0)
    program.function = (
        "import builtins\nbuiltins.worlds = getattr(builtins, 'worlds', 0) + 1\nSHIFT, cells = builtins.worlds, {}\n"
        "def function(a, b):\n    return [a + SHIFT]"
    )
    program.calls = [([], "nothing", "(make(0), make(1))")]
    assert "the result" in str(difference(program))
