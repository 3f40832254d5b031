"""Normalisation, addition and ReLU in one go: the same step, whatever the model does with what is in between."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_norm_cases import WAYS, Net, convolution_in_the_shortcut, held, residual
from lanes_cases import NoLanes
from torch import nn
from torch.nn import functional

from manyhands.backends.torch.kernels import batch_norm as kernels
from manyhands.book import torch as models
from manyhands.training.torch.fast.lanes.eager import SideLanes
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms, is_clean

X = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3


def stepped(net: nn.Module, x: torch.Tensor, *modes: Any) -> list[torch.Tensor]:
    """The loss, all gradients and all buffers of three steps; the weights stay."""
    results = []
    norms = [mode for mode in modes if isinstance(mode, FusedBatchNorms)]
    for _ in range(3):
        net.zero_grad()
        for mode in norms:
            mode.begin(poison=True)
        with norms[0] if norms else torch.enable_grad():
            loss = functional.cross_entropy(net(x), Y[: len(x)])
        if len(modes) == 2:
            with modes[0], modes[1]:
                loss.backward()
        else:
            with modes[0] if modes else torch.enable_grad():
                loss.backward()
        results += [loss.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]
        results += [buffer.clone() for buffer in net.buffers()]
    return results


def both(net: nn.Module, x: torch.Tensor = X, lanes: bool = False) -> tuple[FusedBatchNorms, float]:
    """A step as it is and one in one go: their largest difference."""
    if x.dim() == 4:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    plain = stepped(copy.deepcopy(net), x)
    norms = FusedBatchNorms()
    modes = (SideLanes(NoLanes(), 2), norms) if lanes else (norms,)
    result = stepped(net, x, *modes)
    assert len(plain) == len(result)
    apart = max(
        float((a.to_dense().double() - b.to_dense().double()).abs().max()) for a, b in zip(plain, result, strict=True)
    )
    assert is_clean(value.to_dense() for value in result)
    return norms, apart


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_step(way: Callable[..., torch.Tensor], lanes: bool) -> None:
    torch.manual_seed(1)
    _, apart = both(Net(way).double(), lanes=lanes)
    assert apart < 1e-13


def test_what_is_in_one_go() -> None:
    norms, _ = both(Net(lambda net, x: net.second(residual(net, x))).double())
    assert norms.counts == {
        "batch normalisations": 2,
        "with ReLU": 1,
        "with addition and ReLU": 1,
        "backward past the ReLU": 2,
        "of them of a sum": 0,
    }
    assert "1 with addition and ReLU" in norms.explain()


def test_a_gradient_that_the_shortcut_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of the normalisation's backward writes it, and the second half is all that is left."""
    calls = []
    for name in ("reduce_", "input_gradient"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    norms, apart = both(Net(convolution_in_the_shortcut).double())
    assert apart < 1e-13
    assert norms.counts["backward past the ReLU"] == 2
    assert norms.counts["of them of a sum"] == 1
    assert calls == ["reduce_", "input_gradient"] * 3


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_layers_keep_no_inputs(frozen: bool) -> None:
    """They have no backward that would take them, and autograd does not keep them either."""
    net, norms = Net(residual).double().to(memory_format=torch.channels_last), FusedBatchNorms()
    net.requires_grad_(not frozen)
    norms.begin(poison=False)
    with norms:
        net(X.to(memory_format=torch.channels_last))
    assert len(norms._rectified) == 2
    assert all((rectified.normal is None) == frozen for rectified in norms._rectified.values())


def test_what_is_held_is_written() -> None:
    net, norms = Net(held).double(), FusedBatchNorms()
    x = X.to(memory_format=torch.channels_last)
    net = net.to(memory_format=torch.channels_last)
    stepped(net, x, norms)
    result = net.kept.detach().clone()
    net(x)
    torch.testing.assert_close(result, net.kept.detach())


def test_what_is_read_past_pytorch_is_found() -> None:
    """By an address, as a kernel would: numbers that are no numbers come out."""

    def past(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = net.norm(x)
        return functional.relu(y) * torch.from_numpy(y.detach().numpy()).abs().mean()

    net, norms = Net(past).double().to(memory_format=torch.channels_last), FusedBatchNorms()
    norms.begin(poison=True)
    with norms:
        loss = functional.cross_entropy(net(X.to(memory_format=torch.channels_last)), Y)
    assert not is_clean([loss.detach()])


class ByAddress(torch.autograd.Function):
    """Twice a number; the gradient is added up, in place or not, and read past PyTorch."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        context.in_place = in_place
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = torch.empty(gradient.shape, dtype=gradient.dtype).to(memory_format=torch.channels_last)
        both = gradient.clone().add_(gradient) if context.in_place else gradient + gradient.clone()
        ctypes.memmove(result.data_ptr(), both.data_ptr(), both.nbytes)
        return result, None


@pytest.mark.parametrize("in_place", [False, True])
def test_sums_of_gradients_that_are_read_past_pytorch_are_found(in_place: bool) -> None:
    """Also where the memory holds numbers, and not yet the right ones."""

    def past(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.second(ByAddress.apply(functional.relu(net.norm(x)), in_place))

    net, norms = Net(past).double().to(memory_format=torch.channels_last), FusedBatchNorms()
    norms.begin(poison=True)
    with norms:
        loss = functional.cross_entropy(net(X.to(memory_format=torch.channels_last)), Y)
    with norms:
        loss.backward()
    assert not is_clean([parameter.grad for parameter in net.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
def test_norms_without(options: dict[str, Any]) -> None:
    _, apart = both(Net(residual, **options).double())
    assert apart < 1e-13


def test_layers_without_channels_last_are_left_alone() -> None:
    net, norms = Net(residual).double(), FusedBatchNorms()
    plain = stepped(copy.deepcopy(net), X)
    for a, b in zip(plain, stepped(net, X, norms), strict=True):
        assert torch.equal(a, b)
    assert not norms.counts


def test_a_whole_net() -> None:
    torch.manual_seed(0)
    net = models.small_resnet(3).double()
    norms, apart = both(net, torch.rand(4, 1, 12, 12, dtype=torch.float64), lanes=True)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    message = norms.counts
    assert message["batch normalisations"] == message["with ReLU"] + message["with addition and ReLU"] == count
    # Backward not those whose shortcut has a convolution, which takes the gradient first.
    assert message["backward past the ReLU"] >= count * 0.7
    assert message["of them of a sum"] >= 2
    assert apart < 1e-11


def test_rows_and_columns() -> None:
    """Normalisation of vectors: rows of a matrix."""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    norms, apart = both(net, torch.rand(6, 5, dtype=torch.float64))
    assert apart < 1e-13
    assert norms.counts["with ReLU"] == 1


def test_sparse_gradients() -> None:
    """They have no memory of their own that could be noted."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.head = nn.Embedding(9, 8, sparse=True), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(functional.relu(self.norm(self.words(x[:, 0]) + self.words(x[:, 1]))))

    norms, apart = both(Words().double(), torch.arange(12).reshape(6, 2) % 9)
    assert apart < 1e-13
    assert norms.counts["with ReLU"] == 1
