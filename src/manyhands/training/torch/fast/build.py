"""Chooses the features of a job's fast step: from its options, its model and the number of its steps."""

from __future__ import annotations

import sys

from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.capturable import is_compiled
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.norms.choice import has_own_kernels
from manyhands.training.torch.step.activation_checkpoints import ActivationCheckpoints
from manyhands.training.torch.step.eager import EagerStep

_LEAST_STEPS_TO_COMPILE = 5_000  # with fewer no net that we know wins back the compiler's time
_LEAST_STEPS_TO_PLAN = 20_000  # planning takes 1 to 8 seconds, and saves some tenths of a millisecond a step


def fast_step(
    eager: EagerStep,
    data: Arrays,
    settings: Settings,
    *,
    changing_rate: bool,
    checkpointed: ActivationCheckpoints | None = None,
) -> GraphStep:
    """The fast step of a job; compiled if the user asks for it, or if compiling is likely to pay off.

    Where we have kernels for normalisation it does not: they were 5% (ResNet-18) to 30% (GroupNorm) faster.
    """
    batches = min(data.count // settings.batch_size, settings.limits.batches or data.count)
    steps = min(settings.max_epochs * batches, settings.limits.max_steps or sys.maxsize)
    compiled, parallel = settings.step.compile, settings.step.parallel
    # With a loss scale gradients may be infinite, and the check for NaN would blame our kernels.
    norms = settings.step.fused_norms and has_own_kernels(eager) and eager.scale is None
    if compiled is None and (parallel or norms or steps < _LEAST_STEPS_TO_COMPILE or is_compiled(eager.model)):
        compiled = False
    if parallel is None:
        parallel = steps >= _LEAST_STEPS_TO_PLAN and not compiled and not has_own_kernels(eager) and eager.undo is None
    lanes = settings.step.side_lanes
    # A plan has PyTorch's convolutions, and takes turns with the captured step: both must give the same bits.
    is_planned = settings.step.parallel and not norms and eager.undo is None
    tuned = settings.step.tuned_convolutions and not is_planned
    if checkpointed is not None:  # the backward pass recomputes the forward pass, which none of these supports
        compiled = parallel = lanes = norms = tuned = False
    return GraphStep(
        eager,
        data,
        settings.batch_size,
        steps,
        compiled=compiled,
        changing_rate=changing_rate,
        side_lanes=lanes,
        fused_norms=norms,
        parallel=parallel,
        tuned_convolutions=tuned,
        checkpointed=checkpointed,
    )
