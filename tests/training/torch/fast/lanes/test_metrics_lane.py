"""Metrics in parallel with the backward pass: the same figures, from answers that nothing writes to meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_step_cases import COUNT, assert_as_plain_steps, eager_step, without_gpu
from lanes_cases import OnLanes, Recorded
from torch import nn
from torch.nn import functional
from training_cases import mlp, vectors

from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.batches import ResidentBatches, is_torchs_alone
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.lanes.lanes import COUNT as SIDE_LANES
from manyhands.training.torch.fast.lanes.lanes import StepLanes

METRICS = SIDE_LANES + 1


class Reusing(torch.autograd.Function):
    """A loss of sums that writes its gradient over the scores, as in-place kernels do."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        context.scores = scores.detach()
        return scores.sum() + 0 * y.sum()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.scores.copy_(gradient.expand_as(context.scores))
        return context.scores.clone(), None


class Baseline(nn.Module):
    """The same scores for every sample: they are memory of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.0, 0.001, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(len(x), -1)


def stepped(
    loss: Any, lanes: Recorded | None, steps: int = 3, net: nn.Module | None = None
) -> tuple[nn.Module, Any, list[tuple[int, str]]]:
    """The net, its eager step, and the log of the last step."""
    net = mlp(norm=True) if net is None else net
    eager = eager_step(net, loss)
    batches = ResidentBatches(Arrays(vectors(COUNT)), eager.device)
    graph = GraphStep(eager, batches, 16, [], lanes=None if lanes is None else StepLanes(lanes))
    graph.begin_epoch(torch.arange(COUNT), 0, 0)
    for _ in range(steps):
        if lanes is not None:
            del lanes.log[:]
        with OnLanes(lanes or Recorded()):
            assert graph(16), graph.ended
    return net, eager, [] if lanes is None else lanes.log


def test_metrics_are_on_a_lane_of_their_own_from_the_end_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    lanes = Recorded()
    net, eager, log = stepped(functional.cross_entropy, lanes)
    assert_as_plain_steps(net, eager, 3)
    start = log.index((METRICS, "argmax"))
    assert "wait" in {name for lane, name in log[:start] if lane == METRICS}
    assert not {name for lane, name in log if lane == 0} & {"argmax", "eq"}
    # The lane waits for the forward pass alone, and the main lane for it before the place in the epoch moves on.
    marks = [place for place, (_, name) in enumerate(log) if name == "mark"]
    ((_, waited),) = (wait for wait in lanes.waits if wait[0] == METRICS and wait[1] > lanes.marks - len(marks))
    mark = marks[waited - lanes.marks - 1]
    assert log.index((0, "nll_loss_forward")) < mark < log.index((0, "nll_loss_backward"))
    end = log.index((METRICS, "mark"))
    assert log[end + 1] == (0, "wait")
    assert (0, "add_") in log[end + 2 :]  # the place moves on


def test_the_lane_of_metrics_waits_for_the_mark_after_the_forward_pass() -> None:
    lanes = Recorded()
    step_lanes = StepLanes(lanes)
    mark = step_lanes.mark()
    step_lanes.mark()

    def fail() -> None:
        assert lanes.current == METRICS
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), step_lanes.on_metrics_lane(mark):
        fail()
    assert lanes.waits == [(METRICS, mark), (0, lanes.marks)]  # joined, also after an error


@pytest.mark.parametrize("has_lanes", [False, True])
def test_answers_that_the_backward_pass_writes_to_are_counted_before_it(
    has_lanes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    lanes = Recorded() if has_lanes else None
    _, eager, log = stepped(Reusing.apply, lanes, steps=1)
    net = mlp(norm=True)
    x, y = Arrays(vectors(COUNT)).take(torch.arange(16))
    assert eager.metrics.read().correct == int((net(x).argmax(1) == y).sum())
    assert ((0, "argmax") in log) == has_lanes
    assert (METRICS, "argmax") not in log


@pytest.mark.parametrize("has_lanes", [False, True])
def test_answers_that_the_update_writes_to_are_counted_before_it(
    has_lanes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    net = Baseline()
    before = int(net.scores.argmax())
    _, eager, log = stepped(functional.cross_entropy, Recorded() if has_lanes else None, steps=1, net=net)
    _, y = Arrays(vectors(COUNT)).take(torch.arange(16))
    assert int(net.scores.argmax()) != before  # so counting after the update would give another number
    assert eager.metrics.read().correct == int((y == before).sum())
    assert (METRICS, "argmax") not in log


def test_functions_of_others_are_found_in_a_backward_pass() -> None:
    x, y = torch.rand(4, 3, requires_grad=True), torch.arange(4) % 3
    weight = torch.rand(3, 3, requires_grad=True)
    assert is_torchs_alone(functional.cross_entropy((x @ weight).relu().view(4, 3), y))
    assert not is_torchs_alone(Reusing.apply(x @ weight, y) * 2)
    assert not is_torchs_alone(functional.cross_entropy(Reusing.apply(x, y) + (x @ weight)[:, :3], y))
    inside = (x @ weight).clone()
    inside[:2].mul_(2)  # a node for the whole hides the function that was applied to the part
    assert not is_torchs_alone(inside.sum())
