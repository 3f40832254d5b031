"""One training step on several devices, exactly that of one.

Each device's loss is the sum over the samples of its shard, divided by the number of samples in the whole batch; so the
sum of the devices' gradients, which Gluon's trainer makes with its key-value store, is the gradient of the mean over
the batch, however unequal the shards are. Three samples on one device and one on another::

    (l1 + l2 + l3) / 4   +   l4 / 4   =   (l1 + l2 + l3 + l4) / 4

A device without samples has zeros for gradients. Every device then makes the same update of its own replica. Nothing
here waits: each call hands work to MXNet's engine, which runs the devices side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from manyhands.training.mxnet.batch_norm import Together
from manyhands.training.mxnet.feed import Shards
from manyhands.training.mxnet.metrics import Metrics
from manyhands.training.mxnet.modes import numpy_like
from manyhands.training.mxnet.objective import Objective
from manyhands.training.mxnet.spared import Spared

_TINY = 1e-6  # added to a norm before dividing by it, as PyTorch does


class Step:
    """Forward and backward on each device, sum, clip, update."""

    def __init__(
        self,
        trainer: gluon.Trainer,
        objective: Objective,
        metrics: Metrics,
        *,
        clip: float = 0.0,
        accumulate: int = 1,
        together: Together | None = None,
        spared: Spared | None = None,
    ) -> None:
        """``together``: layers normalise over all devices; ``spared``: a batch with a bad loss is left out."""
        self.trainer, self.objective, self.metrics = trainer, objective, metrics
        self.clip, self.accumulate, self.together, self.spared = clip, accumulate, together, spared
        self.parameters: list[gluon.Parameter] = list(trainer._params)
        self._written = [one for one in self.parameters if one.grad_req == "write" and accumulate > 1]
        for parameter in self._written:
            parameter.grad_req = "add"
        # Also those that the user made so: the update is that of one batch.
        self._added_to = [one for one in self.parameters if one.grad_req == "add"]

    def close(self) -> None:
        for parameter in self.parameters:
            parameter._set_trainer(None)  # it would keep this job's memory
        if self.together is not None:
            self.together.close()
        for parameter in self._written:
            parameter.grad_req = "write"

    def __call__(self, shards: Shards, whole: int, step: int) -> None:
        """Make the update of a batch of ``whole`` samples."""
        if self.spared is not None:
            self.spared.keep()
        for parameter in self._added_to:
            parameter.zero_grad()
        present = [shard for shard in shards if shard is not None]
        if self.together is not None:
            self._work_together(self.together, present, whole)
        else:
            for shard in present:
                self._work(shard, whole)
        self._fill_gaps()
        self.trainer.allreduce_grads()
        if self.clip:
            self._clip(len(shards))
        # Stale: no device used it, so it has no gradient. Not zero, for weight decay and momentum would move it.
        self.trainer.update(1, ignore_stale_grad=True)
        good = self.metrics.add_up(step)
        if self.spared is not None:
            self.spared.put_back(good)
        self.metrics.set_out()

    def _work(self, shard: Sequence[Any], whole: int) -> None:
        size = len(shard[0])
        parts = min(self.accumulate, size)
        for part in range(parts):
            start, stop = size * part // parts, size * (part + 1) // parts
            batch = shard if parts == 1 else tuple(one[start:stop] for one in shard)
            loss, right, mean = self._forward(batch, whole)
            mean.backward()
            self.metrics.add(loss, right, stop - start)

    def _work_together(self, together: Together, shards: Sequence[Any], whole: int) -> None:
        """One backward pass for all: gradients go from device to device."""
        passed = together.run([partial(self._forward, shard, whole) for shard in shards])
        autograd.backward([mean for _, _, mean in passed])
        for shard, (loss, right, _) in zip(shards, passed, strict=True):
            self.metrics.add(loss, right, len(shard[0]))

    def _forward(self, batch: Sequence[Any], whole: int) -> tuple[Any, Any | None, Any]:
        """The sum of the losses and the right answers, both for the figures; and what is minimised."""
        with autograd.record():
            loss, right = self.objective(batch, training=True)
            return loss.detach(), right, loss / whole

    def _fill_gaps(self) -> None:
        """Zeros where a device did not use a parameter that another one used."""
        for parameter in self.parameters:
            arrays = parameter.list_data()
            fresh = [bool(array._fresh_grad) for array in arrays]
            if all(fresh) or not any(fresh):
                continue
            for array, gradient, used in zip(arrays, parameter.list_grad(), fresh, strict=True):
                if not used:
                    gradient[:] = 0
                    array._fresh_grad = True

    def _clip(self, devices: int) -> None:
        """Scale all gradients together, on each device for itself: they are the same everywhere."""
        used = [one for one in self.parameters if one.list_data()[0]._fresh_grad]
        if not used:
            return
        with numpy_like():
            for number in range(devices):
                gradients = [one.list_grad()[number].as_np_ndarray() for one in used]
                squares = mx.np.stack([mx.np.square(one).sum() for one in gradients])
                scale = mx.np.minimum(self.clip / (mx.np.sqrt(squares.sum()) + _TINY), 1.0)
                for gradient in gradients:
                    gradient *= scale


def evaluate(objective: Objective, shards: Shards, metrics: Metrics) -> None:
    """Add a batch to the metrics; outside of ``record`` layers are in their way of predicting."""
    for shard in shards:
        if shard is not None:
            loss, right = objective(shard, training=False)
            metrics.add(loss, right, len(shard[0]))
    metrics.add_up(step=0)
    metrics.set_out()
