"""Which precision ``precision="auto"`` is: decided by the hardware and the model, never by the clock.

============================================  =========
GPU with bfloat16                             bfloat16
CPU with AMX, wide layers of float32 weights  bfloat16
anything else                                 float32
============================================  =========

A CPU with AMX multiplies bfloat16 fast, but narrow layers lose more by casting than they win: a ResNet gains 1.5 to 2.6
times, a LeNet loses. AMX works on tiles of 32 numbers, so a layer counts as wide from 64 input and 64 output channels
on, and more than half of the convolutions and linear layers have to be wide. For example ResNet-18: 19 of 21, bfloat16;
LeNet: 2 of 5, float32.

All ranks compute alike: in bfloat16 only if each of them would. A resumed job keeps the precision of its checkpoint.
``config.json`` of the run says what was chosen, and why; a note of the result only where it is not the weights' own.

Some operations refuse bfloat16: ``out[rows] = layer(x)`` with an out of float32, Fourier transforms, binary
cross-entropy in a model's own step. On one device a first step that fails before its update is made again in float32.
With several ranks the others would wait for its gradients: there the error says to give ``precision="fp32"``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from manyhands import machine
from manyhands.backends.torch import compat
from manyhands.errors import ManyhandsError
from manyhands.training.torch.job import Job, NumberFormat
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.update import StepSnapshot

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank

CONTINUED = "as in the checkpoint that this job continues"
_WIDE = 64  # channels


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and the reason for it."""

    precision: str
    why: str

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    def __str__(self) -> str:
        return f"precision {self.precision}: {self.why}"


def choose(job: Job, model: torch.nn.Module, world: World, before: bool | None) -> PrecisionChoice:
    """The precision of all ranks for ``precision="auto"``; a collective.

    ``before``: whether a resumed job computed in bfloat16 (None: it is not resumed).
    """
    if before is not None:
        return PrecisionChoice("bf16" if before else _of_weights(model), CONTINUED)
    return agree(world.values(_of_this_rank(job, model, world.device)))


def agree(choices: Sequence[PrecisionChoice]) -> PrecisionChoice:
    """The precision that all ranks support: bfloat16 if each of them has chosen it."""
    return next((choice for choice in choices if not choice.bf16), choices[0])


def _of_this_rank(job: Job, model: torch.nn.Module, device: torch.device) -> PrecisionChoice:
    if job.settings.step.optimize == "off":
        return PrecisionChoice(_of_weights(model), "optimize='off'")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return PrecisionChoice("bf16", "the GPU has bfloat16")
        return PrecisionChoice(_of_weights(model), "the GPU has no bfloat16")
    return on_cpu(model, machine.host_features())


def on_cpu(model: torch.nn.Module, features: Collection[str]) -> PrecisionChoice:
    """The precision on a CPU with those features (:func:`manyhands.machine.host_features`)."""
    weights = _of_weights(model)
    if "amx_bf16" not in features:
        return PrecisionChoice(weights, "the CPU has no AMX")
    if weights != "fp32":
        return PrecisionChoice(weights, "the precision of the model's weights")
    sizes = [size for layer in model.modules() if (size := _channels(layer)) is not None]
    wide = sum(min(size) >= _WIDE for size in sizes)
    counted = f"{wide} of {len(sizes)} convolutions and linear layers have {_WIDE} channels or more"
    return PrecisionChoice("bf16" if 2 * wide > len(sizes) else "fp32", f"the CPU has AMX, and {counted}")


def _of_weights(model: torch.nn.Module) -> str:
    """The precision of a model without autocast."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if dtypes <= {torch.float32}:
        return "fp32"
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _channels(layer: torch.nn.Module) -> tuple[int, int] | None:
    """The input and output channels of a convolution or linear layer; None for other layers."""
    if isinstance(layer, compat.Convolution):
        return layer.in_channels // layer.groups, layer.out_channels // layer.groups
    return (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else None


def bf16_format(model: torch.nn.Module) -> NumberFormat:
    images = any(isinstance(layer, torch.nn.Conv2d) for layer in model.modules())
    return NumberFormat(torch.bfloat16, channels_last=images)


def _refusal(model: torch.nn.Module, error: Exception) -> PrecisionChoice:
    """Float32, because of an error in bfloat16."""
    why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return PrecisionChoice(_of_weights(model), f"the model cannot compute in bf16 ({why})")


class AutoPrecision:
    """The precision of a rank's steps, where the user leaves it to the trainer."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._note = ""  # of the rank's notes, the one that a later one replaces
        self._unproven = False
        self.half_before: bool | None = None  # whether a resumed job computed in bfloat16

    def choose(self) -> None:
        """The same on all ranks; a resumed job keeps its own."""
        rank = self._rank
        if rank.settings.precision != "auto":
            return
        choice = choose(rank.job, rank.model, rank.world, self.half_before)
        self._report(choice, as_a_note=choice.bf16)
        self._unproven = choice.bf16 and rank.size == 1
        if choice.bf16:
            wanted, number_format = bf16_format(rank.model), rank.number_format
            number_format.autocast, number_format.channels_last = wanted.autocast, wanted.channels_last
            if wanted.channels_last:
                rank.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                job_state.settle(rank.optimizer)

    def _report(self, choice: PrecisionChoice, *, as_a_note: bool) -> None:
        rank, before = self._rank, self._note
        self._note = str(choice) if as_a_note else ""
        rank.notes = [note for note in (self._note, *rank.notes) if note and note != before]
        rank.chosen_precision = choice.precision, choice.why

    def step(self, make: Callable[[], None], begin_again: Callable[[], None]) -> None:
        """Make a step; the first one in float32 if it fails in bfloat16, after ``begin_again()``."""
        if not self._unproven:
            make()
            return
        self._unproven = False
        rank = self._rank
        before, notes = StepSnapshot(rank.steps.plain), list(rank.notes)
        try:
            make()
        except (ManyhandsError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if before.has_updated:
                raise
            before.put_back()
            choice = _refusal(rank.model, error)
        else:
            return
        rank.notes, rank.number_format.autocast = notes, None
        begin_again()
        make()
        self._report(choice, as_a_note=True)
