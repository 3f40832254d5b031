"""``on_nan="continue"``: a batch whose loss is NaN leaves no trace in weights, statistics or optimizer.

Only the device knows whether the loss is finite, and the host must not wait for it. So everything that the step may
change is copied, the step is made in any case, and then the device chooses for each tensor: the new value, or the copy.
For example weights w = 2 and a loss of nan::

    begin                      copies: 2
    forward, backward, update  w = nan
    after_update               good = False, w = where(good, nan, 2) = 2

It costs memory for one more copy of weights, statistics and optimizer state, and the time to copy them twice in every
step. The host waits in the first steps, in which the optimizer creates its state: state that did not exist could not be
copied. Numbers that an optimizer counts in Python (none of PyTorch's own does) are not restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.part import Part, Turn

Key = tuple[Any, ...]


class StepUndo(Part):
    """Copies of everything that a step changes, to undo the step if one of its marks is not finite."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, others: Sequence[Part]
    ) -> None:
        """``others``: parts whose tensors the step changes, too."""
        self._model, self._optimizer, self._device, self._others = model, optimizer, device, others
        self._copies: dict[Key, torch.Tensor] = {}

    def prepare(self) -> None:
        """On a GPU steps are counted on the device: one that is taken back does not count."""
        if self._device.type == "cuda":
            job_state.count_on_device(self._optimizer)

    @torch.no_grad()
    def begin(self, turn: Turn) -> None:
        live = dict(self._tensors())
        if list(map(_place, live.values())) == list(map(_place, self._copies.values())):
            self._copies = dict(zip(live, self._copies.values(), strict=True))  # the same memory as in the step before
            compat.foreach_copy_(list(self._copies.values()), list(live.values()))
        else:
            self._copies = {key: tensor.detach().clone() for key, tensor in live.items()}

    @torch.no_grad()
    def after_update(self, turn: Turn) -> None:
        good = torch.stack([torch.isfinite(mark) for mark in turn.marks]).all()
        live = dict(self._tensors())
        for key, tensor in live.items():
            # A count of steps on the host cannot follow the device.
            if key in self._copies and tensor.device == good.device:
                tensor.copy_(torch.where(good, tensor, self._copies[key]))
        created = {key[1] for key in live if key[0] == "state" and key not in self._copies}
        if created and not bool(good):
            for parameter in created:
                del self._optimizer.state[parameter]

    def _tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield ("weight", parameter), parameter
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield ("state", parameter, name), value
        for number, tensor in enumerate(tensor for part in self._others for tensor in part.tensors()):
            yield ("part", number), tensor
        for name, buffer in self._model.named_buffers():
            if 0 not in buffer.stride() or buffer.numel() < 2:  # an expanded one cannot be written to
                yield ("statistics", name), buffer


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
