"""One training step on several devices: forward, backward, sum, clip, update. Its result is that of one device.

Each device's loss is the sum over the samples of its shard, divided by the number of samples in the whole batch; so the
sum of the devices' gradients, which Gluon's trainer makes with its key-value store, is the gradient of the mean over
the batch, however unequal the shards are. Three samples on one device and one on another::

    (l1 + l2 + l3) / 4   +   l4 / 4   =   (l1 + l2 + l3 + l4) / 4

Where the loss is a sum with a count of its own (:class:`~manyhands.training.loss.own_step.LossSum`), the count of the
whole batch is known only after all forward passes: each device minimises its total, and the summed gradients are
divided.

A device without samples has zeros for gradients. Every device then makes the same update of its own replica. Nothing
here waits: each call hands work to MXNet's engine, which runs the devices side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from manyhands.errors import BadBatch
from manyhands.training.mxnet.feed import Shards
from manyhands.training.mxnet.objective import Loss, Objective, check_same_kind
from manyhands.training.mxnet.replicas import numpy_like
from manyhands.training.mxnet.running_sums import RunningSums

_TINY = 1e-6  # added to a norm before dividing by it, as PyTorch does
_AT_ONCE = 100  # arrays that one operation looks through; 200 are its limit


class Step:
    """Forward and backward on each device, sum, clip, update."""

    def __init__(self, trainer: gluon.Trainer, objective: Objective, metrics: RunningSums, clip: float) -> None:
        self.trainer, self.objective, self.metrics, self.clip = trainer, objective, metrics, clip
        self.parameters: list[gluon.Parameter] = list(trainer._params)

    def close(self) -> None:
        for parameter in self.parameters:
            parameter._set_trainer(None)  # it would keep this job's memory

    def __call__(self, shards: Shards, whole: int, step: int) -> None:
        """Make the update of a batch of ``whole`` samples."""
        for parameter in self.parameters:
            for gradient in parameter.list_grad() if parameter.grad_req == "add" else ():
                gradient[:] = 0  # the update is that of one batch; MXNet's zero_grad takes no arrays of its NumPy mode
        losses = [self._work(shard, whole) for shard in shards if shard is not None]
        counts = [loss.count for loss in losses] if check_same_kind(losses) else None
        for loss in losses:
            self.metrics.add(loss)
        self._fill_gaps()
        self.trainer.allreduce_grads()
        if counts is not None:
            self._divide(len(shards), counts)
        if self.clip:
            self._clip(len(shards))
        gradients = self._finite()
        # Stale: no device used it, so it has no gradient. Not zero, for weight decay and momentum would move it.
        self.trainer.update(1, ignore_stale_grad=True)
        self.metrics.add_up(step, whole, gradients)
        self.metrics.set_out()

    def _work(self, shard: Sequence[Any], whole: int) -> Loss:
        """Forward and backward of one device; the loss for the figures."""
        with autograd.record():
            loss = self.objective(shard, training=True)
            minimised = loss.total / whole if loss.count is None else loss.total
        try:
            autograd.backward([minimised])
        except mx.MXNetError as error:
            if "not in a computational graph" not in str(error):
                raise
            raise BadBatch(
                "the loss does not depend on the model's parameters: compute it from the model's output with MXNet's "
                "operations, without asnumpy(), detach() or autograd.pause()"
            ) from error
        return replace(loss, total=loss.total.detach(), output=None)

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

    def _finite(self) -> list[Any]:
        """1 or 0 on a device. MXNet's ReLU turns NaN into 0, so bad samples may show in the gradients only."""
        by_dtype: dict[Any, list[Any]] = {}
        for parameter in self.parameters:
            if parameter.list_data()[0]._fresh_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter.list_grad()[0].as_nd_ndarray())
        parts = [ones[at : at + _AT_ONCE] for ones in by_dtype.values() for at in range(0, len(ones), _AT_ONCE)]
        return [mx.nd.multi_all_finite(*part, num_arrays=len(part)) for part in parts]

    def _clip(self, devices: int) -> None:
        """Scale all gradients together, on each device for itself: they are the same everywhere."""

        def scale(gradients: Sequence[Any]) -> Any:
            squares = mx.np.stack([mx.np.square(gradient).sum() for gradient in gradients])
            return mx.np.minimum(self.clip / (mx.np.sqrt(squares.sum()) + _TINY), 1.0)

        self._scale(devices, scale)

    def _divide(self, devices: int, counts: Sequence[Any]) -> None:
        """Divide all gradients by the sum of the counts."""

        def scale(gradients: Sequence[Any]) -> Any:
            here = [count.as_np_ndarray().reshape(()).as_in_ctx(gradients[0].ctx) for count in counts]
            return 1.0 / sum(here[1:], here[0])

        self._scale(devices, scale)

    def _scale(self, devices: int, factor: Callable[[Sequence[Any]], Any]) -> None:
        used = [parameter for parameter in self.parameters if parameter.list_data()[0]._fresh_grad]
        if not used:
            return
        with numpy_like():
            for number in range(devices):
                gradients = [parameter.list_grad()[number].as_np_ndarray() for parameter in used]
                scale = factor(gradients)
                for gradient in gradients:
                    gradient *= scale.astype(gradient.dtype)


def evaluate(objective: Objective, shards: Shards, metrics: RunningSums) -> list[Any]:
    """Add a batch to the metrics, with layers in evaluation mode; returns the model's output for each shard.

    An output is None where the objective does not return it.
    """
    losses = [objective(shard, training=False) for shard in shards if shard is not None]
    check_same_kind(losses)
    for loss in losses:
        metrics.add(replace(loss, output=None))
    metrics.add_up(step=0, count=sum(len(shard[0]) for shard in shards if shard is not None))
    metrics.set_out()
    return [loss.output for loss in losses]
