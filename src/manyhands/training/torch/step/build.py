"""Builds the step of a rank: for one optimizer, for several, or for a model that makes its updates itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from manyhands.errors import BadSettings
from manyhands.training.torch.data.batches import Batch, map_tensors
from manyhands.training.torch.data.sources import Stream
from manyhands.training.torch.objective import Objective
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.ranks.sharding import ShardedGradients
from manyhands.training.torch.ranks.whole_batch import AllRanks
from manyhands.training.torch.step.eager import EagerStep
from manyhands.training.torch.step.own_updates import OwnUpdates
from manyhands.training.torch.step.several_optimizers import Several
from manyhands.training.torch.step.skip_nan import StepUndo
from manyhands.training.torch.step.update_draws import UpdateDraws

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank

PlainStep = EagerStep | OwnUpdates


def build_step(rank: Rank) -> PlainStep:
    """The step that the rank makes where no CUDA graph does."""
    optimizer, objective = rank.optimizer, rank.objective
    gathers = rank.size > 1 and objective.rows is not None
    rows = AllRanks(rank.rank) if gathers else None
    if not isinstance(optimizer, Several):
        return _eager_step(rank, optimizer, objective, rank.model.parameters(), rows)
    if rank.sharded:
        raise BadSettings(
            "Step(shard=True) with several optimizers: parameters are gathered for all at once. Leave shard out, or "
            "give one optimizer with several groups of parameters"
        )
    steps: dict[int | str, EagerStep] = {}
    for key, each in optimizer.by_name.items():
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        steps[key] = _eager_step(rank, each, objective, parameters, rows, number=len(steps))

    def first_sample() -> Batch:
        return map_tensors(lambda tensor: tensor.to(rank.world.device), rank.data.few(1))

    can_look = not isinstance(rank.data, Stream)
    return OwnUpdates(steps, optimizer, rank.model, rank.average, first_sample if can_look else None)


def _eager_step(
    rank: Rank,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    parameters: Iterable[torch.nn.Parameter],
    rows: AllRanks | None,
    number: int = 0,
) -> EagerStep:
    """The step of one optimizer; ``number``: which of several it is."""
    options, device = rank.settings.step, rank.world.device
    gradients: GradientSum | ShardedGradients | None = None
    if rank.sharded:
        gradients = ShardedGradients(rank.model, optimizer, device)
    elif rank.size > 1:
        gradients = GradientSum(parameters)
    takes_back = options.on_nan == "continue" or rank.scale is not None
    return EagerStep(
        rank.model,
        optimizer,
        objective,
        rank.metrics,
        device,
        rank.number_format,
        clip=rank.settings.gradient_clip_val,
        accumulate=options.accumulate,
        gradients=gradients,
        undo=StepUndo(rank.model, optimizer) if takes_back else None,
        scale=rank.scale,
        average=None if isinstance(rank.optimizer, Several) else rank.average,
        counts=number == 0,
        # Each rank updates other parts of sharded parameters: what it draws is its own.
        draws=None if rank.sharded else UpdateDraws(optimizer, device, rank.settings.seed, number),
        rows=rows,
    )
