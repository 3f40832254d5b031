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

Loss and accuracy are summed on the first device and read late. MXNet can wait for an array but cannot tell whether it
is ready. So every step starts a copy of the sums to the host, and two steps later the host waits for it: that step was
issued long ago. The engine, which would queue steps without bound, then has at most two in its queue; and the sums that
have arrived can be shown without waiting::

    step 7 issued | step 8 issued | wait for the sums of step 7; step 9 issued | wait for those of step 8; ...
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from numpy.typing import NDArray

from manyhands.errors import BadBatch
from manyhands.training.data.labels import Look
from manyhands.training.data.order import Cursor, Window, epoch_order, whole_batches, windows
from manyhands.training.data.sources import Batch, Source, Stream
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.objective import Loss, Objective, check_same_kind
from manyhands.training.mxnet.replicas import numpy_like
from manyhands.training.running_sums import Totals

_IN_FLIGHT = 2  # steps that may be issued and not done
_TINY = 1e-6  # added to a norm before dividing by it, as PyTorch does
_AT_ONCE = 100  # arrays that one operation looks through; 200 are its limit


class TrainingStep:
    """Forward and backward on each device, sum, clip, update."""

    def __init__(self, trainer: gluon.Trainer, objective: Objective, sums: RunningSums, clip: float) -> None:
        self.trainer, self.objective, self.sums, self.clip = trainer, objective, sums, clip
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
        counts = [loss.count for loss in losses] if check_same_kind(losses) else []
        self._fill_gaps()
        self.trainer.allreduce_grads()
        for number in range(len(shards) if counts or self.clip else 0):
            self._scale(number, counts)
        finite = self._finite()
        # Stale: no device used it, so it has no gradient. Not zero, for weight decay and momentum would move it.
        self.trainer.update(1, ignore_stale_grad=True)
        self.sums.add(losses, whole, step, finite)

    def _work(self, shard: Sequence[Any], whole: int) -> Loss:
        """Forward and backward of one device; the loss for the totals."""
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
        for parameter in self._used_parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter.list_grad()[0].as_nd_ndarray())
        parts = [ones[at : at + _AT_ONCE] for ones in by_dtype.values() for at in range(0, len(ones), _AT_ONCE)]
        return [mx.nd.multi_all_finite(*part, num_arrays=len(part)) for part in parts]

    def _scale(self, number: int, counts: Sequence[Any]) -> None:
        """Divide one device's gradients by the sum of the counts, if any, and clip all of them together."""
        with numpy_like():
            gradients = [parameter.list_grad()[number].as_np_ndarray() for parameter in self._used_parameters]
            if counts and gradients:
                here = [count.as_np_ndarray().reshape(()).as_in_ctx(gradients[0].ctx) for count in counts]
                _multiply(gradients, 1.0 / sum(here[1:], here[0]))
            if self.clip and gradients:
                squares = mx.np.stack([mx.np.square(gradient).sum() for gradient in gradients])
                _multiply(gradients, mx.np.minimum(self.clip / (mx.np.sqrt(squares.sum()) + _TINY), 1.0))

    @property
    def _used_parameters(self) -> list[gluon.Parameter]:
        """The parameters that have a gradient of this step."""
        return [parameter for parameter in self.parameters if parameter.list_data()[0]._fresh_grad]


def _multiply(gradients: Sequence[Any], factor: Any) -> None:
    for gradient in gradients:
        gradient *= factor.astype(gradient.dtype)


def evaluate(objective: Objective, shards: Sequence[Batch], sums: RunningSums) -> list[Any]:
    """Add a batch to the sums, with layers in evaluation mode; returns the model's output for each shard."""
    losses = [objective(shard, training=False) for shard in shards]
    check_same_kind(losses)
    sums.add(losses, sum(len(shard[0]) for shard in shards))
    return [loss.output for loss in losses]


class RunningSums:
    """Four numbers on a device: sum of losses, correct predictions, first bad step (or infinity), and a divisor.

    Samples are counted here. A LossSum is divided by its count step by step; with ``over_all``, as in a test, all sums
    are divided by all counts, the divisor.

    The shards of a step are added up before they go into the sums: so a job that goes on from a checkpoint's sums adds
    the same numbers in the same order.
    """

    def __init__(self, device: mx.Context, *, over_all: bool = False) -> None:
        self.device, self.over_all = device, over_all
        self.counts_correct = False
        self.reset()

    def reset(self) -> None:
        self.restore(Totals(counted=self.counts_correct))

    def restore(self, totals: Totals) -> None:
        """Go on from the sums of a checkpoint."""
        self.counts_correct, self._count = totals.counted, int(totals.count)
        self._loss, self._correct = self._number(totals.loss_sum), self._number(totals.correct)
        self._bad = self._never = self._number(math.inf)
        self._divisor, self._weighed = self._number(0.0), False
        self._coming: deque[tuple[int, Any]] = deque()
        self._arrived: tuple[int, Any] | None = None
        self._sent: deque[tuple[int, int, Any]] = deque()

    def _number(self, value: float) -> Any:
        with numpy_like():
            return mx.np.full((), value, dtype="float64", ctx=self.device)

    def add(self, losses: Sequence[Loss], count: int, step: int = 0, finite: Sequence[Any] = ()) -> None:
        """Add a step's parts, of this many samples; ``finite``: 1 or 0 each, a good step has only 1.

        The sums set out to the host, and those of two steps ago are waited for.
        """
        self._count += count
        with numpy_like():
            loss = self._together([part.total for part in losses])
            if counts := [part.count for part in losses if part.count is not None]:
                divisor = self._together(counts)
                if self.over_all:
                    self._divisor, self._weighed = self._divisor + divisor, True
                else:
                    loss = loss / divisor * count
            good = mx.np.isfinite(loss)
            if finite:
                good = good.astype("float64") + self._together([*finite]) == 1 + len(finite)
            self._loss = self._loss + loss
            if correct_counts := [part.correct for part in losses if part.correct is not None]:
                self.counts_correct = True
                self._correct = self._correct + self._together(correct_counts)
            self._bad = mx.np.minimum(self._bad, mx.np.where(good, self._never, self._number(step)))
        self._coming.append((self._count, self._on_the_way()))
        if len(self._coming) > _IN_FLIGHT:
            self._arrived = self._coming.popleft()
            self._arrived[1].wait_to_read()  # manyhands: wait-ok newer steps keep the devices busy

    def peek(self) -> Totals | None:
        """The totals of two steps ago, which are on the host already."""
        return None if self._arrived is None else self._totals(*self._arrived)

    def send(self, step: int) -> None:
        """Remember to hand out the sums that have just set out, once they are there."""
        self._sent.append((step, *self._coming[-1]))

    def take_arrived(self, *, wait: bool) -> list[tuple[int, Totals]]:
        """The sent totals that have arrived, with their steps; ``wait``: all of them."""
        under_way = {id(sums) for _, sums in self._coming}
        totals = []
        while self._sent and (wait or id(self._sent[0][2]) not in under_way):
            step, count, sums = self._sent.popleft()
            totals.append((step, self._totals(count, sums)))
        return totals

    def read(self) -> Totals:
        """The totals of all that was issued; waits."""
        return self._totals(self._count, self._on_the_way())

    def _together(self, parts: list[Any]) -> Any:
        total = mx.np.zeros((), dtype="float64", ctx=self.device)
        for part in parts:
            total = total + part.as_np_ndarray().reshape(()).astype("float64").as_in_ctx(self.device)
        return total

    def _on_the_way(self) -> Any:
        """The sums after all work that was issued so far, on their way to the host."""
        with numpy_like():
            return mx.np.stack([self._loss, self._correct, self._bad, self._divisor]).as_in_ctx(mx.cpu())

    def _totals(self, count: int, sums: Any) -> Totals:
        numbers = sums.asnumpy().tolist()  # manyhands: wait-ok they are on the host, or an epoch ends
        loss, correct, bad, divisor = numbers
        totals = Totals(loss, correct, count, None if math.isinf(bad) else int(bad), self.counts_correct)
        return totals.with_weight(divisor) if self._weighed else totals


Shards = list[Batch | None]  # one per device; None where it has no samples


class Feed:
    """The shards of a source for a list of devices. ``look`` checks a stream's batches before they go to a device."""

    def __init__(
        self, source: Source, devices: Sequence[mx.Context], dtype: Any, *, least: int = 1, look: Look | None = None
    ) -> None:
        self.source, self.devices, self.dtype, self.least, self.look = source, list(devices), dtype, least, look

    def batches(
        self, cursor: Cursor, size: int, seed: int, shares: Sequence[float] | None = None, *, whole: bool = False
    ) -> Iterator[tuple[Window, Shards]]:
        """Every batch from the cursor to the end of its epoch, as shards; ``whole`` ones are not divided."""
        source = self.source
        if isinstance(source, Stream):
            for window, batch in whole_batches(source.windows(cursor, seed), whole):
                if self.look is not None:
                    self.look(batch)
                yield window, self._divide(window, shares, batch, np.arange(window.size))
            return
        order = epoch_order(seed, cursor.epoch, source.count, shuffle=source.shuffle)
        for window in windows(cursor, source.count, size, whole=whole):
            yield window, self._divide(window, shares, source.arrays, order[window.start : window.stop])

    def _divide(self, window: Window, shares: Sequence[float] | None, parts: Batch, rows: NDArray[np.int64]) -> Shards:
        """A shard of these rows for each device; None where it has no samples."""
        ends = np.cumsum([0, *window.sizes(len(self.devices), shares, least=self.least)])
        return [
            self._sent([part[rows[begin:end]] for part in parts], device) if end > begin else None
            for device, begin, end in zip(self.devices, ends, ends[1:], strict=False)
        ]

    def _sent(self, rows: Sequence[NDArray[Any]], device: mx.Context) -> Batch:
        """Floating-point numbers in the model's dtype: MXNet computes with nothing else."""
        shard = self.source.prepare(tuple(replicas.native(part, device) for part in rows))
        return tuple(
            part.astype(self.dtype) if "float" in np.dtype(part.dtype).name and part.dtype != self.dtype else part
            for part in shard
        )
