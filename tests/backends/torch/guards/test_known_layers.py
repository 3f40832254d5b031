"""Layers that Dynamo does not follow, because it has followed another one of their kind: every change is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.backends.torch import planning
from manyhands.backends.torch.guards import by_dynamo, known_layers

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="Dynamo captures nothing beside a dispatch mode"
)
X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(), block(), block())
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        for head in self.heads:
            x = head(x)
        return x * x.shape[-1] if x.shape[-1] > 1 else x


class Guarded:
    """A net with its trace and Dynamo's guards; ``left_out`` are the layers that Dynamo has not followed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net().eval()
        with torch.no_grad():
            call = planning.call((X,), {})
            self.trace = planning.trace(self.net, call)
            made: list[known_layers.KnownLayers] = []

            class Noted(known_layers.KnownLayers):
                def __init__(self, watched: Any) -> None:
                    super().__init__(watched)
                    made.append(self)

            before, by_dynamo.KnownLayers = by_dynamo.KnownLayers, Noted  # type: ignore[misc]
            try:
                self.check = by_dynamo.guards(self.net, (X,), {}, self.trace)
            finally:
                by_dynamo.KnownLayers = before  # type: ignore[misc]
        self.left_out = list(made[0].left_out.values())

    def hold(self) -> bool:
        assert self.check is not None
        with torch.no_grad():
            return self.trace.holds() and self.check((X,), {})


@pytest.fixture(scope="module")
def guarded() -> Guarded:
    return Guarded()


def test_the_first_of_each_kind_is_followed_and_the_others_are_not(guarded: Guarded) -> None:
    first, *others = guarded.net.blocks
    assert {id(one) for one in guarded.left_out} == {id(one) for block in others for one in block} | {
        id(guarded.net.heads[1])
    }
    assert not {id(one) for one in first} & {id(one) for one in guarded.left_out}
    assert guarded.hold()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def other_form(net: Net) -> Iterator[None]:
    """The same numbers of one parameter at the same address, read in another order."""
    weight = net.heads[1].weight
    before = weight.data
    weight.data = before.t()
    try:
        yield
    finally:
        weight.data = before


@contextmanager
def hook(net: Net) -> Iterator[None]:
    handle = net.blocks[2][1].register_forward_hook(lambda *given: given[-1] * 2)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def other_layer(net: Net) -> Iterator[None]:
    before = net.blocks[1]
    net.blocks[1] = block().eval()
    try:
        yield
    finally:
        net.blocks[1] = before


@contextmanager
def training(net: Net) -> Iterator[None]:
    net.blocks[2][1].train()
    try:
        yield
    finally:
        net.blocks[2][1].eval()


@contextmanager
def forward_for_a_size(net: Net) -> Iterator[None]:
    """A method of the layer's own, and one attribute less: there are as many as before."""
    layer = net.heads[1]
    size = layer.in_features
    del layer.in_features
    with attribute(layer, "forward", lambda x: x * 2):
        yield
    layer.in_features = size


CHANGES: dict[str, Callable[[Net], Any]] = {
    "another dict of parameters": lambda net: attribute(
        net.heads[1], "_parameters", {word: nn.Parameter(one * 2) for word, one in net.heads[1].named_parameters()}
    ),
    "a method in place of a size": forward_for_a_size,
    "a setting": lambda net: attribute(net.blocks[1][0], "stride", (2, 2)),
    "a number": lambda net: attribute(net.blocks[2][1], "eps", 0.5),
    "a method of the layer's own": lambda net: attribute(net.blocks[2][2], "forward", lambda x: x * 2),
    "a function of PyTorch": lambda net: attribute(nn.functional, "batch_norm", lambda x, *_, **__: x),
    "the form of a parameter": other_form,
    "a hook": hook,
    "another layer": other_layer,
    "training mode": training,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_noticed(guarded: Guarded, change: Callable[[Net], Any]) -> None:
    assert guarded.hold()
    with change(guarded.net):
        assert not guarded.hold()
    assert guarded.hold()


def test_layers_are_followed_where_gradients_are_recorded() -> None:
    twins = [nn.ReLU(), nn.ReLU()]
    layers = known_layers.KnownLayers({id(one): one for one in twins})
    with torch.enable_grad():
        assert all(layers.stand_in(one, X) is None for one in twins)
    with torch.no_grad():
        assert layers.stand_in(twins[0], X) is None
        assert layers.stand_in(twins[1], X) is not None
        assert layers.stand_in(nn.ReLU(), X) is None  # nobody watches it


def test_layers_of_other_kinds_are_followed() -> None:
    layer = nn.Conv2d(3, 3, 1)
    others = [nn.Conv2d(3, 3, 1, stride=2), nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1).double()]
    kinds = [known_layers._kind(one, X) for one in (layer, *others)]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert known_layers._kind(nn.Conv2d(3, 5, 1), X) == kinds[0]  # one path for all sizes
    layer.extra = [1]  # somebody's own, that nobody watches inside
    assert known_layers._kind(layer, X) is None

    class Mine(nn.ReLU):
        pass

    assert known_layers._kind(Mine(), X) is None
    assert known_layers._kind(nn.BatchNorm2d(3).train(), X) is None
    assert known_layers._kind(nn.ReLU(inplace=True), X) is None  # gives its argument back, as code may notice
