"""Chooses the features of a job's fast step: from its options and its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.norms.choice import has_own_kernels
from manyhands.training.torch.step.activation_checkpoints import ActivationCheckpoints
from manyhands.training.torch.step.eager import EagerStep

_EXTENSIONS = frozenset({"side lanes", "fused norms"})


@contextlib.contextmanager
def without(*extensions: str) -> Iterator[None]:
    """Within it jobs do without these extensions: for benchmarks of what each one gains, and for tests."""
    global _EXTENSIONS
    before, _EXTENSIONS = _EXTENSIONS, _EXTENSIONS - set(extensions)
    try:
        yield
    finally:
        _EXTENSIONS = before


def fast_step(
    eager: EagerStep,
    data: Arrays,
    settings: Settings,
    *,
    changing_rate: bool,
    checkpointed: ActivationCheckpoints | None = None,
) -> GraphStep:
    """The fast step of a job; compiled if the user asks for it."""
    # With a loss scale gradients may be infinite, and the check for NaN would blame our kernels.
    norms = "fused norms" in _EXTENSIONS and has_own_kernels(eager) and eager.scale is None
    lanes, compiled = "side lanes" in _EXTENSIONS, settings.step.optimize == "max"
    if checkpointed is not None:  # the backward pass recomputes the forward pass, which none of these supports
        compiled = lanes = norms = False
    return GraphStep(
        eager,
        data,
        settings.batch_size,
        compiled=compiled,
        changing_rate=changing_rate,
        side_lanes=lanes,
        fused_norms=norms,
        checkpointed=checkpointed,
    )
