"""The random numbers of an update: the same on every rank, so that replicas stay equal.

Ranks draw different numbers in forward passes, for dropout. An optimizer that draws (SGLD), or a hook of it (the noise
of DP-SGD), has to draw the same everywhere. Its numbers follow from the job's seed, the step and the optimizer, so they
are also the same on any number of devices, and after a resume, and the numbers of forward passes stay as they are.

PyTorch's own optimizers draw nothing: for them nothing is seeded. For others the host seeds its generators, and that of
its GPU, in every step; no device is waited for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.state import randomness


class UpdateDraws:
    """Where the updates of one optimizer draw their random numbers from."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, seed: int, number: int) -> None:
        """``number``: that of the optimizer, where a job has several."""
        self._optimizer, self._device, self._seed = optimizer, device, (seed, number)
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._newest = (-1, 0)  # the step of the newest update, and how many it had before

    def of(self, step: int) -> AbstractContextManager[None]:
        """Within it, the next update of this step draws its numbers."""
        if self._is_torchs and not any(compat.hooks_of(self._optimizer).values()):
            return nullcontext()
        before, count = self._newest
        self._newest = step, count + 1 if step == before else 0
        return randomness.preserved(self._device, randomness.mixed_seed(*self._seed, *self._newest))
