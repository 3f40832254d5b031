"""A copy of a model that is ready for steps: the trainer's objective, precision, memory format and optimizer."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.errors import BadSettings
from manyhands.training.loss import own_step
from manyhands.training.settings import Settings
from manyhands.training.torch import optimizers
from manyhands.training.torch.data.batches import Batch, cut, map_tensors, pick, rows
from manyhands.training.torch.data.samples import as_the_model
from manyhands.training.torch.job import Job, number_format_for
from manyhands.training.torch.objective import Objective, objective_for, placed
from manyhands.training.torch.preflight import checks, precision
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.number_format import NumberFormat
from manyhands.training.torch.step.several_optimizers import Several


@dataclass
class Subject:
    """A copy of the model, ready for steps."""

    model: torch.nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    number_format: NumberFormat
    device: torch.device
    gradients: GradientSum | None = None

    def begin(self) -> None:
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.begin()

    def forward(self, part: Batch) -> torch.Tensor:
        cast_batch = self.number_format.cast(part)
        with self.number_format.scope(self.device):
            loss, _ = self.objective(self.model, cast_batch)
        return loss

    def step(self, part: Batch) -> None:
        self.begin()
        self.forward(part).backward()
        self.optimizer.step()

    @contextlib.contextmanager
    def several(self, yes: bool) -> Iterator[None]:
        """Gradients as with several ranks: views of buckets."""
        self.gradients = GradientSum(self.model.parameters()) if yes else None
        try:
            yield
        finally:
            if self.gradients is not None:
                self.gradients.close()
            self.gradients = None
            self.optimizer.zero_grad(set_to_none=True)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def job_of(model: torch.nn.Module, loss: Any, optimizer: Any, settings: Settings) -> Job:
    """A job that trains a copy of the model; it has no data yet."""
    copies = checks.lazy_buffers(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        model, optimizer = copy.deepcopy((model, optimizer), copies)
    else:
        model = copy.deepcopy(model, copies)
    own_step.take_over_plots(model)
    nothing: Any = None
    make = optimizers.optimizer_for(model, optimizer, settings.lr)
    return Job(model, objective_for(model, loss), nothing, None, settings, make)


def subject_of(job: Job, device: torch.device) -> tuple[Subject, list[str]]:
    """The job's model on the device, and what is to be said of its precision."""
    model, objective, settings = job.model, job.objective, job.settings
    number_format = number_format_for(job, device)
    model.to(device).train()
    if settings.precision == "fp64":
        model.double()
    notes = []
    if settings.precision == "auto":
        choice = precision.choose(job, model, objective, World(0, 1, device), None)
        notes.append(f"{choice}.")
        number_format = precision.bf16_format(model) if choice.bf16 else number_format
    if number_format.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own_optimizer = job.make_optimizer(model).optimizer
    if isinstance(own_optimizer, Several):
        raise BadSettings(
            f"{type(model).__name__} has several optimizers, so a step is several passes: predict each model with its "
            "own optimizer"
        )
    job_state.settle(own_optimizer)
    return Subject(model, placed(objective, device, number_format.dtype), own_optimizer, number_format, device), notes


def shard_of(model: torch.nn.Module, batch: Batch, shard: int) -> Batch:
    """A shard where the model is, in memory of its own: a view would hold the whole batch's."""
    size = rows(batch)
    part = cut(batch, 0, shard) if shard <= size else pick(batch, [n % size for n in range(shard)])
    return as_the_model(model, map_tensors(torch.clone, part))
