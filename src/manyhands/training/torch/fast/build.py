"""Puts the captured step of a rank together: which steps can be captured, and what acts on their passes.

Each extension is one line in :func:`_extensions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from manyhands.backends.torch.kernels import batch_norm, group_norm
from manyhands.errors import CannotCompile
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.captured_step import CapturedStep
from manyhands.training.torch.fast.extension import Extension, Passes
from manyhands.training.torch.fast.inputs import LoaderInputs, ResidentInputs, StepInputs
from manyhands.training.torch.fast.lanes.eager import StepLanes
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms, is_clean
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms
from manyhands.training.torch.fast.python_state import is_compiled
from manyhands.training.torch.fast.recorder import CudaRecorder, stream_of
from manyhands.training.torch.fast.redundant_biases import Biases, may_have_redundant_biases
from manyhands.training.torch.fast.small_kernels import SmallKernels
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.ranks.global_batch_norm import normalises_batches
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.part import TrainingStep
from manyhands.training.torch.step.plain import PlainStep

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank

_USED = frozenset({"side lanes", "fused norms", "redundant biases", "small kernels"})


@contextlib.contextmanager
def without(*extensions: str) -> Iterator[None]:
    """Within it jobs do without these extensions: for benchmarks of what each one gains, and for tests."""
    global _USED
    before, _USED = _USED, _USED - set(extensions)
    try:
        yield
    finally:
        _USED = before


def why_not(rank: Rank) -> str | None:
    """The reason why no step of this job can be captured; None if it may be."""
    several, optimizer = rank.size > 1, rank.optimizer
    if several and (rank.sharded or rank.objective.rows is not None or rank.settings.step.batch_stats == "global"):
        return "the forward pass waits for other ranks (shard, batch_stats='global', a loss of the whole batch)"
    if several and isinstance(optimizer, Several):
        return "each of several optimizers sums its gradients over the devices within training_step"
    for each in optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]:
        if not ("capturable" in each.defaults or type(each) is torch.optim.SGD):
            return f"{type(each).__name__} reads its state on the host in every step (it is not capturable)"
    return rank.scheduler.why_not_captured if rank.scheduler is not None else None


def step_of_rank(rank: Rank, recorder: CudaRecorder) -> CapturedStep:
    """The captured step of a job; compiled if the user asks for it."""
    step, settings = rank.steps.plain, rank.settings
    for optimizer in step.optimizer.optimizers if isinstance(step.optimizer, Several) else [step.optimizer]:
        _make_capturable(optimizer, step.device, changing_rate=bool(rank.job.schedule or rank.scheduler))
    if rank.size == 1 and settings.step.accumulate > 1:  # its segments share the gradients
        step.gradients.close()
        step.gradients = GradientSum(rank.model.parameters(), alone=True)
    inputs: StepInputs = LoaderInputs()
    if isinstance(rank.data, Arrays) and rank.data.tensors[0].device == step.device:
        inputs = ResidentInputs(rank.data, step.device, rank.feed.division.spans)
    usual_size = -(-settings.batch_size // (rank.size * settings.step.accumulate))
    return captured_step(step, inputs, recorder, usual_size, compiled=settings.step.optimize == "max")


def captured_step(
    step: TrainingStep, inputs: StepInputs, recorder: CudaRecorder, usual_size: int, *, compiled: bool = False
) -> CapturedStep:
    """A captured step with all extensions that it supports."""
    if not isinstance(step, PlainStep) or any(part.recomputes for part in step.parts):
        return CapturedStep(step, inputs, recorder, usual_size)
    extensions, reasons = _extensions(step)
    lanes = _side_lanes(step)
    return CapturedStep(step, inputs, recorder, usual_size, extensions, lanes=lanes, compiled=compiled, reasons=reasons)


def _side_lanes(step: PlainStep) -> StepLanes | None:
    if "side lanes" not in _USED or step.device.type != "cuda":
        return None
    # They may hold as much memory as two copies of the gradients; DistributedDataParallel's buckets take one.
    trained = [parameter for parameter in step.parameters if parameter.requires_grad]
    held = 2 * sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return StepLanes.on_streams(step.device, stream_of(step.device), max_held=held)


def _extensions(step: PlainStep) -> tuple[list[Extension], list[str]]:
    """What acts on the passes, in order; and why something does not."""
    extensions: list[Extension] = []
    reasons: list[str] = []
    if "redundant biases" in _USED and may_have_redundant_biases(step.model, step.optimizer):
        extensions.append(Biases(step.model, step.gradients))
    # A compiler compiles nothing that is called inside a dispatch mode, not even at later calls.
    if "small kernels" in _USED and not is_compiled(step.model):
        extensions.append(SmallKernels(step.model))
    # With a loss scale gradients may be infinite, and the check for NaN would blame our kernels.
    scaled = any(part.scales_loss for part in step.parts)
    if "fused norms" in _USED and has_own_kernels(step) and not scaled:
        try:
            extensions.append(FusedNorms(step))
        except CannotCompile as error:
            reasons.append(f"{FusedNorms.without} ({error})")
    return extensions, reasons


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, changing_rate: bool) -> None:
    """Prepare an optimizer for capture: values that change from step to step become tensors on the device."""
    for group in optimizer.param_groups:
        if type(optimizer) is torch.optim.SGD:
            group["fused"], group["foreach"] = True, False
        if changing_rate and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)
    job_state.count_on_device(optimizer)


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
