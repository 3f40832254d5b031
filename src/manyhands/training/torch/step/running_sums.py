"""Loss and accuracy of an epoch, summed on the device and read late.

Adding to them makes no host wait. :meth:`RunningSums.peek` starts a copy to the host and gives the newest one that has
arrived; :meth:`RunningSums.read` waits, and is for the end of an epoch.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from manyhands.backends.protocol import Arrival
from manyhands.backends.torch import devices as backend
from manyhands.errors import BadSettings
from manyhands.training.running_sums import Totals
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.step import logged

# Behind the first four numbers: which names were logged, by how many ranks, and a sum and a weight for each name.
_LOSS, _CORRECT, _COUNT, _BAD_STEP, _NAMES, _RANKS, _LOGGED = range(7)


class RunningSums:
    """Numbers on the device: sum of losses, correct predictions, samples, first bad step (or infinity), logged values.

    Their place is fixed, for the graphs of captured steps add to them.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(_LOGGED + 2 * logged.MOST, dtype=torch.float64, device=device)
        self.counts_correct = False
        self._names: dict[str, int] = {}  # that were logged, and where their sums are; in the same order on every rank
        self.logged_number: str | None = None  # a name whose value a graph would freeze
        self._arrival: Arrival[torch.Tensor] | None = None
        self._shown: Totals | None = None
        self._sent: deque[_Sent] = deque()
        self.reset()

    def reset(self) -> None:
        self.sums.zero_()
        self.sums[_BAD_STEP].fill_(math.inf)
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

    def log(self, values: Iterable[logged.LoggedValue], size: int) -> None:
        """Add what a pass over so many samples has logged."""
        for name, value, weight in ((each.name, each.value, each.weight) for each in values if size):
            place, weight = self._place_of(name), size if weight is None else weight
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                shape = tuple(value.shape)
                raise BadSettings(f"self.log({name!r}, tensor of shape {shape}): log one number, as value.mean()")
            if not isinstance(value, torch.Tensor) or value.device != self.sums.device:
                self.logged_number = name
            if isinstance(value, torch.Tensor):
                self.sums[place].add_(value.reshape(()).to(torch.float64), alpha=weight)
            else:
                self.sums[place] += value * weight
            self.sums[place + 1] += weight

    def _place_of(self, name: str) -> int:
        if name not in self._names and len(self._names) == logged.MOST:
            raise BadSettings(f"self.log({name!r}, ...): a model may log {logged.MOST} names")
        return self._names.setdefault(name, _LOGGED + 2 * len(self._names))

    def mark(self, loss: torch.Tensor, step: torch.Tensor | int) -> None:
        """Remember the step if it is the first whose loss is NaN."""
        now = step.double() if isinstance(step, torch.Tensor) else self.sums.new_full((), step)
        bad = torch.where(torch.isfinite(loss), self.sums.new_full((), math.inf), now)
        torch.minimum(self.sums[_BAD_STEP], bad, out=self.sums[_BAD_STEP])

    def peek(self) -> Totals | None:
        """The newest totals that are on the host already; never waits."""
        if self._arrival is not None and self._arrival.ready():
            self._shown = self._totals(self._arrival.result().tolist())
            self._arrival = None
        if self._arrival is None:
            self._arrival = backend.start_move(self.sums.clone(), torch.device("cpu"))
        return self._shown

    def send(self, step: int, world: World) -> None:
        """Send the sums over all ranks on their way to the host; never waits."""
        sums = self.sums.clone()
        sums[_NAMES].fill_(_digest(self._names))  # a number that is assigned waits for the device
        sums[_RANKS].fill_(bool(self._names))
        self._sent.append(_Sent(step, sums, world))

    def take_arrived(self, *, wait: bool) -> list[tuple[int, Totals]]:
        """The totals that have arrived on the host, with their steps; ``wait``: all that were sent."""
        totals = []
        while self._sent and (wait or self._sent[0].is_ready()):
            sent = self._sent.popleft()
            totals.append((sent.step, dataclasses.replace(self._totals(sent.sums()), bad_step=None)))
        return totals

    def read(self) -> Totals:
        return self._totals(self.sums.tolist())

    def restore(self, totals: Totals) -> None:
        """Go on from the sums of a checkpoint."""
        counts = (totals.loss_sum, totals.correct, totals.count)
        self.sums[:_BAD_STEP] = torch.tensor(counts, dtype=torch.float64)
        self.counts_correct = totals.counted
        for name, sums in totals.logged.items():
            place = self._place_of(name)
            self.sums[place : place + 2] = torch.tensor(sums, dtype=torch.float64)

    def _totals(self, sums: Sequence[float]) -> Totals:
        loss, correct, count, bad, names, ranks, *_ = sums
        same = names == ranks * _digest(self._names)  # on all ranks whose sums these are
        by_name = {name: (sums[place], sums[place + 1]) for name, place in self._names.items()} if same else {}
        return Totals(loss, correct, count, None if math.isinf(bad) else int(bad), self.counts_correct, by_name)


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


def _digest(names: Iterable[str]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))
