"""The forward pass of a fast step, from the epoch's order to the loss; metrics are counted at once or later.

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
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.objective import Scored, count_correct
from manyhands.training.torch.step.eager import EagerStep

CountCorrect = Callable[[], torch.Tensor | None]
# Names of PyTorch's nodes, such as AddmmBackward0. Other nodes belong to extensions, or may run their functions.
_OF_TORCH = re.compile(r"\w+Backward\d+|torch::autograd::AccumulateGrad")


def forward(
    eager: EagerStep, data: Arrays, order: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss and number of correct predictions of the samples at these positions of an epoch's order."""
    loss, scored = _scored(eager, data, order, places)
    return loss, count_correct(scored)


def forward_counting_later(
    eager: EagerStep, data: Arrays, order: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, CountCorrect]:
    """The loss, and a function that counts the correct predictions."""
    loss, scored = _scored(eager, data, order, places)
    if scored is None or not is_torchs_alone(loss) or _is_of(eager.model, scored.output):
        return loss, already_counted(count_correct(scored))
    return loss, functools.partial(count_correct, Scored(scored.output.detach(), scored.target))


def already_counted(correct: torch.Tensor | None) -> CountCorrect:
    """Wrap a count that is already known."""
    return lambda: correct


def _scored(
    eager: EagerStep, data: Arrays, order: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, Scored | None]:
    batch = eager.number_format.cast(data.take(order.index_select(0, places)))
    with eager.number_format.scope(eager.device):
        return eager.objective.loss_and_scores(eager.model, batch)


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
