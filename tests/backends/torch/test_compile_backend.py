"""``torch.compile(model, backend="manyhands")``: what is bound to arguments, and what is handed on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from manyhands import torch as mh
from manyhands.backends.planning import GraphPlan
from manyhands.backends.torch import planning
from manyhands.backends.torch.dynamo import backend as dynamo

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)
PLAN = GraphPlan(lambda tensors, arguments, keywords: None, in_graph=False, is_final=True)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Bindings


def test_a_tensor_that_is_given_twice_fits_again() -> None:
    """A compiler may keep one tensor for two results, and the backward pass then gets it twice."""
    a, b = torch.rand(3), torch.rand(3)
    bound = dynamo._Bound(PLAN, (a, b, a, 2), [])
    assert bound.fits((a, b, a, 2))
    c = torch.rand(3)
    assert bound.fits((c, b, c, 2))
    assert not bound.fits((a, b, b, 2))
    assert not bound.fits((a, b, c, 2))
    assert not bound.fits((a, b, a, 3))
    assert not bound.fits((a, torch.rand(4), a, 2))


def test_only_what_is_read_in_place_has_to_lie_where_it_lay() -> None:
    a, b = torch.rand(3), torch.rand(3)
    bound = dynamo._Bound(PLAN, (a, b), [1])
    assert bound.fits((torch.rand(3), b))
    assert bound.fits((a, b.detach()))
    assert not bound.fits((a, b.clone()))


def test_a_run_is_told_where_its_tensors_lie() -> None:
    a, b, other = torch.rand(3), torch.rand(3), torch.rand(3)
    bound = dynamo._Bound(PLAN, (a, 2, b), [2])
    for first in (a, other, a):
        given = bound.given((first, 2, b))
        assert list(map(id, given)) == [id(first), id(b)]
        assert given.places == (first.data_ptr(), b.data_ptr())


# Results that cannot be compared


@torch.library.custom_op(
    "manyhands_tests::attention",
    mutates_args=(),
    schema="(Tensor x, float dropout_p=0.) -> (Tensor output, Tensor philox_seed)",
)
def _attention(x: torch.Tensor, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention on a GPU does, it gives a state that nobody has written to."""
    return x.sin(), torch.tensor(next(_SEEDS))


@_attention.register_fake
def _(x: torch.Tensor, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.long)


_SEEDS = itertools.count()


@pytest.mark.parametrize(("dropout", "is_same"), [(0.0, True), (0.5, False)])
def test_the_random_state_of_attention_without_dropout_is_not_compared(dropout: float, is_same: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        result, state = torch.ops.manyhands_tests.attention(x, dropout)
        return result * 2, state.detach()

    call = planning.call((torch.rand(4),), {})
    traced = planning.trace(function, call)

    def plainly(tensors: Any, arguments: Any, keywords: Any) -> Any:
        return function(*arguments)

    one, other = (planning.expected(traced, call, plainly) for _ in range(2))
    assert planning.equal(one, other)[0] is is_same


def test_how_a_graph_is_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x: (x @ x).sin(), backend=mh.compile_backend, options={"fuse": False})
    with caplog.at_level("DEBUG", "manyhands"):
        for _ in range(3):
            fast(torch.rand(4, 4))
    told = [record.getMessage() for record in caplog.records if record.name == "manyhands"]
    assert len(told) == 1
    assert "GraphModule: run as" in told[0]
    assert "why not faster" in told[0]
