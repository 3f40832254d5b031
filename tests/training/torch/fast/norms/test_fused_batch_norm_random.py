"""Normalisation, addition and ReLU fused, in random programs that nobody would write.

All that a step leaves behind is compared with plain PyTorch: the loss, gradients of parameters and of values in
between, and buffers. Where PyTorch refuses a program (a value was changed that a gradient needs), it is refused here
too.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from lanes_cases import NoLanes
from random_norm_cases import PROGRAMS, Net, run

from manyhands.training.torch.fast.lanes.eager import SideLanes
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms
from manyhands.training.torch.fast.small_kernels import SmallKernels


def left_behind(
    net: Net, program: list[tuple[str, int, int]], around_forward: list[Any], around_backward: list[Any]
) -> list[torch.Tensor] | type[Exception]:
    """The loss, all gradients and all buffers of two steps; or what PyTorch raises."""
    results = []
    for _ in range(2):
        net.zero_grad()
        net.gradients = []
        try:
            for mode in around_forward:
                if isinstance(mode, FusedBatchNorms):
                    mode.begin(poison=True)
            with ExitStack() as stack:
                for mode in around_forward:
                    stack.enter_context(mode)
                loss = run(net, program)
            with ExitStack() as stack:
                for mode in around_backward:
                    stack.enter_context(mode)
                loss.backward()
        except RuntimeError as error:
            return type(error)
        seen = [gradient if gradient.grad_fn is None else gradient.grad for gradient in net.gradients]
        results += [loss.detach(), *seen, *(parameter.grad for parameter in net.parameters()), *net.buffers()]
        results = [result.clone() for result in results if result is not None]
    return results


def check(program: list[tuple[str, int, int]], lanes: bool) -> None:
    torch.manual_seed(0)
    net = Net().double().to(memory_format=torch.channels_last)
    plain = left_behind(copy.deepcopy(net), program, [], [])
    norms = FusedBatchNorms()
    beside = [SideLanes(NoLanes(), 2, max_held=2000)] if lanes else []
    result = left_behind(net, program, [SmallKernels(net), norms], [*beside, norms])
    if isinstance(plain, type) or isinstance(result, type):
        assert plain is result
        return
    assert len(plain) == len(result)
    for value, other in zip(plain, result, strict=True):
        torch.testing.assert_close(other, value, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # it may be detached since
@pytest.mark.parametrize("lanes", [False, True])
def test_any_program(lanes: bool) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(PROGRAMS)
    def any_program(program: list[tuple[str, int, int]]) -> None:
        check(program, lanes)

    any_program()
