"""Parts around an update: gradients are clipped, and its random numbers are the same on every rank.

Ranks draw different numbers in forward passes, for dropout. An optimizer that draws (SGLD), or a hook of it (the noise
of DP-SGD), has to draw the same everywhere, so that replicas stay equal. Its numbers follow from the job's seed, the
step and the optimizer: they are also the same on any number of devices and after a resume, and the numbers of forward
passes stay as they are. PyTorch's own optimizers draw nothing: for them nothing is seeded. For others the host seeds
its generators, and that of its GPU, in every step; no device is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.part import Part, Turn


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

    def updating(self, turn: Turn) -> AbstractContextManager[None]:
        if self._is_torchs and not any(compat.hooks_of(self._optimizer).values()):
            return nullcontext()
        step, (before, count) = int(turn.step), self._newest
        self._newest = step, count + 1 if step == before else 0
        return randomness.preserved(self._device, randomness.mixed_seed(*self._seed, *self._newest))
