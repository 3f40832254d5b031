"""Random programs that change what they depend on between calls; `changing_programs.py` runs any number of them."""

from __future__ import annotations

import pytest
import torch
from changing_programs import failure

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="Dynamo captures nothing beside a dispatch mode"
)


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_planned_calls_give_what_plain_ones_give(first: int) -> None:
    for seed in range(first, first + 8):
        assert (found := failure(seed)) is None, found
