"""``mh.parallel`` on virtual devices: each has lanes of its own, copies between them too, and results are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import scheduled, traced

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.call import call as call_of
from manyhands.backends.torch.capture.whole import trace_whole

ZERO, ONE = torch.device("cpu:0"), torch.device("cpu:1")


pytestmark = pytest.mark.usefixtures("two_devices")


def two_layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
    """A layer on each of two devices, other work beside it on both, a result on the host."""
    y = (x @ first).relu()
    z = (y.to(ONE) @ second).tanh() + torch.ones(second.shape, device=ONE)
    return {"z": z, "beside": (x @ first.t()).sin(), "host": z.sum().to("cpu"), "other": second.exp()}


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, 8).to(device) for device in (ZERO, ZERO, ONE)]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert found[name].device == value.device
        assert torch.equal(found[name].to("cpu"), value.to("cpu"))


def test_devices_get_lanes_and_copies_between_them_are_tasks() -> None:
    found = traced(two_layers, *arguments())
    places = {(step.task.device, step.task.kind) for step in found.steps}
    assert places == {
        ("virtual:0", "compute"),
        ("virtual:1", "compute"),
        ("virtual:1", "copy"),
        ("cpu", "copy"),
    }
    assert planning.device_of(found) is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_schedule_over_two_devices_is_proved_and_gives_the_same(count: int) -> None:
    given = arguments()
    call = call_of(tuple(given), {})
    whole = trace_whole(two_layers, call)
    found = whole.trace
    made = scheduled(found, count)
    for task, lane in enumerate(made.lane_of):
        assert made.lanes[lane].device == made.graph.tasks[task].device
    run = planning.thread_run(found, made, 2)
    for _ in range(3):
        assert_same(whole.result(run.replay(given)), two_layers(*given))


def test_what_is_chosen_gives_the_same_and_is_told(tmp_path: Any) -> None:
    fast = mh.parallel(two_layers, pure=True)
    for _ in range(3):
        given = arguments()
        assert_same(fast(*given), two_layers(*given))
    told = fast.explain()
    assert "a lane of each device" in told
    assert fast.timeline(tmp_path / "t.png").stat().st_size > 1000
    one = mh.parallel(two_layers, synchronous=True, pure=True)
    assert_same(one(*given), two_layers(*given))
    assert "virtual:1 compute" in one.explain()


def test_writes_in_place_and_random_numbers() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.copy_(x.to(ONE) + torch.rand_like(y))
        return y * 2

    fast = mh.parallel(function, synchronous=True, pure=True)
    x, y = torch.zeros(4, device=ZERO), torch.zeros(4, device=ONE)
    p, q = torch.zeros(4, device=ZERO), torch.zeros(4, device=ONE)
    for number in range(3):
        torch.manual_seed(number)
        expected = function(p, q)
        torch.manual_seed(number)
        assert torch.equal(fast(x, y).to("cpu"), expected.to("cpu"))
        assert torch.equal(x.to("cpu"), p.to("cpu"))
        assert torch.equal(y.to("cpu"), q.to("cpu"))
    assert "synchronous" in fast.explain()


def test_operands_on_two_devices_are_refused_as_without_it() -> None:
    fast = mh.parallel(lambda x, y: x + y, pure=True)
    with pytest.raises(RuntimeError, match="same device"):
        fast(torch.ones(2, device=ZERO), torch.ones(2, device=ONE))


def test_arguments_that_share_memory_are_seen_inside() -> None:
    fast = mh.parallel(lambda x, y: (x.add_(1), y * 2)[1], pure=True)
    x = torch.zeros(4, device=ONE)
    assert fast(x[:2], x[1:]).to("cpu").tolist() == [2, 0, 0]
    assert "share memory" in fast.explain()


def test_a_tensor_from_outside_is_not_baked_in() -> None:
    weight = torch.ones(2, device=ONE)
    fast = mh.parallel(lambda x: x + weight * 2, pure=True)
    assert fast(torch.ones(2, device=ONE)).to("cpu").tolist() == [3, 3]
    weight.add_(1)
    assert fast(torch.ones(2, device=ONE)).to("cpu").tolist() == [5, 5]
    assert "pass it as an argument" in fast.explain()


def test_the_verbs_move_inside_a_planned_function() -> None:
    """``mh.to`` is a copy between devices like ``x.to``, and a move that is already done is none."""

    def moves(x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return mh.to(mh.to(x, mh.gpu(0)).exp(), mh.gpu(1)) @ second

    x, _, second = arguments()
    trace = traced(moves, x, second)
    assert [step.task.kind for step in trace.steps] == ["compute", "copy", "compute"]
    assert torch.equal(mh.parallel(moves, pure=True)(x, second).to("cpu"), moves(x, second).to("cpu"))


def test_without_pure_a_call_is_plain_and_says_why() -> None:
    fast = mh.parallel(lambda x: x * 2)
    assert fast(torch.ones(2, device=ONE)).to("cpu").tolist() == [2, 2]
    assert "write parallel(fn, pure=True)" in fast.explain()
