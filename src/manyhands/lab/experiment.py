"""How an experiment is declared: one short file in ``lab/experiments/``, listed in ``experiments/__init__.py``.

docs/lab.md explains how to write one; ``experiments/steps_in_flight.py`` is an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.device import FRAMEWORKS

if TYPE_CHECKING:
    from manyhands.lab.bench import Bench
    from manyhands.lab.finding import Finding


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, the chapter's exercise that it answers, and the function that answers it.

    ``frameworks``: those in which it makes sense. ``devices``: how many it may ask ``bench.devices`` for; if the
    machine has fewer, this many virtual ones are made. ``devices=1`` means the GPU if there is one, else the CPU.
    ``apart``: none of them may be the host, because the experiment shows copies. ``one_core``: without a GPU, the CPU
    computes with one thread, because the experiment compares methods and not numbers of threads.
    """

    name: str
    run: Callable[[Bench], Finding]
    question: str
    exercise: str
    frameworks: tuple[str, ...] = FRAMEWORKS
    devices: int = 1
    apart: bool = False
    one_core: bool = False

    def uses_one_core(self, gpus: int) -> bool:
        """Whether each device is one core of the CPU, on a machine with this many GPUs."""
        virtual = self.devices > (gpus if self.apart else max(1, gpus))
        return virtual or (self.one_core and not gpus)


def experiment(
    name: str,
    *,
    question: str,
    exercise: str,
    frameworks: tuple[str, ...] = FRAMEWORKS,
    devices: int = 1,
    apart: bool = False,
    one_core: bool = False,
) -> Callable[[Callable[[Bench], Finding]], Experiment]:
    """Turn a function into an :class:`Experiment`."""
    return lambda run: Experiment(name, run, question, exercise, frameworks, devices, apart, one_core)
