"""The step of several optimizers, whose updates the model makes itself: ``training_step(batch, optimizers)``.

``optimizers`` holds what ``configure_optimizers`` gave, by number or name. Each has :meth:`Updates.minimize`, which may
be called any number of times and in any order: backward pass, sum over the ranks, clip, update. Only that optimizer's
parameters get gradients.

Every rank calls it with its shard, one without samples with a sample that it has had before, which counts nothing.
The loss is a mean over samples, or a :class:`LossSum`: weighted by samples, or divided by all counts,
it is that of the whole batch. All ranks have to make the same updates in the same order, for each is a sum over all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.amounts import count_of
from manyhands.errors import BadSettings
from manyhands.training.loss.own_step import LossSum
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors
from manyhands.training.torch.objective import check_sum
from manyhands.training.torch.optimizers import Key, Several
from manyhands.training.torch.state.module_state import statistics_kept
from manyhands.training.torch.step import logged
from manyhands.training.torch.step.part import Part, TrainingStep, Turn
from manyhands.training.torch.step.plain import PlainStep


class Updates:
    """One of the optimizers, as ``training_step(batch, optimizers)`` has it."""

    def __init__(self, key: Key, step: PlainStep) -> None:
        self._key, self._step = key, step
        self.turn = Turn(0)
        self.size = 0  # of this rank's shard of the batch

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """PyTorch's own, to look at: its groups and rates."""
        return self._step.optimizer

    def minimize(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Make one update of this optimizer's parameters, with the gradients of the loss over the whole batch.

        Args:
            loss: The mean over the samples of the batch that ``training_step`` was given, or an ``mh.LossSum``.
            retain_graph: Keep what the backward pass needs, for another loss that shares a part with this one.
        """
        both = check_sum(loss) if isinstance(loss, LossSum) else None
        total, count = (loss, None) if both is None else (both.total, both.count)
        self._check(total)
        with torch.autocast(self._step.device.type, enabled=False):
            self._update(total, count, retain_graph)
        # Autocast keeps its casts of weights until its outermost scope ends: these weights have changed.
        torch.clear_autocast_cache()

    def _update(self, total: torch.Tensor, count: torch.Tensor | None, retain_graph: bool) -> None:
        step, turn, gradients = self._step, self.turn, self._step.gradients
        step.begin(turn)
        gradients.arm(True)
        gradients.note_loss(total if self.size else torch.zeros_like(total))
        start = total * (self.size / turn.whole) if count is None else total * bool(self.size)
        trained = [parameter for parameter in step.parameters if parameter.requires_grad]
        torch.autograd.backward(start, inputs=trained, retain_graph=retain_graph)
        gradients.sum_up(None if count is None else count * bool(self.size))
        count = None if count is None else gradients.divide()
        step.apply(turn)
        if self.size:  # the samples of a batch count once
            mean, weight = (total, 1.0) if count is None else (total / count, turn.whole / self.size)
            step.metrics.add(mean, None, self.size, turn.step, weight=weight, counted=not turn.counted)
            turn.counted = True

    def _check(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise BadSettings(
                f"optimizers[{self._key!r}].minimize({kind}): give the loss, a tensor of one number that depends on "
                "the parameters of this optimizer, or mh.LossSum(total, count)"
            )


class OwnUpdates(TrainingStep):
    """The step of a batch: a call of the model's ``training_step(batch, optimizers)``."""

    updates_in_passes = True

    def __init__(
        self,
        steps: Mapping[Key, PlainStep],
        optimizer: Several,
        parts: Sequence[Part | None],
        first_sample: Callable[[], Batch] | None = None,
    ) -> None:
        """``first_sample``: of the data, on the device; for a rank that has none of the batch a job is resumed at."""
        self._steps = list(steps.values())
        first = self._steps[0]
        super().__init__(first.model, optimizer, first.metrics, first.device, first.number_format, parts)
        self.objective, self.gradients = first.objective, first.gradients
        self._several_ranks = first.gradients.loss_mark is not None
        self._first_sample = first_sample
        self._updates = {key: Updates(key, step) for key, step in steps.items()}
        self._sample: Batch | None = None  # with which a rank without samples takes part

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        self.objective.batch_idx = batch_idx
        size, turn = 0 if shard is None else shard.size, Turn(step, whole, shard)
        self.begin(turn)
        self.passes(turn, self._batch(shard if size else None, whole), size, last=True)
        self.update(turn)

    def begin(self, turn: Turn) -> None:
        for each in self._updates.values():
            each.turn = turn
        super().begin(turn)

    def passes(self, turn: Turn, batch: Batch, size: int, **_: Any) -> torch.Tensor:
        for each in self._updates.values():
            each.size = size
        # Without samples the statistics of layers must not change.
        with self.forward(), contextlib.nullcontext() if size else statistics_kept(self.model):
            user_step: Any = self.model.training_step
            number = (self.objective.batch_idx,) if "batch_idx" in inspect.signature(user_step).parameters else ()
            with logged.collect() as values:
                user_step(self.number_format.cast(batch), *number, optimizers=self._updates)
        self.metrics.log(values, size)
        none = self.metrics.sums.new_zeros(())
        if size and not turn.counted:
            self.metrics.add(none, None, size, turn.step)
        return none

    def update(self, turn: Turn) -> None:
        self.after_update(turn)

    def _batch(self, shard: Shard | None, whole: int) -> Batch:
        """This rank's samples of the batch; without any, a sample that counts nothing."""
        if shard is not None:
            if self._sample is None and self._several_ranks:
                self._sample = map_tensors(torch.clone, cut(shard.whole, 0, 1))
            return shard.whole
        if self._sample is None and self._first_sample is not None:
            self._sample = self._first_sample()
        if self._sample is None:
            raise BadSettings(
                f"the first batch has {count_of(whole, 'sample')}, and a rank has none of them: training_step(batch, "
                "optimizers) needs a sample on every device. Give larger batches, or fewer devices"
            )
        return self._sample

    def lay_out_gradients(self) -> None:
        for step in self._steps:
            step.lay_out_gradients()

    def versions(self) -> list[int]:
        return [version for step in self._steps for version in step.versions()]

    def close(self) -> list[str]:
        return [*super().close(), *(note for step in self._steps for note in step.close())]
