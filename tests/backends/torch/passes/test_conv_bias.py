"""Biases beside convolutions: right for every kind of convolution, and in the regions of what is around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_cases import needs_compiler, regions, results, step_of, traced, uncompiled
from torch import nn

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture import call as torch_call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes import regions as torch_fuse
from manyhands.training.torch.book import models

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)
HERE = ("cpu",)
BATCH = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(4)
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "2d, channels last": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "2d, one pixel": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 3, 3)),
    "2d, one sample of one channel": (lambda: nn.Conv2d(1, 1, 3), (1, 1, 4, 4)),
    "3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 3, 3)),
    "grouped, dilated": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2), (2, 4, 6, 6)),
    "one for each, channels last": (lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2), (2, 4, 7, 7)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 4, 4)),
    "transposed 3d, grouped": (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), (2, 4, 2, 3, 2)),
}


def double_step_of(net: nn.Module) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(net(x), y)
        return loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))

    return step


def convolutions(trace: Trace) -> list[Any]:
    """Whether each of them still has its bias."""
    has = []
    for step in trace.steps:
        if step.task.name == "convolution":
            has.append(step.node.args[2] is not None)
        if step.task.name == "convolution_backward":
            has.append(step.node.args[-1][2])
    return has


def names(trace: Trace) -> list[str]:
    return [step.task.name for step in trace.steps]


def compare(trace: Trace, fused: Trace, *arguments: Any) -> None:
    """Equal up to the order of additions in float64, and laid out as they were."""
    for result, other in zip(results(fused, *arguments), results(trace, *arguments), strict=True):
        torch.testing.assert_close(result, other, rtol=1e-11, atol=1e-12)
        assert result.stride() == other.stride()


def kinds_and_gradients() -> list[Any]:
    """Each kind with all gradients, and two kinds with each choice of them; the others are long."""
    wanted = ["all", "not the input's", "the bias alone", "not the bias's", "not the weight's"]
    short = ("2d, channels last", "transposed 2d")
    return [
        pytest.param(kind, which, marks=[] if which == "all" or kind in short else pytest.mark.long)
        for kind in KINDS
        for which in wanted
    ]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("kind", "wanted"), kinds_and_gradients())
def test_every_kind_of_convolution(kind: str, wanted: str, stored: bool) -> None:
    """With these gradients; where the result itself is wanted, it is stored and otherwise added up again."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    layer = make().double()
    x = torch.rand(shape, dtype=torch.float64)
    if kind.endswith("channels last"):
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    layer.weight.requires_grad_(wanted not in ("the bias alone", "not the weight's"))
    layer.bias.requires_grad_(wanted != "not the bias's")
    x.requires_grad_(wanted not in ("the bias alone", "not the input's"))

    def step(x: torch.Tensor) -> Any:
        y = layer(x)
        loss = (y.sin() * 3).square().sum()
        arguments = [y.detach()] if stored else []
        wanting = [value for value in (x, *layer.parameters()) if value.requires_grad]
        return *arguments, loss.detach(), *torch.autograd.grad(loss, wanting)

    trace = traced(step, x)
    fused = torch_fuse.fuse(trace, uncompiled, HERE)
    assert any(convolutions(trace))
    assert not any(convolutions(fused))
    assert fused.as_written is trace
    compare(trace, fused, x)
    assert not {"add", "sum"} & set(names(fused)), names(fused)


def test_on_other_devices_they_stay() -> None:
    trace = traced(step_of(models.lenet()), *BATCH)
    assert convolutions(torch_fuse.fuse(trace, uncompiled)) == convolutions(trace)


@pytest.mark.parametrize("cast", [False, True])
def test_a_residual_net_leaves_nothing_alone(cast: bool) -> None:
    """Each addition is in the regions of its users, each sum in that of the gradient; there are hardly more regions."""
    torch.manual_seed(0)
    net, (x, y) = models.small_resnet(), BATCH
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    trace = traced(step_of(net, cast), x, y)
    before, fused = torch_fuse.fuse(trace, uncompiled), torch_fuse.fuse(trace, uncompiled, HERE)
    assert not any(convolutions(fused))
    small = {"add", "sum", "_native_batch_norm_legit_functional", "native_batch_norm_backward", "relu"}
    assert not small & set(names(fused))
    assert len(regions(fused)) <= len(regions(before)) + 2  # two normalisations that were alone
    # The backward pass adds the bias again: what the forward pass stores is not larger than it was.
    assert sum("batch_norm_backward" in name for name in regions(fused)) == 7
    assert all(" add " in name for name in regions(fused) if "batch_norm" in name)


def test_a_residual_net_is_the_same() -> None:
    torch.manual_seed(0)
    net, x, y = models.small_resnet().double(), BATCH[0].double(), BATCH[1]
    trace = traced(double_step_of(net), x, y)
    compare(trace, torch_fuse.fuse(trace, uncompiled, HERE), x, y)


def test_users_that_are_not_compiled_share_one_addition() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 10))
    x, y = BATCH[0].double(), BATCH[1]
    trace = traced(double_step_of(net.double()), x, y)
    fused = torch_fuse.fuse(trace, uncompiled, HERE)
    assert names(fused).count("add") == 2
    compare(trace, fused, x, y)


def test_what_is_written_to_in_place() -> None:
    """A convolution's result, by its activation; its bias, by an optimizer, before the backward pass and after it."""
    torch.manual_seed(0)
    layer, other = nn.Conv2d(1, 3, 3).double(), nn.Conv2d(1, 3, 3).double()
    x = BATCH[0].double()

    def step(x: torch.Tensor) -> Any:
        y = layer(x)
        early = y.detach()
        y = y.relu_()
        z = other(x)
        late = z.detach().sin() + 1
        with torch.no_grad():
            other.bias.add_(1)
        repeated = (z.detach() * 2).cos() + late
        loss = (y.square() + z.tanh()).sum()
        gradients = torch.autograd.grad(loss, [*layer.parameters(), *other.parameters()])
        with torch.no_grad():
            layer.bias.sub_(gradients[1])
        return early.exp() * 2, repeated, loss.detach(), *gradients

    trace = traced(step, x)
    fused = torch_fuse.fuse(trace, uncompiled, HERE)
    assert not any(convolutions(fused))
    compare(trace, fused, x)


@needs_compiler
def test_as_exact_as_plain_execution_when_compiled() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
    function = step_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), head), cast=True)
    trace, call = traced(function, *BATCH), torch_call.call(BATCH, {})
    fused = torch_fuse.fuse(trace, biases_out_on=HERE)
    result, plain = results(fused, *BATCH), results(trace, *BATCH)
    verdict = backend.verdict(fused, call, result, plain, backend.exact(fused, call))
    assert verdict.accepted, verdict.words
