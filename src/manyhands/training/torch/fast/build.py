"""Chooses the features of a job's fast step: from its options, its model and the number of its steps."""

from __future__ import annotations

import sys

from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.norms.choice import has_own_kernels
from manyhands.training.torch.step.activation_checkpoints import ActivationCheckpoints
from manyhands.training.torch.step.eager import EagerStep


def fast_step(
    eager: EagerStep,
    data: Arrays,
    settings: Settings,
    *,
    changing_rate: bool,
    checkpointed: ActivationCheckpoints | None = None,
) -> GraphStep:
    """The fast step of a job; compiled if the user asks for it."""
    batches = min(data.count // settings.batch_size, settings.limits.batches or data.count)
    steps = min(settings.max_epochs * batches, settings.limits.max_steps or sys.maxsize)
    # With a loss scale gradients may be infinite, and the check for NaN would blame our kernels.
    norms = settings.step.fused_norms and has_own_kernels(eager) and eager.scale is None
    lanes = settings.step.side_lanes
    compiled, tuned = settings.step.compile, settings.step.tuned_convolutions
    if checkpointed is not None:  # the backward pass recomputes the forward pass, which none of these supports
        compiled = lanes = norms = tuned = False
    return GraphStep(
        eager,
        data,
        settings.batch_size,
        steps,
        compiled=compiled,
        changing_rate=changing_rate,
        side_lanes=lanes,
        fused_norms=norms,
        tuned_convolutions=tuned,
        checkpointed=checkpointed,
    )
