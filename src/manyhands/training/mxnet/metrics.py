"""Loss and accuracy of an epoch, summed on each device and read late.

MXNet can wait for an array but not ask whether it is there. So with every step the sums of each device set out for the
host, and two steps later the host waits for them: they are the work of a step long issued, not of the one under way.
That does two things. The engine, which would queue steps without bound, has at most two ahead of it; and what has
arrived can be shown without waiting for anything::

    step 7 issued | step 8 issued | wait for the sums of step 7; step 9 issued | wait for those of step 8; ...
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from manyhands.training.figures import Figures, together
from manyhands.training.mxnet.modes import numpy_like

_IN_FLIGHT = 2  # steps that may be issued and not done


class Metrics:
    """The sums of all devices, and which of them have arrived."""

    def __init__(self, devices: Sequence[mx.Context]) -> None:
        self.devices = list(devices)
        self.counts_right = False
        self._before = Figures()  # what a checkpoint had counted already
        self.reset()

    def reset(self) -> None:
        self._before = Figures()
        self._count = 0
        self._on_devices = [_Sums(device) for device in self.devices]
        self._coming: deque[tuple[int, list[Any]]] = deque()
        self._arrived: tuple[int, list[Any]] | None = None

    def add(self, number: int, loss: Any, right: Any | None, count: int, step: int) -> None:
        """Add one device's shard: the sum of its samples' losses, and the right answers among them."""
        self.counts_right = self.counts_right or right is not None
        self._count += count
        self._on_devices[number].add(loss, right, step)

    def set_out(self) -> None:
        """A step is issued: its sums set out for the host, those of two steps ago are waited for."""
        self._coming.append((self._count, [sums.on_the_way() for sums in self._on_devices]))
        if len(self._coming) > _IN_FLIGHT:
            self._arrived = self._coming.popleft()
            for sums in self._arrived[1]:
                sums.wait_to_read()

    def peek(self) -> Figures | None:
        """The figures of two steps ago, which are on the host already."""
        return None if self._arrived is None else self._figures(*self._arrived)

    def read(self) -> Figures:
        """The figures of all that was issued; waits."""
        return self._figures(self._count, [sums.on_the_way() for sums in self._on_devices])

    def restore(self, figures: Figures) -> None:
        """Go on from the sums of a checkpoint."""
        self.reset()
        self._before, self.counts_right = figures, figures.counted

    def _figures(self, count: int, of_devices: Sequence[Any]) -> Figures:
        parts = [self._before]
        for sums in of_devices:
            loss, right, bad = sums.asnumpy().tolist()
            parts.append(Figures(loss, right, 0, None if math.isinf(bad) else int(bad)))
        parts.append(Figures(count=count, counted=self.counts_right))
        return together(parts)


class _Sums:
    """Three numbers on one device: sum of losses, right answers, first bad step (or infinity)."""

    def __init__(self, device: mx.Context) -> None:
        with numpy_like():
            self.loss = mx.np.zeros((), dtype="float64", ctx=device)
            self.right = mx.np.zeros((), dtype="float64", ctx=device)
            self.bad = self._never = mx.np.full((), math.inf, dtype="float64", ctx=device)
        self.device = device

    def add(self, loss: Any, right: Any | None, step: int) -> None:
        with numpy_like():
            value = loss.as_np_ndarray().reshape(()).astype("float64")
            self.loss = self.loss + value
            if right is not None:
                self.right = self.right + right.as_np_ndarray().reshape(()).astype("float64")
            now = mx.np.full((), float(step), dtype="float64", ctx=self.device)
            self.bad = mx.np.minimum(self.bad, mx.np.where(mx.np.isfinite(value), self._never, now))

    def on_the_way(self) -> Any:
        """The three as they are after what was issued so far, on their way to the host."""
        with numpy_like():
            return mx.np.stack([self.loss, self.right, self.bad]).as_in_ctx(mx.cpu())
