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
cross-entropy in a model's own step. The error of such a job says to give ``precision="fp32"``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from manyhands import machine
from manyhands.backends.torch import compat
from manyhands.training.torch.job import Job, number_format_for
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank

CONTINUED = "as in the checkpoint that this job continues"
_WIDE = 64  # channels


Choice = tuple[str, str]  # a precision, and the reason for it


def choose(job: Job, model: torch.nn.Module, world: World, before: bool | None) -> Choice:
    """The precision of all ranks for ``precision="auto"``: bfloat16 if each of them chooses it; a collective.

    ``before``: whether a resumed job computed in bfloat16 (None: it is not resumed).
    """
    if before is not None:
        return "bf16" if before else _of_weights(model), CONTINUED
    choices = world.values(_of_this_rank(job, model, world.device))
    return next((choice for choice in choices if choice[0] != "bf16"), choices[0])


def _of_this_rank(job: Job, model: torch.nn.Module, device: torch.device) -> Choice:
    if job.settings.step.optimize == "off":
        return _of_weights(model), "optimize='off'"
    if device.type != "cuda":
        return on_cpu(model, machine.host_features())
    if torch.cuda.is_bf16_supported():
        return "bf16", "the GPU has bfloat16"
    return _of_weights(model), "the GPU has no bfloat16"


def on_cpu(model: torch.nn.Module, features: Collection[str]) -> Choice:
    """The precision on a CPU with those features (:func:`manyhands.machine.host_features`)."""
    weights = _of_weights(model)
    if "amx_bf16" not in features:
        return weights, "the CPU has no AMX"
    if weights != "fp32":
        return weights, "the precision of the model's weights"
    sizes = [size for layer in model.modules() if (size := _channels(layer)) is not None]
    wide = sum(min(size) >= _WIDE for size in sizes)
    counted = f"{wide} of {len(sizes)} convolutions and linear layers have {_WIDE} channels or more"
    return "bf16" if 2 * wide > len(sizes) else "fp32", f"the CPU has AMX, and {counted}"


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


def set_precision(rank: Rank, half_before: bool | None) -> None:
    """Where the user leaves it to the trainer, choose the precision of a rank's steps; a collective."""
    if rank.settings.precision != "auto":
        return
    precision, why = rank.chosen_precision = choose(rank.job, rank.model, rank.world, half_before)
    if precision != "bf16":
        return
    rank.notes.insert(0, f"precision {precision}: {why}")
    wanted = number_format_for(rank.job, rank.world.device, precision)
    rank.number_format.autocast = wanted.autocast
    if wanted.channels_last and not rank.sharded:
        rank.number_format.channels_last = True
        rank.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        job_state.settle(rank.optimizer)
