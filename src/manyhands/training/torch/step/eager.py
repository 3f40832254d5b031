"""One plain training step: forward, backward, sum over the ranks, clip, update. Exact on any number of ranks.

The loss of a shard is a mean over its samples. Weighted by (samples of the shard) / (samples of the batch) and
summed over the ranks it is the mean over the batch, and so are the gradients. A loss whose divisor is not the
number of samples (:class:`LossSum`) comes in parts: sums first, divided by the counts of the whole batch at the end.
Nothing here makes the host wait.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.loss.own_step import LossSum
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors, tensors_in
from manyhands.training.torch.objective import Objective, OwnStep, Supervised
from manyhands.training.torch.ranks import whole_batch
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.ranks.sharding import ShardedGradients
from manyhands.training.torch.state.module_state import statistics_kept
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.loss_scale import LossScale
from manyhands.training.torch.step.number_format import NumberFormat
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.skip_nan import StepUndo
from manyhands.training.torch.step.update_draws import UpdateDraws


class EagerStep:
    """Forward, backward, sum over the ranks, clip, update."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        metrics: RunningSums,
        device: torch.device,
        number_format: NumberFormat,
        *,
        clip: float = 0.0,
        accumulate: int = 1,
        gradients: GradientSum | ShardedGradients | None = None,
        undo: StepUndo | None = None,
        average: Average | None = None,
        counts: bool = True,
        scale: LossScale | None = None,
        draws: UpdateDraws | None = None,
        rows: whole_batch.AllRanks | None = None,
    ) -> None:
        _check_optimizer(optimizer, several=gradients is not None)
        self.model, self.optimizer, self.objective, self.metrics = model, optimizer, objective, metrics
        self.device, self.number_format = device, number_format
        self.clip, self.accumulate, self.gradients = clip, accumulate, gradients
        self.undo, self.average = undo, average
        self.scale = scale  # with float16; ``undo`` then takes updates back
        self._draws = draws
        self._rows = rows  # gathered from all ranks, for a loss that needs the whole batch
        self._counts = counts  # whether this step counts its samples: of several optimizers' steps the first does
        self._losses: list[torch.Tensor] = []
        # For a step of the model's own, with which a rank without samples takes part; it counts nothing.
        self._sample: Batch | None = None
        # The sum and count of each part, its correct predictions and its samples.
        self._sums: list[tuple[LossSum, torch.Tensor | None, int]] = []
        self.in_parts = gradients is not None or accumulate > 1
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        """Process this rank's shard of a batch of ``whole`` samples; ``batch_idx`` is its number in the epoch."""
        self.objective.batch_idx = batch_idx
        in_sums = self.in_parts and self.objective.sums is True
        self._sums, self._losses = [], []
        if self.undo is not None:
            self.undo.keep(self.average)
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.begin()
        if shard is not None:
            self._work(shard, whole, step, in_sums=in_sums)
        if self.gradients is not None:
            if in_sums and shard is None:
                self.gradients.sum_weight(self._no_count())
            self.gradients.finish()
            self.metrics.mark(self.gradients.loss_mark, step)
        if in_sums:
            self._divide(whole, step)
        self.prepare_gradients()
        marks = self._losses if self.gradients is None else [*self._losses, self.gradients.loss_mark]
        with self.drawing(step):
            self.update(marks, step)

    def drawing(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Within it, the optimizer draws the random numbers of the step's next update."""
        return contextlib.nullcontext() if self._draws is None else self._draws.of(step)

    def prepare_gradients(self) -> None:
        """Unscale the gradients, then clip them."""
        if self.scale is not None:
            self.scale.unscale(self.parameters)
        self.clip_gradients()

    def update(self, losses: Sequence[torch.Tensor], step: torch.Tensor | int) -> None:
        """Update the weights; where ``undo`` is there, take it back if a loss (in fp16 a gradient) is not finite."""
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        if self.undo is not None:
            good = torch.stack([torch.isfinite(loss) for loss in losses]).all()
            self.undo.put_back(good if self.scale is None else good & self.scale.is_good)
        if self.scale is not None:
            self.scale.update()
            self.metrics.mark(self.scale.collapsed(), step)

    def close(self) -> None:
        """Leave the parameters without our hooks."""
        if self.gradients is not None:
            self.gradients.close()

    def versions(self) -> list[int]:
        """How often each weight, and each tensor of the optimizer, was written to: PyTorch counts that on the host."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        written: list[Any] = [*self.parameters, *(value for value in state if isinstance(value, torch.Tensor))]
        return [compat.write_count(tensor) for tensor in written]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the backward pass begins with it."""
        return loss if self.scale is None else self.scale.scaled(loss)

    def clip_gradients(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)

    def _work(self, shard: Shard, whole: int, step: int, *, in_sums: bool) -> None:
        every_rank = self.gradients is not None and self.gradients.every_rank and isinstance(self.objective, OwnStep)
        if (every_rank or self._rows is not None) and shard.sizes[0] and self._sample is None:
            self._sample = map_tensors(torch.clone, cut(shard.parts[0], 0, 1))
        if self._rows is not None:
            self._rows.sizes = shard.of_ranks
        for number, (batch, size) in enumerate(zip(shard.parts, shard.sizes, strict=True)):
            part, last = self.number_format.cast(batch), number == len(shard.parts) - 1
            if self.gradients is not None:
                self.gradients.arm(last)
            if in_sums:
                self._work_in_sums(part, size, last=last)
                continue
            with self.number_format.scope(self.device), self.gathering():
                loss, correct = self._loss(part, size)
            self._note(loss)
            self.scaled(loss * (size / whole)).backward()
            if size:
                self.metrics.add(loss, correct, size, step, counted=self._counts)

    def _work_in_sums(self, part: Batch, size: int, *, last: bool) -> None:
        """A part whose loss is a sum and a count: its sum now, the division when all counts are known."""
        with self.number_format.scope(self.device), self.gathering():
            if size:
                both, correct = self.objective.in_parts(self.model, part)
            else:
                total, correct = self._loss(part, 0)
                both = LossSum(total, self._no_count())
        self._sums.append((LossSum(both.total.detach(), both.count), correct, size))
        self._note(both.total)
        if self.gradients is not None and last:
            self.gradients.sum_weight(self._count())
        self.scaled(both.total).backward()

    def _count(self) -> torch.Tensor:
        return torch.stack([both.count for both, _, _ in self._sums]).sum()

    def _note(self, loss: torch.Tensor) -> None:
        """Remember whether this loss is finite, for all ranks."""
        if self.gradients is not None:
            self.gradients.note_loss(loss)
        elif self.undo is not None:
            self._losses.append(loss.detach())

    def _no_count(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _divide(self, whole: int, step: int) -> None:
        if self.gradients is not None:
            count = self.gradients.divide()
        else:
            count = self._count()
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            compat.foreach_div_(gradients, count.to(gradients[0].dtype))
        self._losses.append(1 / count)
        self.metrics.mark(1 / count, step)  # of a batch in which nothing counts there is no mean
        for both, correct, size in self._sums:
            if size:
                self.metrics.add(both.total / count, correct, size, step, weight=whole / size, counted=self._counts)

    def _loss(self, part: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if size:
            return self.objective(self.model, part, part=self.in_parts)
        # BatchNorm refuses an empty batch, unless its statistics are global. All else does as on the other ranks.
        alone = isinstance(self.gradients, ShardedGradients) or self._rows is not None
        with statistics_kept(self.model) if alone else contextlib.nullcontext():
            if self._sample is not None:
                value = self.objective.value(self.model, self.number_format.cast(self._sample))[0]
                return (value.total if isinstance(value, LossSum) else value) * 0, None
            if self._rows is not None:
                raise BadSettings(
                    "the loss, or what the forward pass changes, needs every device, and one has had no samples yet: "
                    "give larger batches, or fewer devices"
                )
            output = self._empty_output(part)
        return torch.stack([tensor.sum() * 0 for tensor in tensors_in(output)]).sum(), None

    def gathering(self, sizes: Sequence[int] = ()) -> contextlib.AbstractContextManager[None]:
        """Within it, ``mh.whole_batch`` gathers from all ranks; ``sizes``: their samples, if others than so far."""
        if self.gradients is None:
            return contextlib.nullcontext()
        if self._rows is None:
            return whole_batch.gathered_by(whole_batch.not_announced)
        self._rows.sizes = sizes or self._rows.sizes
        return whole_batch.gathered_by(self._rows)

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
