"""Operations without results that check something: a plan raises, and takes branches, as plain execution does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import run_on, traced

from manyhands.errors import CannotTrace, EngineError
from manyhands.parallel.function import Parallel
from manyhands.schedule.graph import graph

GOOD, BAD = torch.eye(4) * 2, -torch.eye(4)
SINGULAR = torch.zeros(4, 4)
CHECKED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "cholesky": (torch.linalg.cholesky, BAD),
    "inv": (torch.linalg.inv, SINGULAR),
    "solve": (lambda x: torch.linalg.solve(x, GOOD), SINGULAR),
    "assert": (lambda x: (torch._assert_async((x >= 0).all(), "not positive"), x + 1)[1], BAD),
    "unused": (lambda x: (torch.linalg.cholesky(x), x + 1)[1], BAD),
}


def planned(function: Callable[..., Any]) -> Parallel:
    """The traced code is always used."""
    return Parallel(function, pure=True, synchronous=True)


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


def test_a_branch_for_an_error_is_taken() -> None:
    def with_jitter(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(())
        try:
            return torch.linalg.cholesky(x) + noise
        except RuntimeError:
            return torch.linalg.cholesky(x + 3 * torch.eye(4)) + noise

    for fast in (planned(with_jitter), Parallel(with_jitter, pure=True)):
        for x in (GOOD, BAD, BAD, GOOD):
            torch.manual_seed(0)
            expected, state = with_jitter(x), torch.get_rng_state()
            torch.manual_seed(0)
            torch.testing.assert_close(fast(x), expected)
            assert torch.equal(torch.get_rng_state(), state)  # the numbers of the call that failed are given back


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_nothing_is_written_before_the_checks_are_passed(lanes: int) -> None:
    state, counts = torch.zeros(4, 4), torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.inv(torch.linalg.cholesky(x @ x @ x))
        counts.add_(1)
        state.copy_(x)
        return y

    run = run_on(function, lanes, GOOD)
    run.replay([GOOD])
    assert counts == 1
    for _ in range(20):
        with pytest.raises(RuntimeError) as error:
            run.replay([BAD])
        assert error.value.nothing_was_done  # type: ignore[attr-defined]
    assert counts == 1
    assert torch.equal(state, GOOD)
    fast = planned(function)
    with pytest.raises(RuntimeError):
        fast(BAD)
    assert counts == 1


def test_writes_wait_for_the_checks_before_them_and_results_do_not() -> None:
    state = torch.zeros(4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.linalg.cholesky(x)
        state.add_(1)
        return y, x.sin()

    found = traced(function, GOOD)
    names = [task.name for task in found.tasks]
    before = graph(found.tasks).needs
    assert names.index("_linalg_check_errors") in before[names.index("add_")]
    assert not before[names.index("sin")]


def test_a_check_after_a_write_is_run_as_it_is() -> None:
    counts = torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        return torch.linalg.cholesky(x)

    with pytest.raises(CannotTrace, match="_linalg_check_errors"):
        traced(function, GOOD)
    fast = planned(function)
    fast(GOOD)
    with pytest.raises(RuntimeError):
        fast(BAD)
    assert counts == 2


EFFECTS: list[int] = []


@torch.library.custom_op("manyhands_tests::notes", mutates_args=())
def notes(x: torch.Tensor) -> None:
    EFFECTS.append(1)


@notes.register_fake
def _(x: torch.Tensor) -> None: ...


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
