"""The models: shapes, sizes, and parameters that exist at once."""

from __future__ import annotations

import pickle

import pytest
import reference
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.book.torch import MODELS, Residual, initialise, lenet, resnet18


@pytest.mark.parametrize("name", MODELS)
def test_models_give_a_score_per_class(name: str) -> None:
    net = MODELS[name](num_classes=7, in_channels=3)
    assert net(torch.randn(2, 3, 28, 28)).shape == (2, 7)
    assert not any(nn.parameter.is_lazy(parameter) for parameter in net.parameters())
    again = pickle.loads(pickle.dumps(net))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_weights_have_the_shapes_of_the_reference(name: str) -> None:
    state = MODELS[name](num_classes=10).state_dict()
    shapes = sorted(tuple(value.shape) for key, value in state.items() if "num_batches" not in key)
    assert shapes == sorted(value.shape for value in reference.weights(name).values())


def test_resnet_keeps_the_parts_of_the_book() -> None:
    net = resnet18()
    names = [name for name, _ in net.named_children()]
    blocks = [f"resnet_block{i}" for i in range(1, 5)]
    assert names == ["0", "1", "2", *blocks, "global_avg_pool", "fc"]
    assert not any(isinstance(layer, nn.MaxPool2d) for layer in net.modules())
    X, shapes = torch.randn(1, 1, 16, 16), []
    with torch.no_grad():
        for layer in net.eval():
            X = layer(X)
            shapes.append(tuple(X.shape[1:]))
    assert shapes == [(64, 16, 16)] * 4 + [(128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1), (10,)]


def test_residual_in_both_calls() -> None:
    X = torch.randn(4, 3, 6, 6)
    assert Residual(3, 3)(X).shape == X.shape
    assert Residual(3)(X).shape == X.shape
    known, lazy = Residual(3, 6, use_1x1conv=True, strides=2), Residual(6, use_1x1conv=True, strides=2)
    assert lazy(X).shape == known(X).shape == (4, 6, 3, 3)
    lazy.load_state_dict(known.state_dict())
    assert torch.equal(lazy.eval()(X), known.eval()(X))


def test_initialise_is_xavier() -> None:
    net = initialise(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(100, 50)), seed=1)
    for weight, fans in ((net[0].weight, 9 * (4 + 8)), (net[1].weight, 150)):
        bound = (6 / fans) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
        assert abs(weight.mean()) < bound / 10
    assert net[1].bias.abs().max() <= 0.1


def test_initialise_is_a_function_of_its_seed() -> None:
    a, b, c = lenet(), lenet().double(), lenet()
    state = torch.get_rng_state()
    for net, seed in ((a, 3), (b, 3), (c, 4)):
        assert initialise(net, seed) is net
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y.float()) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a[0].weight, c[0].weight)
    moved = initialise(mh.to(lenet(), mh.try_gpu()), 3)
    assert mh.device_of(moved) == mh.try_gpu()
    assert all(torch.equal(x, y.cpu()) for x, y in zip(a.parameters(), moved.parameters(), strict=True))
