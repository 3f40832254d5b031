"""Programs that change what they depend on between calls: ``parallel`` gives what plain execution gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_calls import Program, _difference, difference, parallel
from support import examples

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="proved without virtual devices: the same CPU tensors"
)
COUNT = examples(100)
PER_TEST = 8
PER_TEST_IN_PIECES = 4


def parts(size: int) -> list[Any]:
    """The first seed of each test; all but the first test are long."""
    return [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(size, COUNT, size))]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("first", parts(PER_TEST))
def test_calls_equal_plain_execution(first: int) -> None:
    """A failing seed is printed with its program; ``random_calls.py --seed N --count 1`` shows it alone."""
    for seed in range(first, min(first + PER_TEST, COUNT)):
        program = Program.of(seed)
        wrong = difference(program)
        assert wrong is None, f"\n{program}\n{wrong}"


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("first", parts(PER_TEST_IN_PIECES))
def test_calls_in_pieces_equal_plain_execution(first: int) -> None:
    """Programs that print, read values, branch on them, catch errors; ``--breaks --seed N`` shows one alone."""
    torch._dynamo.reset()
    for seed in range(first, first + PER_TEST_IN_PIECES):
        program = Program.of(seed, breaks=True)
        wrong = difference(program)
        assert wrong is None, f"\n{program}\n{wrong}"


def test_a_difference_is_found() -> None:
    """The comparison itself: each world counts on from the one before."""
    program = Program.of(0)
    program.function = (
        "import builtins\nbuiltins.worlds = getattr(builtins, 'worlds', 0) + 1\nSHIFT, cells = builtins.worlds, {}\n"
        "def function(a, b):\n    return [a + SHIFT]"
    )
    program.calls = [([], "nothing", "(make(0), make(1))")]
    assert "the result" in str(_difference(program, parallel))
