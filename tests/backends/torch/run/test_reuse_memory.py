"""Products that are written to memory which their lane has just done with."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.backends.torch.run import threads  # noqa: E402
from manyhands.backends.torch.run.threads import ThreadRun  # noqa: E402
from manyhands.schedule.check import check  # noqa: E402
from manyhands.schedule.graph import graph  # noqa: E402
from manyhands.schedule.lanes import lanes_for, schedule  # noqa: E402


def run_of(function: Callable[..., Any], lanes: int, *given: Any) -> tuple[Any, list[str]]:
    """A run on so many lanes, and the lines of its code that write to memory which is there."""
    found = planning.trace(function, planning.call(given, {}))
    tasks = graph(threads.tasks(found))
    made = schedule(tasks, lanes_for(tasks, lanes))
    check(made)
    run = ThreadRun(found, planning.plan_of(made), lanes)
    return run, [line.strip() for line in linecache.getlines(run._code.filename) if "out=" in line]


def chains(*xs: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x in xs:
        y = x
        for _ in range(6):
            y = y @ x
        results.append(y)
    return results


def test_a_chain_needs_two_matrices() -> None:
    x = torch.randn(5, 5)
    run, lines = run_of(chains, 1, x)
    assert len(lines) == 4  # of six products the first two have nothing to be written to
    assert torch.equal(run.replay([x])[0], chains(x)[0])


@pytest.mark.parametrize("lanes", [1, 2])
def test_results_are_those_of_plain_execution_and_the_callers_own(lanes: int) -> None:
    xs = [torch.randn(5, 5) for _ in range(4)]
    run, lines = run_of(chains, lanes, *xs)
    assert len(lines) >= 4 * 4
    found = [run.replay(xs) for _ in range(3)]
    for results in found:
        for ours, plain in zip(results, chains(*xs), strict=True):
            assert torch.equal(ours, plain)
    memories = {one.data_ptr() for results in found for one in results}
    assert len(memories) == 12  # every call's results are its own
    assert not memories & {x.data_ptr() for x in xs}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x @ y, (x @ y) @ y],  # a result
        lambda x, y: ((x @ y).t() @ y) @ x.t(),  # seen through another name, which is still needed
        lambda x, y: (x + y) @ y,  # no product before it
        lambda x, y: (x @ y)[:2] @ x @ y[:, :2],  # another form
        lambda x, y: ((x @ y) @ y.double().float()).double() @ x.double(),  # another kind of number
    ],
    ids=["result", "view", "no product", "form", "numbers"],
)
def test_what_is_not_written_to(function: Any) -> None:
    x, y = torch.randn(5, 5), torch.randn(5, 5)
    run, lines = run_of(function, 1, x, y)
    assert not lines
    expected = function(x, y)
    for one, other in zip(run.replay([x, y]), expected if isinstance(expected, list) else [expected], strict=True):
        assert torch.equal(one, other)


def test_what_another_lane_has_seen_is_not_written_to() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = x @ y
        return [((first @ x) @ x) @ x, ((first @ y) @ y) @ y]

    x, y = torch.randn(5, 5), torch.randn(5, 5)
    run, lines = run_of(function, 2, x, y)
    first = next(node.name for node in run._trace.steps[0].nodes)
    assert run.lanes == 2
    assert lines
    assert not any(f"out={first})" in line for line in lines)
    for _ in range(20):
        for one, other in zip(run.replay([x, y]), function(x, y), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["addmm", "bmm", "baddbmm"])
def test_products_with_a_sum_and_of_batches(name: str) -> None:
    def function(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(6):
            y = torch.bmm(y, x) if name == "bmm" else getattr(torch, name)(b, y, x)
        return y

    x, b = torch.randn((5, 5) if name == "addmm" else (3, 5, 5)), torch.randn(5)
    run, lines = run_of(function, 1, x, b)
    assert len(lines) == 4
    assert torch.equal(run.replay([x, b])[0], function(x, b))


@torch.library.custom_op("manyhands_test_into::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x)
    return x + 1


@keeps.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


KEPT: list[torch.Tensor] = []


def test_what_an_operation_of_others_has_seen_is_not_written_to() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x @ y
        return (keeps(first) @ y) @ y

    x, y = torch.randn(5, 5), torch.randn(5, 5)
    run, lines = run_of(function, 1, x, y)
    first = run._trace.steps[0].node.name
    assert not any(f"out={first})" in line for line in lines)
    KEPT.clear()
    run.replay([x, y])
    assert torch.equal(KEPT[0], x @ y)
