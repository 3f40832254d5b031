"""The side lanes of a captured step, for each kind of micro-batch, and their description.

In a step that is not compiled, a dispatch mode assigns the lanes (:mod:`.eager`); a compiled step has them in its graph
(:mod:`.compiled`). The order is checked each time a step is issued, in the warm-up and in the capture; replays repeat
that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from manyhands.amounts import counted
from manyhands.training.torch.fast.lanes.eager import Lanes, SideLanes, StreamLanes

if TYPE_CHECKING:
    from manyhands.training.torch.fast.lanes.compiled import CompiledLanes, MoveToSideLanes

COUNT = 2  # side lanes of a backward pass
# The fewest multiplications for which a product is worth a lane: cuBLAS keeps 33 MB for each stream that it runs on.
_MIN_PRODUCT = 1 << 22


class StepLanes:
    """Side lanes for the steps of one device, separately for each kind of micro-batch."""

    def __init__(self, lanes: Lanes, device: str = "cpu", *, max_held: int | None = None, min_product: int = 0) -> None:
        self._lanes, self._device = lanes, device
        self._max_held, self._min_product = max_held, min_product
        self._of: dict[Hashable, SideLanes | CompiledLanes] = {}

    @classmethod
    def on_streams(cls, device: torch.device, main: torch.cuda.Stream, *, max_held: int | None = None) -> StepLanes:
        """CUDA streams as lanes, next to the stream that steps are captured on.

        ``max_held``: about how many bytes the lanes may hold that a single lane would already have freed.
        """
        lanes, name = StreamLanes(device, COUNT, main), f"gpu:{device.index or 0}"
        return cls(lanes, name, max_held=max_held, min_product=_MIN_PRODUCT)

    def inductor_pass(self) -> MoveToSideLanes:
        """The pass that adds lanes to the graphs of a compiled step."""
        from manyhands.training.torch.fast.lanes.compiled import MoveToSideLanes

        return MoveToSideLanes(self._max_held, self._min_product)

    def during_backward(self, kind: Hashable, *, compiled: bool) -> AbstractContextManager[Any]:
        """``with lanes.during_backward(kind, compiled=False): loss.backward()``."""
        if kind not in self._of and compiled:
            # Imported here, because it imports the compiler, which takes time.
            from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

            self._of[kind] = CompiledLanes(self._lanes, COUNT, device=self._device)
        elif kind not in self._of:
            limits: dict[str, Any] = {"max_held": self._max_held, "min_product": self._min_product}
            self._of[kind] = SideLanes(self._lanes, COUNT, device=self._device, **limits)
        return self._of[kind]

    @contextmanager
    def on_one_stream(self) -> Iterator[None]:
        """A context in which all lanes use one stream: for warm-up steps."""
        lanes = self._lanes
        if not isinstance(lanes, StreamLanes):
            yield
            return
        lanes.together = True
        try:
            yield
        finally:
            lanes.together = False

    def explain(self, kind: Hashable) -> list[str]:
        """The lanes, tasks and waits of a backward pass, and which gradients run on side lanes."""
        lanes = self._of.get(kind)
        if lanes is None or lanes.schedule is None:
            return ["  no backward pass on lanes yet"]
        if not lanes.moved:
            return ["  nothing runs on side lanes: no gradient goes straight to a parameter"]
        schedule = lanes.schedule
        counts = (
            f"{counted(len(schedule.graph), 'task')} on {counted(len(schedule.lanes), 'lane')}, "
            f"{counted(schedule.wait_count(), 'wait')}"
        )
        lines = [f"  backward: {counts}, all checked"]
        for number, (lane, tasks) in enumerate(zip(schedule.lanes, schedule.per_lane(), strict=True)):
            names = Counter(schedule.graph.tasks[task].name for task in tasks)
            most = ", ".join(f"{count} {name}" for name, count in names.most_common(4))
            lines.append(f"    {lane} ({'side' if number else 'main'}): {counted(len(tasks), 'task')} ({most})")
        lines.append("  in parallel with the backward pass:")
        return lines + [f"    {count} x {kind}" for kind, count in Counter(lanes.moved).items()]
