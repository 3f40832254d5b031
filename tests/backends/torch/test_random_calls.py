"""Programs that change what they depend on between calls: ``parallel`` gives what plain execution gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_calls import WAYS, Program, difference, first_difference
from support import examples

from manyhands.parallel.function import Parallel

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="proved without virtual devices: the same CPU tensors"
)
COUNT = examples(100)
PER_TEST = 8


def parts() -> list[Any]:
    """The first seed of each test; all but the first test are long."""
    return [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(PER_TEST, COUNT, PER_TEST))]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("breaks", [False, True], ids=["one piece", "pieces"])
@pytest.mark.parametrize("first", parts())
def test_calls_equal_plain_execution(first: int, breaks: bool, way: str) -> None:
    """With ``breaks`` programs print, read values, branch on them, catch errors.

    A failing seed is printed with its program; ``random_calls.py --seed N --count 1 --way W`` shows it alone.
    """
    torch._dynamo.reset()
    for seed in range(first, min(first + PER_TEST, COUNT)):
        program = Program.of(seed, breaks=breaks)
        wrong = difference(program, way)
        assert wrong is None, f"\n{program}\n{wrong}"


def test_a_difference_is_found() -> None:
    """The comparison itself: each world counts on from the one before."""
    program = Program.of(0)
    program.function = (
        "import builtins\nbuiltins.worlds = getattr(builtins, 'worlds', 0) + 1\nSHIFT, cells = builtins.worlds, {}\n"
        "def function(a, b):\n    return [a + SHIFT]"
    )
    program.calls = [([], "nothing", "(make(0), make(1))")]
    found = first_difference(program, Parallel)
    assert found is not None
    assert "the result" in found[2]
