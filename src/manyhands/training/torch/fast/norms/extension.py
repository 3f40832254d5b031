"""Fused norms as an extension of a captured step: which layers of a model have kernels of our own, and their mode."""

from __future__ import annotations

import torch

from manyhands.backends.torch.kernels import batch_norm, group_norm
from manyhands.training.torch.fast.extension import Extension, Passes
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms, is_clean
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms
from manyhands.training.torch.fast.python_state import is_compiled
from manyhands.training.torch.ranks.global_batch_norm import normalises_batches
from manyhands.training.torch.step.plain import PlainStep


class FusedNorms(Extension):
    """Our kernels for BatchNorm, or for GroupNorm if the model has no BatchNorm."""

    is_mode = True
    without = "normalisation not fused"

    def __init__(self, step: PlainStep) -> None:
        """Raises ``CannotCompile`` where the kernels cannot be made."""
        self._step = step
        of_batches = normalises_batches(step.model)
        (batch_norm if of_batches else group_norm).ready(step.device)
        self._mode = FusedBatchNorms() if of_batches else FusedGroupNorms()

    def begin(self, passes: Passes) -> None:
        self._mode.begin(poison=passes.warm == 0)

    def forward(self, passes: Passes) -> FusedBatchNorms | FusedGroupNorms:
        return self._mode

    backward = forward

    def after_backward(self, passes: Passes, loss: torch.Tensor) -> None:
        if passes.warm != 0:
            return
        gradients = [parameter.grad for parameter in self._step.parameters if parameter.grad is not None]
        if not is_clean([loss.detach(), *gradients, *self._step.model.buffers()]):
            why = "the model's own, or something reads memory past PyTorch"
            raise RuntimeError(f"a loss, gradient or buffer is NaN: {why}")

    def explain(self, passes: Passes) -> str | None:
        return self._mode.explain() if self._mode.counts else None


def has_own_kernels(step: PlainStep) -> bool:
    """Whether we have kernels for the model's normalisation; our GroupNorm takes only 16-bit images."""
    model, number_format = step.model, step.number_format
    if is_compiled(model):
        return False
    has_images = number_format.autocast in group_norm.DTYPES and number_format.channels_last
    return normalises_batches(model) or (has_images and normalises_groups(model))


def normalises_groups(model: torch.nn.Module) -> bool:
    """Whether the model has a GroupNorm."""
    return any(isinstance(layer, torch.nn.GroupNorm) for layer in model.modules())
