"""A call that is recognised is run as one whose signature was built; operations are called by their quickest names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from manyhands.backends.torch import compat, planning
from manyhands.backends.torch.capture import results
from manyhands.backends.torch.capture.fast_match import recogniser
from manyhands.backends.torch.run.bindings import native
from manyhands.parallel.function import Parallel

BASE = torch.arange(24.0)
PARAMETER = nn.Parameter(torch.ones(2, 3))
LAYER = nn.Linear(2, 2)
COMPLEX = torch.ones(2, 3, dtype=torch.complex64)
with torch.inference_mode():
    INFERRED = torch.ones(2, 3)


class Special(torch.Tensor):
    """A tensor with more to it."""


def with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    tensor.grad = torch.ones_like(tensor)
    return tensor


LEAVES: list[Callable[[], Any]] = [
    lambda: torch.ones(2, 3),
    lambda: torch.ones(3, 2),
    lambda: torch.ones(3, 2).t(),
    lambda: torch.ones(2, 3, dtype=torch.float64),
    lambda: torch.ones(2, 3, requires_grad=True),
    lambda: torch.ones(2, 3, requires_grad=True) * 1,
    lambda: with_gradient(torch.ones(2, 3, requires_grad=True)),
    lambda: nn.Parameter(torch.ones(2, 3)),
    lambda: with_gradient(nn.Parameter(torch.ones(2, 3))),
    lambda: PARAMETER,
    lambda: torch._neg_view(torch.ones(2, 3)),
    lambda: torch.ones(2, 3).as_subclass(Special),
    lambda: COMPLEX,
    lambda: COMPLEX.conj(),
    lambda: INFERRED,
    lambda: BASE[:6].view(2, 3),
    lambda: BASE[6:12].view(2, 3),
    lambda: torch.ones(0),
    lambda: torch.ones(2, 3, device="meta"),
    lambda: torch.ones(2).to_sparse(),
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: 0.0,
    lambda: -0.0,
    lambda: float("nan"),
    lambda: "word",
    lambda: None,
    lambda: torch.float32,
    lambda: LAYER,
]
TREES = st.recursive(
    st.integers(0, len(LEAVES) - 1),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=2)
    ),
    max_leaves=5,
)
CALLS = st.tuples(st.tuples(TREES) | st.tuples(TREES, TREES), st.dictionaries(st.sampled_from(["k", "j"]), TREES))


def made(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: made(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(made(one) for one in tree)
    return LEAVES[tree]()


@given(CALLS, CALLS, st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_what_is_recognised_has_the_same_signature(first: Any, second: Any, again: bool, grad: bool) -> None:
    one = planning.call(*made(first))
    fits = recogniser(one)
    arguments, keywords = made(first if again else second)
    with torch.set_grad_enabled(grad):
        other = planning.call(arguments, keywords)
        found = fits(arguments, keywords) if fits is not None else None
    if found is not None:
        assert other.signature == one.signature
        assert all(map(operator.is_, found, other.tensors))
        assert len(found) == len(other.tensors)


def test_an_ordinary_call_is_recognised_and_a_changed_one_is_not() -> None:
    arguments = (torch.ones(2, 3), [torch.ones(2), 2, "w"], {"b": torch.ones(1), "a": None})
    keywords = {"scale": 1.5, "layer": LAYER}
    fits = recogniser(planning.call(arguments, keywords))
    assert fits is not None

    def known(*changed: Any, **named: Any) -> bool:
        return fits((*changed, *arguments[len(changed) :]), {**keywords, **named}) is not None

    assert known()
    assert known(torch.zeros(2, 3))
    assert not known(torch.ones(3, 2))
    assert not known(torch.ones(3, 2).t())
    assert not known(torch.ones(2, 3).double())
    assert not known(torch.ones(2, 3, device="meta"))
    assert not known(torch.ones(2, 3, requires_grad=True))
    assert not known(scale=2.5)
    assert not known(layer=nn.Linear(2, 2))
    assert not known(more=1)
    both = torch.ones(8)
    assert not known(both[:6].view(2, 3), [both[6:], 2, "w"])  # they share a memory
    assert not fits((*arguments[:2], {"a": None, "b": torch.ones(1)}), keywords)  # another order
    for scope in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with scope:
            assert not known()
    assert known()


def test_what_is_told_apart_though_it_has_the_same_form() -> None:
    """By the signature: lazy signs, types, gradients that are there, transformations."""

    def signature(x: Any) -> Any:
        return planning.call((x,), {}).signature

    plain, wanting = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    assert signature(COMPLEX) != signature(COMPLEX.conj())
    assert signature(plain) != signature(torch._neg_view(plain))
    assert signature(plain) != signature(plain.as_subclass(Special))
    assert signature(wanting) != signature(with_gradient(torch.ones(2, 3, requires_grad=True)))
    seen = []
    torch.vmap(lambda x: seen.append(signature(x)) or x)(torch.ones(4, 2, 3))
    assert seen != [signature(plain)]


def test_a_gradient_that_is_there_now() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * (2 if x.grad is None else 3)

    fast = Parallel(function, planning, synchronous=True)
    x = torch.ones(2, requires_grad=True)
    for gradient, expected in ((None, 2), (torch.ones(2), 3), (None, 2), (torch.ones(2), 3)):
        x.grad = gradient
        assert fast(x).tolist() == [expected] * 2


def test_the_order_of_a_dict_counts() -> None:
    def function(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(values.values()))

    fast = Parallel(function, planning, synchronous=True)
    x, y = torch.zeros(2), torch.ones(2)
    assert fast({"x": x, "y": y}).tolist() == [[0, 0], [1, 1]]
    assert fast({"y": y, "x": x}).tolist() == [[1, 1], [0, 0]]


def test_calls_in_turns_are_each_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Parallel(lambda x: x + 1, planning, synchronous=True)
    inputs = [torch.ones(n) for n in (1, 2, 3)]
    for x in inputs:
        fast(x)
    monkeypatch.setattr(planning, "call", None)  # no signature is built any more
    for x in inputs * 2:
        assert torch.equal(fast(x), x + 1)


# Names


def nodes(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    found = planning.trace(function, planning.call(arguments, {}))
    return [step.node for step in found.steps]


def test_an_operation_is_called_by_its_binding_only_if_that_is_the_same_operation() -> None:
    x = torch.ones(4, 4)
    assert [native(n).__name__ for n in nodes(lambda x: (x @ x).view(-1).add_(1).tanh(), x)] == [
        "mm",
        "view",
        "add_",
        "tanh",
    ]
    for kept in nodes(lambda x: (torch.rand_like(x) + x.to(torch.float64), torch.zeros(3)), x):
        if kept.target._schema.name != "aten::add":
            assert native(kept) is kept.target  # random numbers, a cast without a binding, made from nothing


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.var_mean(x, dim=1),
        lambda x: x.max(dim=0),
        lambda x: x.split([1, 3]),
        lambda x: nn.functional.layer_norm(x, (4,)),
        lambda x: x.clamp(0.1, 0.5) ** 2 / 3 - x.sum(1, keepdim=True),
        lambda x: nn.functional.max_pool2d(x[None], 2, return_indices=True),
        lambda x: nn.functional.gelu(x).masked_fill(x > 0.5, 2.0).transpose(0, 1).contiguous(),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)).cumsum(0).unsqueeze(-1).expand(4, 4, 2),
    ],
)
def test_what_is_called_gives_what_eager_gives(function: Callable[..., Any]) -> None:
    x = torch.rand(4, 4)
    found, expected = Parallel(function, planning, synchronous=True)(x), function(x)
    for one, other in zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_results_of_any_form_are_put_together() -> None:
    for value in ([1, (2, {"b": 3, "a": [4, ()]})], 1, {}, torch.return_types.max((1, 2)), [{"x": 1}, {"x": 2}]):
        leaves, structure = compat.tree_flatten(value)
        assert results._builder(structure)(leaves) == value


@pytest.mark.parametrize("kernel", [1, 3])
def test_an_update_takes_gradients_of_any_layout(kernel: int) -> None:
    """As a library's kernel gives them: on a GPU the update itself would refuse them."""
    weight = torch.randn(4, 3, kernel, kernel).to(memory_format=torch.channels_last)
    gradient = torch.randn(4, 3, kernel, kernel)
    assert weight.stride() != gradient.stride()

    def update(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        how: Any = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
        torch._fused_sgd_([w], [g], [], **how, maximize=False, is_first_step=True)
        return w + 0

    (node,) = (n for n in nodes(update, weight, weight.clone()) if "_fused_sgd_" in str(n.target))
    expected = weight - 0.5 * gradient
    native(node)([weight], [gradient], [], **node.kwargs)
    assert torch.equal(weight, expected)


def test_whether_two_arguments_are_one_tensor() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + (b if b is a else b * 2)

    fast = Parallel(function, planning, synchronous=True)
    x, other = torch.rand(4), torch.rand(4)
    view = x.view(4)  # the same memory, another tensor
    for arguments in ((x, x), (x, view), (x, other), (x, x), (other, other), (x, view), (view, x), (x, other)):
        for _ in range(2):
            assert torch.equal(fast(*arguments), function(*arguments))
            assert not fast.planned.way.is_plain
