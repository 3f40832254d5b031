"""``torch.compile(model, backend="manyhands")``: what is bound to arguments, and what is handed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.backends.planning import GraphPlan
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
