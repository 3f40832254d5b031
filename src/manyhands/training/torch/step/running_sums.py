"""Loss and accuracy of an epoch, summed on the device and read late.

Adding to them makes no host wait. :meth:`RunningSums.peek` starts a copy to the host and gives the newest one that has
arrived; :meth:`RunningSums.read` waits, and is for the end of an epoch.
"""

from __future__ import annotations

import math
from collections import deque

import torch
import torch.distributed as dist

from manyhands.backends.protocol import Arrival
from manyhands.backends.torch import devices as backend
from manyhands.training.running_sums import Figures
from manyhands.training.torch.ranks.world import World

_LOSS, _CORRECT, _COUNT, _BAD_STEP = range(4)


class RunningSums:
    """Four numbers on the device: sum of losses, correct predictions, samples, first bad step (or infinity)."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.counts_correct = False
        self._arrival: Arrival[torch.Tensor] | None = None
        self._shown: Figures | None = None
        self._sent: deque[_Sent] = deque()
        self.reset()

    def reset(self) -> None:
        self.sums.zero_()
        self.sums[_BAD_STEP:].fill_(math.inf)
        self._arrival, self._shown = None, None
        self._sent.clear()

    def add(
        self,
        loss: torch.Tensor,
        correct: torch.Tensor | None,
        count: int,
        step: torch.Tensor | int,
        weight: float = 1.0,
        *,
        counted: bool = True,
    ) -> None:
        """Add a batch: the mean loss over its samples, and the correct predictions among them."""
        self.add_loss(loss.detach().double() * (count * weight), step)
        self.count(correct, count, counted=counted)

    def add_loss(self, total: torch.Tensor, step: torch.Tensor | int) -> None:
        """Add a sum of losses over samples."""
        self.sums[_LOSS] += total
        self.mark(total, step)

    def count(self, correct: torch.Tensor | None, count: int, *, counted: bool = True) -> None:
        """Count samples; ``counted``: they are new, and not those of a second loss of the same samples."""
        if correct is not None:
            self.counts_correct = True
            self.sums[_CORRECT] += correct
        if counted:
            self.sums[_COUNT] += count

    def mark(self, loss: torch.Tensor, step: torch.Tensor | int) -> None:
        """Remember the step if it is the first whose loss is NaN."""
        now = step.double() if isinstance(step, torch.Tensor) else self.sums.new_full((), step)
        bad = torch.where(torch.isfinite(loss), self.sums.new_full((), math.inf), now)
        torch.minimum(self.sums[_BAD_STEP], bad, out=self.sums[_BAD_STEP])

    def peek(self) -> Figures | None:
        """The newest figures that are on the host already; never waits."""
        if self._arrival is not None and self._arrival.ready():
            self._shown = self._figures(self._arrival.result())
            self._arrival = None
        if self._arrival is None:
            self._arrival = backend.start_move(self.sums.clone(), torch.device("cpu"))
        return self._shown

    def send(self, step: int, world: World) -> None:
        """Send the sums over all ranks on their way to the host; never waits."""
        self._sent.append(_Sent(step, self.sums[:_BAD_STEP].clone(), world))

    def arrived(self, *, wait: bool) -> list[tuple[int, Figures]]:
        """The figures that have arrived on the host, with their steps; ``wait``: all that were sent."""
        figures = []
        while self._sent and (wait or self._sent[0].is_ready()):
            sent = self._sent.popleft()
            loss, correct, count = sent.sums()
            figures.append((sent.step, Figures(loss, correct, count, None, self.counts_correct)))
        return figures

    def read(self) -> Figures:
        return self._figures(self.sums.cpu())

    def restore(self, loss_sum: float, correct: float, count: float, *, counted: bool) -> None:
        """Go on from the sums of a checkpoint."""
        self.sums[:_BAD_STEP] = torch.tensor([loss_sum, correct, count], dtype=torch.float64)
        self.counts_correct = counted

    def _figures(self, sums: torch.Tensor) -> Figures:
        loss, correct, count, bad = sums.tolist()
        return Figures(loss, correct, count, None if math.isinf(bad) else int(bad), self.counts_correct)


class _Sent:
    """Sums on their way: first they are added up over the ranks, then they go to the host. Nobody waits for either."""

    def __init__(self, step: int, sums: torch.Tensor, world: World) -> None:
        self.step, self._sums = step, sums
        self._added_up = dist.all_reduce(sums, async_op=True) if world.size > 1 else None
        self._arrival = self._set_out() if self._added_up is None else None

    def _set_out(self) -> Arrival[torch.Tensor]:
        return backend.start_move(self._sums, torch.device("cpu"))

    def is_ready(self) -> bool:
        if self._arrival is None and self._added_up is not None and self._added_up.is_completed():
            self._added_up.wait()
            self._arrival = self._set_out()
        return self._arrival is not None and self._arrival.ready()

    def sums(self) -> list[float]:
        """Waits, where it is not there yet."""
        if self._arrival is None and self._added_up is not None:
            self._added_up.wait()
        arrival = self._arrival or self._set_out()
        return arrival.result().tolist()


def as_tensor(figures: Figures) -> torch.Tensor:
    bad = math.inf if figures.bad_step is None else figures.bad_step
    return torch.tensor([figures.loss_sum, figures.correct, figures.count, bad, figures.counted], dtype=torch.float64)


def from_tensor(values: torch.Tensor) -> Figures:
    loss, correct, count, bad, counted = values.tolist()
    return Figures(loss, correct, count, None if math.isinf(bad) else int(bad), bool(counted))
