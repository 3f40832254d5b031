"""Where a captured step gets its batches from, and the forward pass over one of them.

A graph repeats the same kernels at the same addresses. So the data and the epoch's order of samples are on the device,
and so is the position in that order, which the step itself advances.

Only the metrics need the count of correct predictions. Counting takes four small kernels, and the backward pass does
not have to wait for them: the caller may count in parallel with it. For that, the model's output must not change, and
PyTorch's own operations do not change it. A third-party autograd function may reuse its memory in the backward pass
(in-place kernels for losses and activations do). If the pass has such a function, or if the output is memory of the
model, which the update may write to, correct predictions are counted at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from manyhands.backends.torch.compat import memory_id
from manyhands.training.torch.data.batches import Batch
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.objective import Scored, count_correct
from manyhands.training.torch.step.plain import PlainStep

CountCorrect = Callable[[], torch.Tensor | None]
# Names of PyTorch's nodes, such as AddmmBackward0. Other nodes belong to extensions, or may run their functions.
_OF_TORCH = re.compile(r"\w+Backward\d+|torch::autograd::AccumulateGrad")


class ResidentBatches:
    """Data on the device, the epoch's order of samples, and the place in it where the next batch begins."""

    def __init__(self, data: Arrays, device: torch.device) -> None:
        self._data = data
        self.order = torch.zeros(data.count, dtype=torch.int64, device=device)
        self.sample = torch.zeros((), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Begin an epoch with this order of samples, at this sample and step."""
        self.order.copy_(order.pin_memory(), non_blocking=True)
        self.sample.fill_(sample)
        self.step.fill_(step)

    def inputs(self, window: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the next batch is made of; ``window`` counts its samples from 0."""
        return self.order, self.sample + window

    def batch(self, *inputs: torch.Tensor) -> Batch:
        order, places = inputs
        return self._data.take(order.index_select(0, places))

    def advance(self, samples: int) -> None:
        self.sample += samples
        self.step += 1


def forward(
    step: PlainStep, batches: ResidentBatches, *inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss and number of correct predictions of a batch."""
    loss, scored = _loss_and_scores(step, batches, inputs)
    return loss, count_correct(scored)


def forward_counting_later(
    step: PlainStep, batches: ResidentBatches, *inputs: torch.Tensor
) -> tuple[torch.Tensor, CountCorrect]:
    """The loss, and a function that counts the correct predictions."""
    loss, scored = _loss_and_scores(step, batches, inputs)
    if scored is None or not is_torchs_alone(loss) or _is_of(step.model, scored.output):
        return loss, already_counted(count_correct(scored))
    return loss, functools.partial(count_correct, Scored(scored.output.detach(), scored.target))


def already_counted(correct: torch.Tensor | None) -> CountCorrect:
    """Wrap a count that is already known."""
    return lambda: correct


def _loss_and_scores(
    step: PlainStep, batches: ResidentBatches, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, Scored | None]:
    batch = step.number_format.cast(batches.batch(*inputs))
    with step.number_format.scope(step.device):
        return step.objective.loss_and_scores(step.model, batch)


def _is_of(model: torch.nn.Module, output: torch.Tensor) -> bool:
    """Whether the model's output is a view of a weight or a buffer."""
    return memory_id(output) in {memory_id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def is_torchs_alone(loss: torch.Tensor) -> bool:
    """Whether the backward pass consists of PyTorch's own operations."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        # A function written in Python may have any name.
        if isinstance(node, torch.autograd.function.BackwardCFunction) or not _OF_TORCH.fullmatch(node.name()):
            return False
        following = {other for other, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return True
