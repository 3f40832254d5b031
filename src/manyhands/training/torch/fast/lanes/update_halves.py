"""The update of the weights in two halves, side by side.

An optimizer's kernel gives each block a long piece of a weight, and takes few weights at once. So a model of some
million weights is updated by several kernels one after the other, none of which fills a large GPU. An optimizer that
treats each parameter alone may as well make its step in two halves:

    main lane     ... backward ──┬── update of the second half ──┬── ...
    side lane 1                  └── update of the first half ───┘

The results are equal to the bit. That no memory is in both halves is checked (:mod:`.early`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from manyhands.backends.torch.compat import memory_id
from manyhands.training.torch.fast.lanes.early import EarlyWork

# They treat each parameter alone, and count the steps of each alone.
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_WORTH = 1 << 20  # numbers in each half


def update_in_halves(optimizer: torch.optim.Optimizer, early: EarlyWork, *, worth: int = _WORTH) -> bool:
    """Make a step of the optimizer in two halves; False, and nothing done, where that does not pay or is not the same.

    ``worth``: how many numbers each half has at least.
    """
    if type(optimizer) not in _KINDS or any(getattr(optimizer, name, None) for name in _HOOKS):
        return False
    first, second = _halves([parameter for group in optimizer.param_groups for parameter in group["params"]])
    touched = _memories(first), _memories(second)
    if min(_size(first), _size(second)) < worth or touched[0] & touched[1]:
        return False

    def update_first() -> None:
        with _without_gradients(second):
            type(optimizer).step(optimizer)  # not that of a scheduler, which counts the steps

    early.begin(update_first, reads=_gradients(first), writes=first)
    try:
        with _without_gradients(first):
            optimizer.step()
        early.note("update", touched[1], touched[1])
    finally:
        early.join()
    return True


def _halves(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those with a gradient, in two parts of about as many numbers."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in _gradients(trained)):
        return [], []
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    for parameter in sorted(trained, key=torch.Tensor.numel, reverse=True):
        (first if _size(first) <= _size(second) else second).append(parameter)
    return first, second


def _size(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _memories(parameters: Sequence[torch.Tensor]) -> set[int]:
    """Those of the parameters and their gradients."""
    return set(map(memory_id, [*parameters, *_gradients(parameters)]))


@contextmanager
def _without_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
