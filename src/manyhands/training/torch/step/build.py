"""Puts the step of a rank together, from the settings of its job: the only place that knows all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from manyhands.errors import BadSettings
from manyhands.training.torch.data.batches import Batch, map_tensors
from manyhands.training.torch.data.sources import Stream
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.ranks.whole_batch import AllRanks, NotAnnounced
from manyhands.training.torch.step import activation_checkpoints
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.loss_scale import LossScale
from manyhands.training.torch.step.part import Part, TrainingStep
from manyhands.training.torch.step.plain import PlainStep
from manyhands.training.torch.step.several_optimizers import OwnUpdates
from manyhands.training.torch.step.update import Clip, StepUndo, UpdateDraws

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank


def build_step(rank: Rank) -> TrainingStep:
    """The step that the rank makes where no CUDA graph does."""
    of_batch = _parts_of_batch(rank)
    if not isinstance(rank.optimizer, Several):
        return _plain_step(rank, rank.optimizer, of_batch)
    if rank.replicas.sharded:
        raise BadSettings("Step(shard=True) with several optimizers: give one with several groups of parameters")
    steps = {
        key: _plain_step(rank, optimizer, [], number)
        for number, (key, optimizer) in enumerate(rank.optimizer.by_name.items())
    }

    def first_sample() -> Batch:
        return map_tensors(lambda tensor: tensor.to(rank.world.device), rank.data.few(1))

    return OwnUpdates(steps, rank.optimizer, of_batch, None if isinstance(rank.data, Stream) else first_sample)


def _parts_of_batch(rank: Rank) -> list[Part | None]:
    """The parts that act once in the step of a batch, in the order in which each moment calls them."""
    options, model = rank.settings.step, rank.model
    gathers = AllRanks(rank.rank) if rank.objective.rows is not None else NotAnnounced()
    return [
        gathers if rank.size > 1 else None,
        activation_checkpoints.of(model, options.activation_checkpointing, statistics=options.batch_stats),
        Average(model, rank.averaging) if rank.averaging is not None else None,
    ]


def _parts_of_update(
    rank: Rank, optimizer: torch.optim.Optimizer, of_batch: list[Part | None], number: int
) -> list[Part | None]:
    """The parts that act in each update of an optimizer; ``number``: which of several it is."""
    settings, device, fp16 = rank.settings, rank.world.device, rank.settings.precision == "fp16"
    undone = [part for part in of_batch if part is not None]
    takes_back = settings.step.on_nan == "continue" or fp16
    return [
        # Each rank updates other parts of sharded parameters: what it draws is its own.
        None if rank.replicas.sharded else UpdateDraws(optimizer, device, settings.seed, number),
        StepUndo(rank.model, optimizer, device, undone) if takes_back else None,
        LossScale(device, rank.metrics) if fp16 else None,
        Clip(settings.gradient_clip_val) if settings.gradient_clip_val else None,
    ]


def _plain_step(
    rank: Rank, optimizer: torch.optim.Optimizer, of_batch: list[Part | None], number: int = 0
) -> PlainStep:
    of_optimizer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = of_optimizer if isinstance(rank.optimizer, Several) else rank.model.parameters()
    return PlainStep(
        rank.model,
        optimizer,
        rank.objective,
        rank.metrics,
        rank.world.device,
        rank.number_format,
        [*of_batch, *_parts_of_update(rank, optimizer, of_batch, number)],
        gradients=rank.replicas.gradients(optimizer, parameters),
        accumulates=rank.settings.step.accumulate > 1,
        counts=number == 0,
    )
