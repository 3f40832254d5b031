"""Puts the captured step of a job together: which steps can be captured, and what acts on their passes.

Each extension is one line in :func:`_extensions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from manyhands.errors import CannotCompile
from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays, Source
from manyhands.training.torch.fast.batched_casts import Casts
from manyhands.training.torch.fast.batches import ResidentBatches
from manyhands.training.torch.fast.capture_stream import stream_of
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.extension import Extension
from manyhands.training.torch.fast.lanes.lanes import StepLanes
from manyhands.training.torch.fast.norms.extension import FusedNorms, has_own_kernels
from manyhands.training.torch.fast.python_state import is_compiled
from manyhands.training.torch.fast.redundant_biases import Biases, may_have_redundant_biases
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.part import Step
from manyhands.training.torch.step.plain import PlainStep

_USED = frozenset({"side lanes", "fused norms"})


@contextlib.contextmanager
def without(*extensions: str) -> Iterator[None]:
    """Within it jobs do without these extensions: for benchmarks of what each one gains, and for tests."""
    global _USED
    before, _USED = _USED, _USED - set(extensions)
    try:
        yield
    finally:
        _USED = before


def why_not(data: Source, optimizer: torch.optim.Optimizer, world: World, accumulate: int) -> str | None:
    """The reason why a step cannot be captured in one graph; None if it can."""
    if world.size > 1:
        return "several ranks: gradients cross processes during the step"
    if accumulate > 1:
        return "gradient accumulation"
    if not isinstance(data, Arrays) or data.tensors[0].device != world.device:
        return "the data are not on the GPU: they come from a loader or do not fit"
    if isinstance(optimizer, Several):
        return "several optimizers, each with its own step"
    if not ("capturable" in optimizer.defaults or _is_sgd(optimizer)):
        return f"{type(optimizer).__name__} reads its state on the host in every step (it is not capturable)"
    return None


def fast_step(step: Step, data: Source, settings: Settings, *, changing_rate: bool) -> GraphStep:
    """The captured step of a job; compiled if the user asks for it."""
    assert isinstance(step, PlainStep)
    assert isinstance(data, Arrays)
    _make_capturable(step.optimizer, step.device, changing_rate=changing_rate)
    return captured_step(
        step,
        data,
        settings.batch_size,
        compiled=settings.step.optimize == "max",
        side_lanes="side lanes" in _USED,
        # With a loss scale gradients may be infinite, and the check for NaN would blame our kernels.
        fused_norms="fused norms" in _USED and not any(part.scales_loss for part in step.parts),
    )


def captured_step(
    step: PlainStep,
    data: Arrays,
    size: int,
    *,
    compiled: bool = False,
    side_lanes: StepLanes | bool = False,
    fused_norms: bool = False,
) -> GraphStep:
    """A captured step over data on the device, in batches of ``size``."""
    batches = ResidentBatches(data, step.device)
    if any(part.recomputes for part in step.parts):  # which none of these supports
        return GraphStep(step, batches, size, [])
    if side_lanes is True:
        # They may hold as much memory as two copies of the gradients; DistributedDataParallel's buckets take one.
        trained = [parameter for parameter in step.parameters if parameter.requires_grad]
        held = 2 * sum(parameter.numel() * parameter.element_size() for parameter in trained)
        side_lanes = StepLanes.on_streams(step.device, stream_of(step.device), max_held=held)
    extensions, reasons = _extensions(step, fused_norms=fused_norms)
    return GraphStep(step, batches, size, extensions, lanes=side_lanes or None, compiled=compiled, reasons=reasons)


def _extensions(step: PlainStep, *, fused_norms: bool) -> tuple[list[Extension], dict[str, str]]:
    """What acts on the passes, in order; and why something does not."""
    extensions: list[Extension] = []
    reasons: dict[str, str] = {}
    if may_have_redundant_biases(step.model, step.optimizer):
        extensions.append(Biases(step.model))
    # A compiler compiles nothing that is called inside a dispatch mode, not even at later calls.
    if not is_compiled(step.model):
        extensions.append(Casts())
    if fused_norms and has_own_kernels(step):
        try:
            extensions.append(FusedNorms(step))
        except CannotCompile as error:
            reasons["norms"] = f"{FusedNorms.without} ({error})"
    return extensions, reasons


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, changing_rate: bool) -> None:
    """Prepare an optimizer for capture: values that change from step to step become tensors on the device."""
    for group in optimizer.param_groups:
        if _is_sgd(optimizer):
            group["fused"], group["foreach"] = True, False
        if changing_rate and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)
    job_state.count_on_device(optimizer)


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD
