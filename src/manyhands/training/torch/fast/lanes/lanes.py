"""The lanes of a fast step: what is put around its backward passes, and what there is to tell about it.

A step whose kernels are as they are is watched by a dispatch mode (:mod:`.eager`); a compiled one carries its
lanes in its graph (:mod:`.compiled`). Both are proved each time that a step is issued, which is while it warms up
and while it is captured; replays of the captured graph repeat that order.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from manyhands.schedule.lanes import Schedule
from manyhands.training.torch.fast.lanes.eager import Lanes, SideLanes, StreamLanes

if TYPE_CHECKING:
    from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

COUNT = 2  # side lanes
# Multiplications of a product that is worth a lane: cuBLAS keeps 33 MB of memory for each stream that it works on.
_LEAST_PRODUCT = 1 << 22


class Beside:
    """Side lanes for the steps of one device, each size of batch told apart."""

    def __init__(
        self, lanes: Lanes, device: str = "cpu", *, most_held: int | None = None, least_product: int = 0
    ) -> None:
        self._lanes, self._device = lanes, device
        self._most_held, self._least_product = most_held, least_product
        self._of: dict[int, SideLanes | CompiledLanes] = {}

    @classmethod
    def on_streams(cls, device: torch.device, main: torch.cuda.Stream, *, most_held: int | None = None) -> Beside:
        """Lanes that are streams beside the one that steps are captured on.

        ``most_held``: about how many bytes may be held for them that one lane would have let go.
        """
        lanes, name = StreamLanes(device, COUNT, main), f"gpu:{device.index or 0}"
        return cls(lanes, name, most_held=most_held, least_product=_LEAST_PRODUCT)

    def compile_options(self) -> dict[str, Any]:
        """For ``torch.compile``: what puts lanes into the graphs that it compiles."""
        from manyhands.training.torch.fast.lanes.inductor_pass import TakeAside

        return {"post_grad_custom_post_pass": TakeAside(self._most_held, self._least_product)}

    def around(self, size: int, *, compiled: bool) -> AbstractContextManager[Any]:
        """``with beside.around(256, compiled=False): loss.backward()``."""
        if size not in self._of:
            self._of[size] = self._for_compiled() if compiled else self._for_kernels()
        return self._of[size]

    def _for_kernels(self) -> SideLanes:
        limits: dict[str, Any] = {"most_held": self._most_held, "least_product": self._least_product}
        return SideLanes(self._lanes, COUNT, device=self._device, **limits)

    def _for_compiled(self) -> CompiledLanes:
        # Here and not above: it brings the compiler with it, which takes its time.
        from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

        return CompiledLanes(self._lanes, COUNT, device=self._device)

    def explain(self, size: int) -> list[str]:
        """Lanes, tasks and waits of a backward pass, and what goes aside."""
        made = self._of.get(size)
        if made is None or made.schedule is None:
            return ["  no backward pass on lanes yet"]
        if not made.aside:
            return ["  nothing goes aside: no gradient goes straight to a parameter"]
        lines = [_of_schedule(made.schedule)]
        for number, (lane, tasks) in enumerate(zip(made.schedule.lanes, made.schedule.per_lane(), strict=True)):
            names = Counter(made.schedule.graph.tasks[task].name for task in tasks)
            most = ", ".join(f"{count} {name}" for name, count in names.most_common(4))
            lines.append(f"    {lane} ({'side' if number else 'main'}): {len(tasks)} tasks ({most})")
        lines.append("  beside the backward pass:")
        return lines + [f"    {count} x {what}" for what, count in Counter(made.aside).items()]


def _of_schedule(made: Schedule) -> str:
    return f"  backward: {len(made.graph)} tasks on {len(made.lanes)} lanes, {made.wait_count()} waits, all proved"
