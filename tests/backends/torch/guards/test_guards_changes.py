"""Whatever a function takes from outside its arguments may change between two calls: the next call goes by it."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from manyhands.backends.torch import planning
from manyhands.parallel.function import Parallel

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Settings:
    scale = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Layer(nn.Module):
    shift = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bend = nn.LeakyReLU(0.1)
        self._scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bend(self.inner(x)) * self._scale + self.shift  # type: ignore[no-any-return]


class Table:
    def __getitem__(self, word: str) -> float:
        return SCALES[word]

    def __getattr__(self, word: str) -> float:
        if word == "big":
            return SCALES[word]
        raise AttributeError(word)


class Made:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x * SCALES["made"]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * SCALES["derived"]


SCALES = dict.fromkeys(("item", "big", "made", "derived"), 2.0)
settings = types.ModuleType("settings")
settings.part = types.ModuleType("settings.part")  # type: ignore[attr-defined]
settings.part.scale = 2.0
sys.modules.setdefault("settings_of_a_test", settings)
settings.scale = 2.0  # type: ignore[attr-defined]


def twice(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def imports(x: torch.Tensor) -> torch.Tensor:
    from settings_of_a_test import part  # type: ignore[import-not-found]

    return x * part.scale  # type: ignore[no-any-return]


def derives(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(Twice.apply(y).sum(), y)[0]  # type: ignore[no-untyped-call, no-any-return]


def written_anew() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A class that is defined again, as in a notebook."""
    source = "class Scale:\n    def of(self, x): return x * {}\ndef function(x): return Scale().of(x)"
    names = {"__name__": "notebook"}
    exec(source.format(2), names)
    return names["function"], lambda: exec(source.format(3).partition("def function")[0], names)  # type: ignore[return-value]


def inherited() -> tuple[Any, Callable[[], Any]]:
    """A method that a class inherits, and then defines itself; of an object and of a layer."""

    class Base(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Derived(Base):
        pass

    return Derived(), lambda: setattr(Derived, "scaled", lambda layer, x: x * 3)


def named_by_a_text() -> tuple[Any, Callable[[], Any]]:
    """A method whose name no code has."""

    class Scale:
        def by_two(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    scale, name = Scale(), "by_two"
    return lambda x: getattr(scale, name)(x), lambda: setattr(Scale, "by_two", lambda self, x: x * 3)


def shadowed() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A global that takes the place of a function of Python."""
    names: dict[str, Any] = {"__name__": "shadowing"}
    exec("def function(x): return x * abs(-2.0)", names)
    return names["function"], lambda: names.update(abs=lambda number: number)


def cases() -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """For each a function and what changes between two of its calls."""
    array, some, queue, slotted = numpy.array([2.0]), {1}, deque([2.0]), Slotted()
    long, large, many = [2.0] * 2000, numpy.full(2000, 2.0), dict.fromkeys(range(2000), 2.0)
    table, convolution, encoder = Table(), nn.Conv2d(1, 1, 3, padding=1), nn.TransformerEncoderLayer(4, 2, 8, 0.0)
    convolution.requires_grad_(False)
    encoder.requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(X)], lr=2.0)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    inner = Parallel(lambda x: x * queue[0], planning)
    ordered = OrderedDict(first=2.0, second=3.0)
    one, wide, layer = Settings(), torch.arange(8.0).view(2, 4), Layer().requires_grad_(False)
    return {
        "an array": (lambda x: x * float(array[0]), lambda: array.__setitem__(0, 3.0)),
        "a set": (lambda x: x * len(some), lambda: some.add(2)),
        "a queue": (lambda x: x * queue[0], lambda: queue.__setitem__(0, 3.0)),
        "a slot": (lambda x: x * slotted.scale, lambda: setattr(slotted, "scale", 3.0)),
        "a class": (lambda x: x * Settings.scale, lambda: setattr(Settings, "scale", Settings.scale + 1)),
        "an object's class": (lambda x: x * one.scale, lambda: setattr(Settings, "scale", Settings.scale + 1)),
        "an object instead of its class": (lambda x: x * one.scale, lambda: setattr(one, "scale", 5.0)),
        "a module of the user": (lambda x: x * settings.scale, lambda: setattr(settings, "scale", 3.0)),
        "the form of a tensor": (lambda x: x[:2] * wide.shape[0] + wide.view(-1)[:4], lambda: wide.t_()),
        "a private attribute": (layer, lambda: setattr(layer, "_scale", 3.0)),
        "a layer's class": (layer, lambda: setattr(Layer, "shift", Layer.shift + 1)),
        "a setting of PyTorch's layer": (layer, lambda: setattr(layer.bend, "negative_slope", 0.5)),
        "a hook": (layer, lambda: layer.inner.register_forward_hook(twice)),
        "what an item is": (lambda x: x * table["item"], lambda: SCALES.update(item=3.0)),
        "what an attribute is": (lambda x: x * table.big, lambda: SCALES.update(big=3.0)),
        "what an object is made with": (lambda x: Made(x).x, lambda: SCALES.update(made=3.0)),
        "a derivative": (derives, lambda: SCALES.update(derived=3.0)),
        "a module in a module": (lambda x: x * settings.part.scale, lambda: setattr(settings.part, "scale", 3.0)),
        "a module that is imported inside": (imports, lambda: setattr(settings.part, "scale", 4.0)),
        "a class that is written anew": written_anew(),
        "an element of a long list": (lambda x: x * long[1500], lambda: long.__setitem__(1500, 3.0)),
        "an element of a long dict": (lambda x: x * many[1500], lambda: many.__setitem__(1500, 3.0)),
        "a large array": (lambda x: x * float(large.sum()), lambda: large.__setitem__(1500, 3.0)),
        "a layer's stride": (lambda x: convolution(x[None]), lambda: setattr(convolution, "stride", (2, 2))),
        "a layer's function": (lambda x: encoder(x[None]), lambda: setattr(encoder, "activation", torch.sigmoid)),
        "a scheduler": (lambda x: x * rates.get_last_lr()[0], lambda: (optimizer.step(), rates.step())),
        "a method that was inherited": inherited(),
        "a method named by a text": named_by_a_text(),
        "a name that was Python's": shadowed(),
        "the order of a dict": (
            lambda x: functools.reduce(lambda y, scale: y * scale + 1, ordered.values(), x),
            lambda: ordered.move_to_end("first"),
        ),
        "a planned function's": (lambda x: inner(x) + 1, lambda: queue.__setitem__(0, 4.0)),
    }


@pytest.mark.parametrize("name", cases())
def test_what_has_changed_is_seen(name: str) -> None:
    function, change = cases()[name]
    fast = Parallel(function, planning, synchronous=True)
    for _ in range(2):
        assert torch.equal(fast(X), function(X))
    assert "synchronous" in fast.explain()
    change()
    try:
        expected = function(X)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fast(X)
    else:
        assert torch.equal(fast(X), expected)


def test_a_global_with_the_name_of_an_attribute_is_not_read() -> None:
    """As in a script: ``loss = step(x)`` in a loop, where the step reads ``outputs.loss``."""
    names: dict[str, Any] = {"__name__": "script", "Outputs": types.SimpleNamespace, "loss": torch.zeros(())}
    exec("def function(x): return Outputs(loss=x * 2).loss", names)
    fast = Parallel(names["function"], planning, synchronous=True)
    fast(X)
    plan = fast.planned
    for _ in range(3):
        names["loss"] = fast(X)
        assert fast.planned is plan


def training() -> tuple[nn.Linear, Parallel]:
    layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss.detach()

    return layer, Parallel(step, planning, synchronous=True)


def test_a_frozen_parameter_gets_no_gradient() -> None:
    layer, fast = training()
    for _ in range(2):
        fast(X)
    layer.weight.requires_grad_(False)
    fast(X)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    layer.weight.requires_grad_(True)
    fast(X)
    assert layer.weight.grad is not None


def test_a_frozen_parameter_loses_its_old_gradient() -> None:
    """An optimizer takes it away from all of its weights, and would move one that kept it."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = Parallel(step, planning, synchronous=True)
    for number in range(6):
        frozen = number % 2 == 1
        layer.weight.requires_grad_(not frozen)
        before = layer.weight.detach().clone()
        fast(X)
        assert (layer.weight.grad is None) == frozen
        assert torch.equal(layer.weight, before) == frozen
    assert "synchronous" in fast.explain()


def test_hooks_of_tensors_are_called_at_every_step() -> None:
    layer, fast = training()
    for _ in range(2):
        fast(X)
    plain = layer.weight.grad
    called: list[int] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return gradient * 2

    handle = layer.weight.register_hook(hook)
    for count in (1, 2):
        fast(X)
        assert torch.equal(layer.weight.grad, plain * 2)
        assert len(called) == count
    assert "hook" in fast.explain()
    handle.remove()
    fast(X)
    assert torch.equal(layer.weight.grad, plain)


@pytest.mark.parametrize(
    "added", [lambda: torch.tensor(1.0), lambda: 1.0, lambda: torch.ones(())], ids=["constant", "number", "made"]
)
def test_planning_leaves_a_count_outside_as_it_was(added: Callable[[], Any]) -> None:
    """PyTorch computes with constants while it traces: what that writes to is put back."""
    count = torch.zeros(())

    def function(x: torch.Tensor) -> torch.Tensor:
        count.add_(added())
        return x * count

    found = planning.trace(function, planning.call((torch.ones(3),), {}))
    assert found.steps
    assert float(count) == 0
    fast = Parallel(function, planning)
    for number in range(1, 4):
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), float(number)))


def test_an_encoder_that_leaves_out_padded_places() -> None:
    """In eval mode PyTorch packs what a mask leaves; a plan that was compared without padding would not."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2).eval()
    fast = Parallel(torch.no_grad()(lambda x, mask: encoder(x, src_key_padding_mask=mask)), planning, synchronous=True)
    whole, padded = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([[False, False, True, True]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are said to be new
        for mask in (whole, padded):
            with torch.no_grad():
                assert torch.equal(fast(X[None], mask), encoder(X[None], src_key_padding_mask=mask))
    assert "enable_nested_tensor=False" in fast.explain()
    encoder.train()
    fast(X[None], padded)
    assert "synchronous" in fast.explain()
