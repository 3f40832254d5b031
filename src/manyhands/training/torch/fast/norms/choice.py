"""Which normalisation layers of a model have kernels of our own, and the mode that uses them."""

from __future__ import annotations

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.kernels import batch_norm, group_norm
from manyhands.training.torch.fast.capturable import is_compiled
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms
from manyhands.training.torch.step.eager import EagerStep


def fused_norms(eager: EagerStep) -> FusedBatchNorms | FusedGroupNorms | None:
    """Our kernels for BatchNorm, or for GroupNorm if the model has no BatchNorm; raises ``CannotCompile``."""
    if not has_own_kernels(eager) or is_compiled(eager.model):
        return None
    if normalises_batches(eager.model):
        batch_norm.ready(eager.device)
        return FusedBatchNorms()
    group_norm.ready(eager.device)
    return FusedGroupNorms()


def has_own_kernels(eager: EagerStep) -> bool:
    """Whether we have kernels for the model's normalisation; our GroupNorm takes only 16-bit images."""
    model, number_format = eager.model, eager.number_format
    has_images = number_format.autocast in group_norm.DTYPES and number_format.channels_last
    return normalises_batches(model) or (has_images and normalises_groups(model))


def normalises_batches(model: torch.nn.Module) -> bool:
    """Whether the model has a BatchNorm in training mode."""
    return any(isinstance(layer, compat.BatchNorm) and layer.training for layer in model.modules())


def normalises_groups(model: torch.nn.Module) -> bool:
    """Whether the model has a GroupNorm."""
    return any(isinstance(layer, torch.nn.GroupNorm) for layer in model.modules())
