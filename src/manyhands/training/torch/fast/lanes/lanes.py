"""The side lanes of a fast step, for each batch size, and their description.

In a step that is not compiled a dispatch mode assigns the lanes (:mod:`.eager`); a compiled one has them in its graph
(:mod:`.compiled`). Casts of weights begin with the forward pass, and the
update has two halves (:mod:`.forked`). Each issue of a step is checked, in
the warm-up and in the capture; replays repeat that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from manyhands.training.torch.fast.lanes.eager import Lanes, SideLanes, StreamLanes
from manyhands.training.torch.fast.lanes.forked import ForkedWork

if TYPE_CHECKING:
    from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

COUNT = 2  # side lanes of a backward pass
# A lane that no pass uses: it allocates nothing that others have freed, and waits for none of them.
_METRICS = COUNT + 1
# Multiplications of a product that is worth a lane: cuBLAS keeps 33 MB of memory for each stream that it works on.
_LEAST_PRODUCT = 1 << 22


class Beside:
    """Side lanes for the steps of one device; each batch size has its own."""

    def __init__(
        self, lanes: Lanes, device: str = "cpu", *, most_held: int | None = None, least_product: int = 0
    ) -> None:
        self._lanes, self._device = lanes, device
        self._most_held, self._least_product = most_held, least_product
        self._of: dict[int, SideLanes | CompiledLanes] = {}
        self.forked = ForkedWork(lanes, device)  # for casts of weights, and half of the update

    @classmethod
    def on_streams(cls, device: torch.device, main: torch.cuda.Stream, *, most_held: int | None = None) -> Beside:
        """Lanes that are streams beside the one that steps are captured on.

        ``most_held``: about how many bytes may be held for them that one lane would have let go.
        """
        lanes, name = StreamLanes(device, COUNT + 1, main), f"gpu:{device.index or 0}"
        return cls(lanes, name, most_held=most_held, least_product=_LEAST_PRODUCT)

    def compile_options(self) -> dict[str, Any]:
        """For ``torch.compile``: what puts lanes into the graphs that it compiles."""
        from manyhands.training.torch.fast.lanes.inductor_pass import TakeAside

        return {"post_grad_custom_post_pass": TakeAside(self._most_held, self._least_product)}

    def around(self, size: int, *, compiled: bool) -> AbstractContextManager[Any]:
        """``with beside.around(256, compiled=False): loss.backward()``."""
        if size not in self._of and compiled:
            # Here and not above: it imports the compiler, which takes time.
            from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

            self._of[size] = CompiledLanes(self._lanes, COUNT, device=self._device)
        elif size not in self._of:
            limits: dict[str, Any] = {"most_held": self._most_held, "least_product": self._least_product}
            self._of[size] = SideLanes(self._lanes, COUNT, device=self._device, **limits)
        return self._of[size]

    @contextmanager
    def on_one_stream(self) -> Iterator[None]:
        """Within it the lanes of streams are one: for steps that warm up."""
        lanes = self._lanes
        if not isinstance(lanes, StreamLanes):
            yield
            return
        lanes.together = True
        try:
            yield
        finally:
            lanes.together = False

    def mark(self) -> Any:
        """This point of the main lane."""
        return self._lanes.mark(0)

    @contextmanager
    def from_mark(self, mark: Any) -> Iterator[None]:
        """Within it work goes to a lane of its own, behind a mark of the main lane, which waits for it at the end.

        What it reads must be complete at the mark, and must be left alone and held until the end.
        """
        self._lanes.wait(_METRICS, mark)
        try:
            with self._lanes.on(_METRICS):
                yield
        finally:
            self._lanes.wait(0, self._lanes.mark(_METRICS))

    def explain(self, size: int) -> list[str]:
        """Lanes, tasks and waits of a backward pass, and what goes aside."""
        lanes = self._of.get(size)
        if lanes is None or lanes.schedule is None:
            return ["  no backward pass on lanes yet"]
        if not lanes.aside:
            return ["  nothing runs on side lanes: no gradient goes straight to a parameter"]
        schedule = lanes.schedule
        counts = f"{len(schedule.graph)} tasks on {len(schedule.lanes)} lanes, {schedule.wait_count()} waits"
        lines = [f"  backward: {counts}, all checked"]
        for number, (lane, tasks) in enumerate(zip(schedule.lanes, schedule.per_lane(), strict=True)):
            names = Counter(schedule.graph.tasks[task].name for task in tasks)
            most = ", ".join(f"{count} {name}" for name, count in names.most_common(4))
            lines.append(f"    {lane} ({'side' if number else 'main'}): {len(tasks)} tasks ({most})")
        lines.append("  beside the backward pass:")
        return lines + [f"    {count} x {kind}" for kind, count in Counter(lanes.aside).items()]
