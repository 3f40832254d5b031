"""Parts around an update: gradients are clipped, random numbers are the same on every rank, and it is taken back.

Ranks draw different numbers in forward passes, for dropout. An optimizer that draws (SGLD), or a hook of it (the noise
of DP-SGD), has to draw the same everywhere, so that replicas stay equal. Its numbers follow from the job's seed, the
step and the optimizer: they are also the same on any number of devices and after a resume, and the numbers of forward
passes stay as they are. PyTorch's own optimizers draw nothing: for them nothing is seeded. For others the host seeds
its generators, and that of its GPU, in every step; no device is waited for.

``on_nan="continue"``: a batch whose loss is NaN leaves no trace in weights, statistics or optimizer. Only the device
knows whether the loss is finite, and the host must not wait for it. So everything that the step may change is copied,
the step is made in any case, and then the device chooses for each tensor: the new value, or the copy. For example
weights w = 2 and a loss of nan::

    begin                      copies: 2
    forward, backward, update  w = nan
    after_update               good = False, w = where(good, nan, 2) = 2

It costs memory for one more copy of weights, statistics and optimizer state, and the time to copy them twice in every
step. The host waits in the first steps, in which the optimizer creates its state: state that did not exist could not be
copied. Numbers that an optimizer counts in Python (none of PyTorch's own does) are not restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.state import job_state, randomness
from manyhands.training.torch.step.part import Part, TrainingStep, Turn


class Clip(Part):
    """Clips the norm of all gradients together."""

    def __init__(self, norm: float) -> None:
        self._norm = norm

    def after_backward(self, turn: Turn, parameters: Sequence[torch.Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, self._norm, foreach=True)


class UpdateDraws(Part):
    """Where the updates of one optimizer draw their random numbers from."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, seed: int, number: int) -> None:
        """``number``: that of the optimizer, where a job has several."""
        self._optimizer, self._device, self._seed = optimizer, device, (seed, number)
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._newest = (-1, 0)  # the step of the newest update, and how many it had before

    def around_update(self, turn: Turn) -> AbstractContextManager[None]:
        if self._is_torchs and not any(compat.hooks_of(self._optimizer).values()):
            return nullcontext()
        step, (before, count) = int(turn.step), self._newest
        self._newest = step, count + 1 if step == before else 0
        return randomness.preserve(self._device, randomness.mixed_seed(*self._seed, *self._newest))


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


class StepSnapshot:
    """Copies of statistics, metrics and random numbers, from before a step."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._versions = step.versions()
        self._had_state = set(step.optimizer.state)
        self._copies = [tensor.detach().clone() for tensor in self._tensors()]
        self._random = randomness.as_tensors(step.device)

    @property
    def has_updated(self) -> bool:
        """Whether an update has begun that cannot be undone."""
        return not self._step.updates_in_passes and self._step.versions() != self._versions

    def put_back(self) -> None:
        """Undo a step that failed before its update."""
        with torch.no_grad():
            for tensor, before in zip(self._tensors(), self._copies, strict=True):
                job_state.write(tensor, before)
        randomness.restore(self._random, self._step.device)
        optimizer = self._step.optimizer
        if self._step.updates_in_passes:
            for parameter in [parameter for parameter in optimizer.state if parameter not in self._had_state]:
                del optimizer.state[parameter]
        optimizer.zero_grad(set_to_none=True)

    def _tensors(self) -> list[torch.Tensor]:
        step = self._step
        tensors = [*step.model.buffers(), step.metrics.sums]
        if not step.updates_in_passes:
            return tensors
        state = [step.optimizer.state[parameter].values() for parameter in self._had_state]
        values = [value for values in state for value in values if isinstance(value, torch.Tensor)]
        return [*tensors, *step.model.parameters(), *values]
