"""Loss and accuracy of an epoch, summed on the first device and read late.

MXNet can wait for an array but cannot tell whether it is ready. So every step starts a copy of the sums to the host,
and two steps later the host waits for it: that step was issued long ago. This has two effects. The engine, which would
queue steps without bound, has at most two in its queue; and the sums that have arrived can be shown without waiting::

    step 7 issued | step 8 issued | wait for the sums of step 7; step 9 issued | wait for those of step 8; ...
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from manyhands.training.mxnet.objective import Loss
from manyhands.training.mxnet.replicas import numpy_like
from manyhands.training.running_sums import Figures

_IN_FLIGHT = 2  # steps that may be issued and not done


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
        with numpy_like():
            self._never = mx.np.full((), math.inf, dtype="float64", ctx=device)
        self.reset()

    def reset(self) -> None:
        self.restore(Figures(counted=self.counts_correct))

    def restore(self, figures: Figures) -> None:
        """Go on from the sums of a checkpoint."""
        self.counts_correct = figures.counted
        self._count = int(figures.count)
        with numpy_like():
            self._loss = mx.np.full((), figures.loss_sum, dtype="float64", ctx=self.device)
            self._correct = mx.np.full((), figures.correct, dtype="float64", ctx=self.device)
            self._bad = self._never
            self._divisor = mx.np.zeros((), dtype="float64", ctx=self.device)
        self._weighed = False
        self._shards: list[Loss] = []
        self._coming: deque[tuple[int, Any]] = deque()
        self._arrived: tuple[int, Any] | None = None
        self._sent: deque[tuple[int, int, Any]] = deque()

    def add(self, loss: Loss) -> None:
        """A part of the step."""
        self.counts_correct = self.counts_correct or loss.correct is not None
        self._shards.append(loss)

    def add_up(self, step: int, count: int, finite: Sequence[Any] = ()) -> None:
        """Add the step's parts, of this many samples, to the sums; ``finite``: 1 or 0, a good step has only 1."""
        self._count += count
        with numpy_like():
            loss = self._together([shard.total for shard in self._shards])
            if counts := [shard.count for shard in self._shards if shard.count is not None]:
                divisor = self._together(counts)
                if self.over_all:
                    self._divisor, self._weighed = self._divisor + divisor, True
                else:
                    loss = loss / divisor * count
            good = mx.np.isfinite(loss)
            if finite:
                good = good.astype("float64") + self._together([*finite]) == 1 + len(finite)
            self._loss = self._loss + loss
            if correct_counts := [shard.correct for shard in self._shards if shard.correct is not None]:
                self._correct = self._correct + self._together(correct_counts)
            now = mx.np.full((), float(step), dtype="float64", ctx=self.device)
            self._bad = mx.np.minimum(self._bad, mx.np.where(good, self._never, now))
        self._shards = []

    def set_out(self) -> None:
        """A step was issued: start copying the sums to the host, and wait for those of two steps ago."""
        self._coming.append((self._count, self._on_the_way()))
        if len(self._coming) > _IN_FLIGHT:
            self._arrived = self._coming.popleft()
            self._arrived[1].wait_to_read()  # manyhands: wait-ok newer steps keep the devices busy

    def peek(self) -> Figures | None:
        """The figures of two steps ago, which are on the host already."""
        return None if self._arrived is None else self._figures(*self._arrived)

    def send(self, step: int) -> None:
        """Remember to hand out the sums that have just set out, once they are there."""
        self._sent.append((step, *self._coming[-1]))

    def arrived(self, *, wait: bool) -> list[tuple[int, Figures]]:
        """The sent figures that have arrived, with their steps; ``wait``: all of them."""
        under_way = {id(sums) for _, sums in self._coming}
        figures = []
        while self._sent and (wait or id(self._sent[0][2]) not in under_way):
            step, count, sums = self._sent.popleft()
            figures.append((step, self._figures(count, sums)))
        return figures

    def read(self) -> Figures:
        """The figures of all that was issued; waits."""
        return self._figures(self._count, self._on_the_way())

    def _together(self, parts: list[Any]) -> Any:
        total = mx.np.zeros((), dtype="float64", ctx=self.device)
        for part in parts:
            total = total + part.as_np_ndarray().reshape(()).astype("float64").as_in_ctx(self.device)
        return total

    def _on_the_way(self) -> Any:
        """The sums after all work that was issued so far, on their way to the host."""
        with numpy_like():
            return mx.np.stack([self._loss, self._correct, self._bad, self._divisor]).as_in_ctx(mx.cpu())

    def _figures(self, count: int, sums: Any) -> Figures:
        numbers = sums.asnumpy().tolist()  # manyhands: wait-ok they are on the host, or an epoch ends
        loss, correct, bad, divisor = numbers
        figures = Figures(loss, correct, count, None if math.isinf(bad) else int(bad), self.counts_correct)
        return figures.weighed(divisor) if self._weighed else figures
