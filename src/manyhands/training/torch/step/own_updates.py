"""A model that makes its updates itself: ``training_step(batch, optimizers)``.

``optimizers`` holds what ``configure_optimizers`` gave, by number or name. Each has :meth:`Updates.minimize`, which may
be called any number of times and in any order: backward pass, sum over the ranks, clip, update. Only that optimizer's
parameters get gradients. For example a critic that makes two updates for one of the generator::

    def training_step(self, batch, optimizers):
        for noise in batch["noise"].unbind(1):
            optimizers["critic"].minimize(self.critic_loss(batch["real"], noise))
        optimizers["generator"].minimize(self.generator_loss(noise))

Every rank calls it with its shard, one without samples with a sample that it has had before, which counts nothing.
The loss is a mean over samples, or a :class:`LossSum`: weighted by samples, or divided by all counts,
it is that of the whole batch. All ranks have to make the same updates in the same order, for each is a sum over all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from manyhands.amounts import counted
from manyhands.errors import BadSettings
from manyhands.training.loss.own_step import LossSum
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors
from manyhands.training.torch.objective import checked
from manyhands.training.torch.state.module_state import statistics_kept
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.eager import EagerStep
from manyhands.training.torch.step.several_optimizers import Key, Several


class Updates:
    """One of the optimizers, as ``training_step(batch, optimizers)`` has it."""

    def __init__(self, key: Key, step: EagerStep, turn: _Turn) -> None:
        self._key, self._step, self._turn = key, step, turn
        self._trained = [parameter for parameter in step.parameters if parameter.requires_grad]

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
        both = checked(loss) if isinstance(loss, LossSum) else None
        total, count = (loss, None) if both is None else (both.total, both.count)
        self._check(total)
        with torch.autocast(self._step.device.type, enabled=False):
            self._update(total, count, retain_graph)
        # Autocast keeps its casts of weights until its outermost scope ends: these weights have changed.
        torch.clear_autocast_cache()

    def _update(self, total: torch.Tensor, count: torch.Tensor | None, retain_graph: bool) -> None:
        step, turn = self._step, self._turn
        gradients, shard = step.gradients, turn.size / turn.whole
        if gradients is None:
            step.optimizer.zero_grad(set_to_none=True)
        else:
            gradients.begin()
            gradients.arm(True)
            gradients.note_loss(total if turn.size else torch.zeros_like(total))
        if count is not None:
            count = count.clone() if turn.size else torch.zeros_like(count)
            if gradients is not None:
                gradients.sum_weight(count)
        start = total * shard if count is None else total * bool(turn.size)
        torch.autograd.backward(start, inputs=self._trained, retain_graph=retain_graph)
        if gradients is not None:
            gradients.finish()
            step.metrics.mark(gradients.loss_mark, turn.step)
        if count is not None:
            count = self._divided(count)
        step.clip_gradients()
        with step.drawing(turn.step):
            step.optimizer.step()
        self._count(total, count)

    def _divided(self, count: torch.Tensor) -> torch.Tensor:
        """Divide the sums of gradients by the sum of all counts, and return it."""
        if self._step.gradients is not None:
            return self._step.gradients.divide()
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad /= count.to(parameter.grad.dtype)
        return count

    def _count(self, total: torch.Tensor, count: torch.Tensor | None) -> None:
        """Add the loss to the figures; the samples of a batch count once."""
        turn, metrics = self._turn, self._step.metrics
        if not turn.size:
            return
        mean, weight = (total, 1.0) if count is None else (total / count, turn.whole / turn.size)
        metrics.add(mean, None, turn.size, turn.step, weight=weight, counted=not turn.counted)
        turn.counted = True

    def _check(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise BadSettings(
                f"optimizers[{self._key!r}].minimize({kind}): give the loss, a tensor of one number that depends on "
                "the parameters of this optimizer, or mh.LossSum(total, count)"
            )


class _Turn:
    """The batch that is processed."""

    size, whole, step, counted = 0, 1, 0, False


class OwnUpdates:
    """The step of a batch: a call of the model's ``training_step(batch, optimizers)``."""

    undo = None  # a batch that is skipped would have to take back all updates: refused

    def __init__(
        self,
        steps: Mapping[Key, EagerStep],
        optimizer: Several,
        model: torch.nn.Module,
        average: Average | None = None,
        first_sample: Callable[[], Batch] | None = None,
    ) -> None:
        """``first_sample``: of the data, on the device; for a rank that has none of the batch a job is resumed at."""
        self._steps, self.optimizer, self.model, self.average = dict(steps), optimizer, model, average
        self._first = first = next(iter(self._steps.values()))
        self.device, self.metrics, self.number_format = first.device, first.metrics, first.number_format
        self._first_sample = first_sample
        self._turn = _Turn()
        self._updates = {key: Updates(key, step, self._turn) for key, step in self._steps.items()}
        self._sample: Batch | None = None  # with which a rank without samples takes part

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        turn, size = self._turn, 0 if shard is None else shard.size
        turn.size, turn.whole, turn.step, turn.counted = size, whole, step, False
        if shard is not None and size and self._sample is None and self._first.gradients is not None:
            self._sample = map_tensors(torch.clone, cut(shard.whole, 0, 1))
        if not size and self._sample is None and self._first_sample is not None:
            self._sample = self._first_sample()
        batch = shard.whole if shard is not None and size else self._sample
        if batch is None:
            raise BadSettings(
                f"the first batch has {counted(whole, 'sample')}, and a rank has none of them: training_step(batch, "
                "optimizers) needs a sample on every device. Give larger batches, or fewer devices"
            )
        # Without samples the statistics of layers must not change.
        with (
            self.number_format.scope(self.device),
            contextlib.nullcontext() if size else statistics_kept(self.model),
            self._first.gathering(() if shard is None else shard.of_ranks),
        ):
            user: Any = self.model
            user.training_step(self.number_format.cast(batch), self._updates)
        if size and not turn.counted:
            self.metrics.add(self.metrics.sums.new_zeros(()), None, size, step)
        if self.average is not None:
            self.average.update()

    def versions(self) -> list[int]:
        return [version for step in self._steps.values() for version in step.versions()]

    def close(self) -> None:
        for step in self._steps.values():
            step.close()
