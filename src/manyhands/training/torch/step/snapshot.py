"""What a step changes before its update, to make a step again that failed before it.

A model that makes its updates itself may fail between two of them: of its steps the weights are copied, too.
"""

from __future__ import annotations

import torch

from manyhands.training.torch.state import job_state, randomness
from manyhands.training.torch.step.part import Step


class StepSnapshot:
    """Copies of statistics, metrics and random numbers, from before a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._versions = step.versions()
        self._had_state = set(step.optimizer.state)
        self._copies = [tensor.clone() for tensor in self._tensors()]
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
