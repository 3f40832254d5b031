"""Programs that change what they depend on between calls: ``parallel`` gives what plain execution gives."""

from __future__ import annotations

import os

import pytest
import torch
from random_calls import Program, difference

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="proved without virtual devices: the same CPU tensors"
)
COUNT = int(os.environ.get("MANYHANDS_EXAMPLES", "40"))
PER_TEST = 20


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("first", range(0, COUNT, PER_TEST))
def test_calls_equal_plain_execution(first: int) -> None:
    """A failing seed is printed with its program; ``random_calls.py --seed N --count 1`` shows it alone."""
    for seed in range(first, min(first + PER_TEST, COUNT)):
        program = Program.of(seed)
        wrong = difference(program)
        assert wrong is None, f"\n{program}\n{wrong}"


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(15, 300, 15))])
def test_calls_in_pieces_equal_plain_execution(first: int) -> None:
    """Programs that print, read values, branch on them, catch errors; ``--breaks --seed N`` shows one alone."""
    torch._dynamo.reset()
    for seed in range(first, first + 15):
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
    assert "the result" in str(difference(program))
