"""One plain training step: forward, backward, sum over the ranks, update. Exact on any number of ranks.

The loss of a shard is a mean over its samples. Weighted by (samples of the shard) / (samples of the batch) and
summed over the ranks it is the mean over the batch, and so are the gradients. A loss whose divisor is not the
number of samples (:class:`LossSum`) comes in parts: sums first, divided by the counts of the whole batch at the end.
Nothing here makes the host wait. All features are parts (:mod:`.part`), called at their moments.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.loss.own_step import LossSum
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors, tensors_in
from manyhands.training.torch.job import NumberFormat
from manyhands.training.torch.objective import Objective, OwnStep, Supervised
from manyhands.training.torch.ranks.gradient_sum import Gradients, LocalGradients
from manyhands.training.torch.state.module_state import statistics_kept
from manyhands.training.torch.step import logged
from manyhands.training.torch.step.part import LossOf, Part, TrainingStep, Turn
from manyhands.training.torch.step.running_sums import RunningSums


class PlainStep(TrainingStep):
    """The step of one optimizer: passes over a shard, and one update."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        metrics: RunningSums,
        device: torch.device,
        number_format: NumberFormat,
        parts: Sequence[Part | None] = (),
        *,
        gradients: Gradients | None = None,
        accumulates: bool = False,
        counts: bool = True,
    ) -> None:
        """``counts``: its samples count; of several optimizers' steps those of the first do."""
        super().__init__(model, optimizer, metrics, device, number_format, parts)
        self._after_backward = self.parts_with("after_backward")
        self.objective, self.gradients = objective, gradients or LocalGradients(optimizer)
        self._several_ranks = self.gradients.loss_mark is not None
        _check_optimizer(optimizer)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._in_parts, self._counts = self._several_ranks or accumulates, counts
        self._in_sums = self._in_parts and objective.sums is True
        self._total, self._count = self._no_count(), self._no_count()  # of the batch so far, where losses are sums
        # For a step of the model's own, with which a rank without samples takes part; it counts nothing.
        self._sample: Batch | None = None

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        """Process this rank's shard of a batch of ``whole`` samples; ``batch_idx`` is its number in the epoch."""
        self.objective.batch_idx = batch_idx
        turn = Turn(step, whole, shard)
        self.begin(turn)
        for batch, size, last in self._shard_parts(turn):
            self.passes(turn, batch, size, last=last)
        self.sum_up(turn)
        self.update(turn)

    def begin(self, turn: Turn) -> None:
        super().begin(turn)
        self.gradients.begin()
        if self._in_sums:
            self._total.zero_()
            self._count.zero_()

    def passes(
        self,
        turn: Turn,
        batch: Batch,
        size: int,
        *,
        last: bool,
        loss_of: LossOf | None = None,
        around_backward: AbstractContextManager[Any] | None = None,
    ) -> torch.Tensor:
        """``last``: no other micro-batch comes after it.

        A captured step has a function of its own for the loss, and acts around the backward pass.
        """
        self.gradients.arm(last)
        with logged.collect() as values:
            loss, count, correct = (loss_of or self.loss_of)(batch, size)
        self.gradients.note_loss(loss)
        # A sum is taken as a part of the batch's samples, too: gradients of a whole sum would be too large for float16.
        share = loss * (size / turn.whole) if count is None else loss / turn.whole
        with around_backward or contextlib.nullcontext():
            self.scale_loss(share).backward()
        if count is None:
            if size:
                self.metrics.add(loss, correct, size, turn.step, counted=self._counts)
        else:
            self._total += loss.detach()
            self._count += count
            self.metrics.count(correct, size, counted=self._counts)
        self.metrics.log(values, size)
        return loss

    def loss_of(self, batch: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        batch = self.number_format.cast(batch)
        with self.forward():
            if not size:
                loss, correct = self._loss_of_none(batch)
                return loss, self._no_count() if self._in_sums else None, correct
            if self._in_sums:
                both, correct = self.objective.in_parts(self.model, batch)
                return both.total, both.count, correct
            loss, correct = self.objective(self.model, batch, part=self._in_parts)
            return loss, None, correct

    def sum_up(self, turn: Turn) -> None:
        self.gradients.sum_up(self._count / turn.whole if self._in_sums else None)

    def update(self, turn: Turn) -> None:
        turn.marks += self.gradients.marks()
        if self.gradients.loss_mark is not None:
            self.metrics.mark(self.gradients.loss_mark, turn.step)
        if self._in_sums:  # divided only now: the count is that of the whole batch
            count = self.gradients.divide() * turn.whole
            turn.marks.append(1 / count)
            self.metrics.mark(1 / count, turn.step)  # of a batch in which nothing counts there is no mean
            self.metrics.add_loss(self._total / count * turn.whole, turn.step)
        self.apply(turn)

    def apply(self, turn: Turn) -> None:
        """Clip the gradients, and update the weights."""
        for after_backward in self._after_backward:
            after_backward(turn, self.parameters)
        with self.around_update(turn):
            self.optimizer.step()
            self.after_update(turn)

    def close(self) -> list[str]:
        self.gradients.close()
        return super().close()

    def versions(self) -> list[int]:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        written: list[Any] = [*self.parameters, *(value for value in state if isinstance(value, torch.Tensor))]
        return [compat.write_count(tensor) for tensor in written]

    # Passes

    def _shard_parts(self, turn: Turn) -> Iterator[tuple[Batch, int, bool]]:
        """Each micro-batch of the shard in the model's format, its size, and whether it is the last."""
        shard = turn.shard
        if shard is None:
            return
        if self._needs_sample and shard.sizes[0] and self._sample is None:
            self._sample = map_tensors(torch.clone, cut(shard.parts[0], 0, 1))
        for number, (batch, size) in enumerate(zip(shard.parts, shard.sizes, strict=True)):
            yield batch, size, number == len(shard.parts) - 1

    @property
    def _needs_sample(self) -> bool:
        gathers = self.objective.rows is not None and self._several_ranks
        return gathers or (self.gradients.every_rank and isinstance(self.objective, OwnStep))

    def _no_count(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _loss_of_none(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Zero, for a micro-batch without samples: the rank takes part in what all ranks do."""
        # BatchNorm refuses an empty batch, unless its statistics are global. All else does as on the other ranks.
        gathers = self.objective.rows is not None
        alone = self.gradients.every_rank or gathers
        with statistics_kept(self.model) if alone else contextlib.nullcontext():
            if self._sample is not None:
                value = self.objective.value(self.model, self.number_format.cast(self._sample))[0]
                return (value.total if isinstance(value, LossSum) else value) * 0, None
            if gathers:
                raise BadSettings("one device has had no samples yet, and all are needed: give larger batches")
            output = self._empty_output(part)
        return torch.stack([tensor.sum() * 0 for tensor in tensors_in(output)]).sum(), None

    def _empty_output(self, part: Batch) -> Any:
        """The output for a shard without samples, so that the rank takes part in the collectives of the layers."""
        if isinstance(part, Mapping) and isinstance(self.objective, Supervised):
            return dict_batches.output_of(self.model, part)
        if isinstance(part, (tuple, list)):
            return self.model(*part[:-1])
        raise BadBatch(
            "every rank has to take part in every layer, also one without samples, and the trainer cannot tell what of "
            f"{type_in_words(part)} the model's inputs are: give batches (inputs, target)"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that wants another kind of step than this one."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise BadSettings(f"{name} works out the loss several times within one step: give another, as SGD or AdamW")
