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
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.loss.own_step import LossSum
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors, tensors_in
from manyhands.training.torch.objective import Objective, OwnStep, Supervised
from manyhands.training.torch.ranks.gradient_sum import Gradients, LocalGradients
from manyhands.training.torch.state.module_state import statistics_kept
from manyhands.training.torch.step.number_format import NumberFormat
from manyhands.training.torch.step.part import Part, Step, Turn
from manyhands.training.torch.step.running_sums import RunningSums


class PlainStep(Step):
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
        self._after_backward = self.acting("after_backward")
        self.objective, self.gradients = objective, gradients or LocalGradients(optimizer)
        self._several_ranks = self.gradients.loss_mark is not None
        _check_optimizer(optimizer, several=self._several_ranks)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._in_parts, self._counts = self._several_ranks or accumulates, counts
        # For a step of the model's own, with which a rank without samples takes part; it counts nothing.
        self._sample: Batch | None = None

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        """Process this rank's shard of a batch of ``whole`` samples; ``batch_idx`` is its number in the epoch."""
        self.objective.batch_idx = batch_idx
        turn = Turn(step, whole, shard)
        self.begin(turn)
        if self._in_parts and self.objective.sums is True:
            self._passes_in_sums(turn)
        else:
            self._passes(turn)
            self.finish(turn)
        self.after_backward(turn)
        with self.updating(turn):
            self.update(turn)

    def begin(self, turn: Turn) -> None:
        super().begin(turn)
        self.gradients.begin()

    def finish(self, turn: Turn) -> None:
        """The passes are over: the gradients of all ranks become one."""
        self.gradients.finish()
        turn.marks += self.gradients.marks()
        if self.gradients.loss_mark is not None:
            self.metrics.mark(self.gradients.loss_mark, turn.step)

    def after_backward(self, turn: Turn) -> None:
        for after_backward in self._after_backward:
            after_backward(turn, self.parameters)

    def update(self, turn: Turn) -> None:
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

    def _passes(self, turn: Turn) -> None:
        """Forward and backward of each part of the shard, whose loss is a mean over samples."""
        for part, size, last in self._shard_parts(turn):
            self.gradients.arm(last)
            with self.forward():
                loss, correct = self._loss(part, size)
            self.gradients.note_loss(loss)
            self.scaled(loss * (size / turn.whole)).backward()
            if size:
                self.metrics.add(loss, correct, size, turn.step, counted=self._counts)

    def _passes_in_sums(self, turn: Turn) -> None:
        """The same where the loss is a sum and a count: sums now, the division when all counts are known.

        Both are taken as parts of the batch's samples: gradients of a whole sum would be too large for float16.
        """
        sums: list[tuple[LossSum, torch.Tensor | None, int]] = []  # of each part, and its correct predictions and size
        for part, size, last in self._shard_parts(turn):
            self.gradients.arm(last)
            with self.forward():
                if size:
                    both, correct = self.objective.in_parts(self.model, part)
                else:
                    total, correct = self._loss(part, 0)
                    both = LossSum(total, self._no_count())
            sums.append((LossSum(both.total.detach(), both.count), correct, size))
            self.gradients.note_loss(both.total)
            if last:
                self.gradients.sum_weight(torch.stack([both.count for both, _, _ in sums]).sum() / turn.whole)
            self.scaled(both.total / turn.whole).backward()
        if not sums:
            self.gradients.sum_weight(self._no_count())
        self.finish(turn)
        count = self.gradients.divide() * turn.whole
        turn.marks.append(1 / count)
        self.metrics.mark(1 / count, turn.step)  # of a batch in which nothing counts there is no mean
        for both, correct, size in sums:
            if size:
                weight = turn.whole / size
                self.metrics.add(both.total / count, correct, size, turn.step, weight=weight, counted=self._counts)

    def _shard_parts(self, turn: Turn) -> Iterator[tuple[Batch, int, bool]]:
        """Each micro-batch of the shard in the model's format, its size, and whether it is the last."""
        shard = turn.shard
        if shard is None:
            return
        if self._needs_sample and shard.sizes[0] and self._sample is None:
            self._sample = map_tensors(torch.clone, cut(shard.parts[0], 0, 1))
        for number, (batch, size) in enumerate(zip(shard.parts, shard.sizes, strict=True)):
            yield self.number_format.cast(batch), size, number == len(shard.parts) - 1

    @property
    def _needs_sample(self) -> bool:
        gathers = self.objective.rows is not None and self._several_ranks
        return gathers or (self.gradients.every_rank and isinstance(self.objective, OwnStep))

    def _no_count(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _loss(self, part: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if size:
            return self.objective(self.model, part, part=self._in_parts)
        # BatchNorm refuses an empty batch, unless its statistics are global. All else does as on the other ranks.
        gathers = self.objective.rows is not None
        alone = self.gradients.every_rank or gathers
        with statistics_kept(self.model) if alone else contextlib.nullcontext():
            if self._sample is not None:
                value = self.objective.value(self.model, self.number_format.cast(self._sample))[0]
                return (value.total if isinstance(value, LossSum) else value) * 0, None
            if gathers:
                raise BadSettings(
                    "the loss, or what the forward pass changes, needs every device, and one has had no samples yet: "
                    "give larger batches, or fewer devices"
                )
            output = self._empty_output(part)
        return torch.stack([tensor.sum() * 0 for tensor in tensors_in(output)]).sum(), None

    def _empty_output(self, part: Batch) -> Any:
        """The output for a shard without samples, so that the rank takes part in the collectives of the layers."""
        if isinstance(part, Mapping) and isinstance(self.objective, Supervised):
            return dict_batches.output_of(self.model, part)
        if isinstance(part, (tuple, list)):
            return self.model(*part[:-1])
        raise BadBatch(
            "every rank has to take part in every layer, also one without samples (batch_stats='global', shard=True), "
            f"and the trainer cannot tell what of {type_in_words(part)} the model's inputs are: give batches "
            "(inputs, target)"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, *, several: bool) -> None:
    """Refuse an optimizer that wants another kind of step than this one."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise BadSettings(
            f"{name} works out the loss several times within one step (its step wants a closure), and a step of the "
            "trainer is one forward and one backward pass: give an optimizer such as SGD or AdamW, or write the loop "
            f"for {name} by hand"
        )
    if several and isinstance(optimizer, torch.optim.SparseAdam):
        raise BadSettings(
            "SparseAdam takes sparse gradients only, and those that are summed over several devices are dense: give "
            "Adam, or train on one device"
        )
