"""Biases before a BatchNorm are left out where that is proved to change nothing, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_cases import assert_as_plain
from lanes_cases import NoLanes
from test_biases_that_stay import X, Y, loss_of, names, redundant_names, searched
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from training_cases import WithNet, difference, mlp, vectors

from manyhands.book import torch as models
from manyhands.training.options import Step
from manyhands.training.torch.fast.lanes.eager import StepLanes
from manyhands.training.torch.fast.redundant_biases import BiasSearch, RedundantBiases, may_have_redundant_biases
from manyhands.training.torch.ranks.gradient_sum import LocalGradients


class Net(nn.Module):
    """Convolutions of all kinds, a residual, a linear layer: five biases before a BatchNorm, two that are not."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, **norm)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4, **norm)
        self.around = nn.Conv2d(4, 4, 1)
        self.up, self.norm3 = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.BatchNorm2d(3, **norm)
        self.line, self.norm4 = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5, **norm)
        self.hidden, self.norm5 = nn.Linear(5, 7), nn.BatchNorm1d(7, **norm)
        self.out = nn.Linear(7, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        x = functional.relu(self.norm2(self.second(x)) + self.around(x))
        x = self.norm4(self.line(self.norm3(self.up(x)).relu().flatten(2))).tanh()
        return self.out(self.norm5(self.hidden(x.mean(2))).relu())


def trained(
    net: nn.Module, redundant: RedundantBiases | None, forward: Any = loss_of, steps: int = 4, **options: Any
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01, **options)
    gradients = LocalGradients(optimizer)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if redundant is None:
            forward(net).backward()
        else:
            gradients.set_zero(redundant.learned)
            with redundant.left_out():
                forward(net).backward()
            redundant.shift_means()
            for layer, _ in redundant._bare:
                gradient: Any = layer.bias.grad if isinstance(layer.bias, nn.Parameter) else None
                assert gradient is None or not gradient.any()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()


def both(make: Callable[[], nn.Module], forward: Any = loss_of, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same net trained plainly and with its redundant biases left out."""
    plain, other = make(), make()
    redundant = searched(other)
    other.load_state_dict(plain.state_dict())  # the search was a step, with statistics
    trained(plain, None)
    trained(other, redundant, forward, **options)
    return plain, other


@pytest.mark.parametrize(
    "norm",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.7}, {"momentum": 1.0}],
    ids=["as it is", "not affine", "no running statistics", "momentum", "all momentum"],
)
def test_training_without_them_is_the_same(norm: dict[str, Any]) -> None:
    assert redundant_names(Net(**norm)) == ["first", "second", "up", "line", "hidden"]
    plain, other = both(lambda: Net(**norm))
    assert difference(plain.state_dict(), other.state_dict()) < 1e-12
    assert plain.state_dict().keys() == other.state_dict().keys()


def test_a_bias_that_does_not_learn_keeps_no_gradient() -> None:
    def make() -> nn.Module:
        net = Net()
        net.first.bias.requires_grad_(False)
        return net

    assert "first" in redundant_names(make())
    plain, other = both(make)
    assert difference(plain.state_dict(), other.state_dict()) < 1e-12
    assert other.first.bias.grad is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["resnet18", "small-resnet"])
def test_of_a_resnet_all_but_those_around_the_blocks(name: str) -> None:
    net = models.MODELS[name](in_channels=2).double()
    redundant = searched(net, lambda net: net(X).sum())
    expected = [key for key, one in net.named_modules() if isinstance(one, nn.Conv2d) and not key.endswith("conv3")]
    assert names(net, redundant) == expected
    assert redundant.explain() == f"biases left out because a BatchNorm cancels them: {len(expected)}"


def test_in_bfloat16_too() -> None:
    def loss(net: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = net(X.float())
        return functional.cross_entropy(output.float(), Y)

    net = Net().float()
    redundant = searched(net, loss)
    assert names(net, redundant) == ["first", "second", "up", "line", "hidden"]
    trained(net, redundant, loss)
    assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())


def test_a_compiled_step() -> None:
    from torch._dynamo import testing

    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    plain, other = both(Net, torch.compile(loss_of, backend=counter, dynamic=False))
    assert counter.frame_count == 1
    assert difference(plain.state_dict(), other.state_dict()) < 1e-12
    biases = [node for node in counter.graphs[0].graph.nodes if "bias" in str(node.target) and node.op == "placeholder"]
    assert len(biases) == 2 + 5, "of layers that are not before a BatchNorm, and of BatchNorms"


def test_beside_side_lanes() -> None:
    net, step_lanes = Net(), StepLanes(NoLanes())
    redundant = searched(net)
    gradients: list[list[Any]] = []
    for around in (contextlib.nullcontext(), step_lanes.during_backward(6, compiled=False)):
        net.zero_grad(set_to_none=True)
        with redundant.left_out():
            loss = loss_of(net)
            with around:
                loss.backward()
        redundant.shift_means()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(one is other or torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert "    3 x convolution, weight" in step_lanes.explain(6)


def test_a_net_that_the_caller_compiled_is_left_alone() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    assert may_have_redundant_biases(Net(), optimizer)
    assert not may_have_redundant_biases(torch.compile(Net(), backend="eager"), optimizer)  # type: ignore[arg-type]
    net = Net()
    net.compile(backend="eager")
    assert not may_have_redundant_biases(nn.Sequential(net), optimizer)


def test_an_update_that_does_not_bear_zeros() -> None:
    class Own(torch.optim.SGD):
        pass

    net = Net()
    assert may_have_redundant_biases(net, torch.optim.AdamW(net.parameters()))
    assert not may_have_redundant_biases(net, torch.optim.Adam(net.parameters(), eps=0.0))
    assert not may_have_redundant_biases(net, Own(net.parameters(), lr=0.1))
    assert not may_have_redundant_biases(models.lenet(), torch.optim.SGD(models.lenet().parameters(), lr=0.1))


# What is left behind


def test_an_error_puts_everything_back() -> None:
    net = Net()
    before = {name: dict(vars(module)) for name, module in net.named_modules()}

    def broken(net: nn.Module) -> torch.Tensor:
        net(X)
        raise ValueError("for a test")

    with pytest.raises(ValueError, match="for a test"):
        searched(net, broken)
    redundant = searched(net)
    with redundant.left_out():
        assert "forward" in vars(net.first)
    with pytest.raises(ValueError, match="for a test"), redundant.left_out():
        broken(net)
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == before


def test_a_search_that_cannot_begin_puts_everything_back() -> None:
    net = Net()
    net.norm2.running_mean = net.norm2.running_mean.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError, match="storage"):
        searched(net)
    assert not [name for name, module in net.named_modules() if "forward" in vars(module)]


def test_zeros_stay_zeros() -> None:
    """Clipping by a norm that is no number writes into gradients; the next step begins with zeros again."""
    net = Net()
    redundant = searched(net)
    gradients = LocalGradients(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        gradients.begin()
        gradients.set_zero(redundant.learned)
        assert not net.first.bias.grad.any()
        net.first.bias.grad.fill_(torch.nan)


# In a captured step


def test_redundant_biases_are_left_out_of_captured_steps(tmp_path: Path) -> None:
    captured, _ = assert_as_plain(mlp(norm=True), vectors(), run=tmp_path / "run")
    assert captured.replays > 5
    assert "biases left out because a BatchNorm cancels them: 1" in (tmp_path / "run" / "step.txt").read_text()


@pytest.mark.parametrize("options", [{}, {"step": Step(accumulate=2)}], ids=["one graph", "segments"])
def test_a_search_that_fails_costs_nothing(options: dict[str, Any]) -> None:
    class Failing(WithNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if any(isinstance(mode, BiasSearch) for mode in _get_current_dispatch_mode_stack()):
                raise ValueError("not here")
            return super().forward(x)  # type: ignore[no-any-return]

    captured, result = assert_as_plain(Failing(norm=True), vectors(), **options)
    assert captured.replays > 5
    assert not any("plain" in note for note in result.notes)


def test_zeros_of_redundant_biases_are_not_spoilt_by_a_batch_that_is_left_out() -> None:
    """Clipping multiplies all gradients by a norm that is no number."""
    X, y = vectors()
    X[40] = torch.nan  # in the third step, the first without that bias
    with pytest.warns(UserWarning, match="continuing"):
        assert_as_plain(mlp(norm=True), (X, y), step=Step(on_nan="continue"), gradient_clip_val=0.1)
