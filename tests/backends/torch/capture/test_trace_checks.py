"""Operations without results that check something: a plan raises as plain execution does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import planned, run_on

from manyhands.errors import EngineError
from manyhands.parallel.function import Parallel

GOOD, BAD = torch.eye(4) * 2, -torch.eye(4)
SINGULAR = torch.zeros(4, 4)
CHECKED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "cholesky": (torch.linalg.cholesky, BAD),
    "inv": (torch.linalg.inv, SINGULAR),
    "solve": (lambda x: torch.linalg.solve(x, GOOD), SINGULAR),
    "assert": (lambda x: (torch._assert_async((x >= 0).all(), "not positive"), x + 1)[1], BAD),
    "unused": (lambda x: (torch.linalg.cholesky(x), x + 1)[1], BAD),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_plain_execution_raises_is_raised(name: str) -> None:
    function, bad = CHECKED[name]
    fast = planned(function)
    torch.testing.assert_close(fast(GOOD), function(GOOD))
    assert "synchronous" in fast.explain()
    with pytest.raises(RuntimeError) as plain:
        function(bad)
    with pytest.raises(RuntimeError) as ours:
        fast(bad)
    assert type(ours.value) is type(plain.value)
    assert str(ours.value) == str(plain.value)
    torch.testing.assert_close(fast(GOOD), function(GOOD))


def test_an_error_passes_by_the_handlers_of_a_traced_function() -> None:
    def safe(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x * 3

    fast = planned(safe)
    torch.testing.assert_close(fast(GOOD), safe(GOOD))
    with pytest.raises(RuntimeError, match="positive-definite"):
        fast(BAD)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_check_is_done_before_and_after_writes(lanes: int) -> None:
    counts = torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        y = torch.linalg.cholesky(x)
        counts.add_(1)
        return y

    run = run_on(function, lanes, GOOD)
    run.replay([GOOD])
    assert counts == 2
    for _ in range(20):
        with pytest.raises(RuntimeError):
            run.replay([BAD])
    before = counts.item()
    run.replay([GOOD])
    assert counts == before + 2


EFFECTS: list[int] = []


@torch.library.custom_op("manyhands_tests::notes", mutates_args=())
def notes(x: torch.Tensor) -> None:
    EFFECTS.append(1)


notes.register_fake(lambda x: None)


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_operation_with_nothing_but_an_effect_is_done_once_a_call(synchronous: bool) -> None:
    """Also in pieces, as it is run here synchronously: PyTorch takes it for dead code."""

    def function(x: torch.Tensor) -> torch.Tensor:
        notes(x)
        return x + 1

    fast = Parallel(function, synchronous=synchronous)
    EFFECTS.clear()
    for number in range(1, 4):
        fast(GOOD)
        assert len(EFFECTS) == number
    assert "notes has no result, only an effect" in fast.explain()


def test_a_timeline_says_that_it_cannot_be_run_with_made_up_numbers(tmp_path: Any) -> None:
    fast = planned(torch.linalg.cholesky)
    fast(GOOD)
    with pytest.raises(EngineError, match="simulated=True"):
        fast.timeline(tmp_path / "t.json")
    assert fast.timeline(tmp_path / "t.json", simulated=True).exists()
