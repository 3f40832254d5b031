"""The update of the weights in two halves that run in parallel.

An optimizer's kernel gives each block a long piece of a weight, and takes few weights at once. So several kernels
update a model of some million weights one after the other, and none of them fills a large GPU. An optimizer that treats
each parameter independently can make its step in two halves:

    main lane     ... backward ──┬── update of the second half ──┬── ...
    side lane 1                  └── update of the first half ───┘

The results are equal to the bit. Halves that share memory (weights, gradients, state) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import memory_id
from manyhands.training.torch.fast.lanes.forked import ForkedWork

# These treat each parameter independently, and count steps per parameter.
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_WORTH = 1 << 20  # numbers in each half


def update_in_halves(optimizer: torch.optim.Optimizer, forked: ForkedWork, *, worth: int = _WORTH) -> bool:
    """Make a step of the optimizer in two halves.

    Returns False, and does nothing, if halves do not pay off or could give another result. ``worth``: the least size of
    each half, in numbers.
    """
    if type(optimizer) not in _KINDS or not _is_as_written(optimizer):
        return False
    first, second = _halves([parameter for group in optimizer.param_groups for parameter in group["params"]])
    if min(_size(first), _size(second)) < worth or _memories(first, optimizer) & _memories(second, optimizer):
        return False

    def update_first() -> None:
        with _without_gradients(second):
            type(optimizer).step(optimizer)  # not a scheduler's wrapper, which counts the steps

    forked.begin(update_first, reads=_gradients(first), writes=first)
    try:
        with _without_gradients(first):
            optimizer.step()
    finally:
        forked.join()
    return True


def _is_as_written(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step runs only PyTorch's code; a scheduler may wrap it, which only notes that there was a step."""
    step = vars(optimizer).get("step")
    is_wrapped = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
    return not is_wrapped and not any(getattr(optimizer, name, None) for name in compat.HOOKS_OF_OPTIMIZERS)


def _halves(parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters that have a gradient, in two parts of about the same size."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in _gradients(trained)):
        return [], []
    halves: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    sizes = [0, 0]
    for parameter in sorted(trained, key=torch.Tensor.numel, reverse=True):
        smaller = sizes.index(min(sizes))
        halves[smaller].append(parameter)
        sizes[smaller] += parameter.numel()
    return halves


def _size(parameters: Sequence[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _memories(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> set[int]:
    """The memories of the parameters, their gradients and their state."""
    state = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
    tensors = [*parameters, *_gradients(parameters), *(value for value in state if isinstance(value, torch.Tensor))]
    return set(map(memory_id, tensors))


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
