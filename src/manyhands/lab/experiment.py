"""How an experiment is declared: one short file in ``lab/experiments/``, and its name in the list below.

docs/lab.md explains how to write one; ``experiments/steps_in_flight.py`` is an example.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings

if TYPE_CHECKING:
    from manyhands.lab.bench import Bench
    from manyhands.lab.finding import Answer

# In the order in which they are listed and run; the module of each has "_" for "-".
NAMES = (
    "cpu-or-gpu",
    "logging-norms",
    "how-linear",
    "eight-operations",
    "all-busy",
    "harder-graphs",
    "training-scaling",
    "unequal-devices",
    "steps-in-flight",
    "parameter-access",
    "many-small-tensors",
)


def _nothing(bench: Bench) -> Answer:
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, the chapter's exercise that it answers, and the function that answers it, which it decorates.

    ``frameworks``: those in which it makes sense. ``devices``: how many it may ask ``bench.devices`` for; if the
    machine has fewer, this many virtual ones are made. ``devices=1`` means the GPU if there is one, else the CPU.
    ``apart``: none of them may be the host, because the experiment shows copies. ``one_core``: without a GPU, the CPU
    computes with one thread, because the experiment compares methods and not numbers of threads.
    """

    name: str
    question: str
    exercise: str
    frameworks: tuple[str, ...] = FRAMEWORKS
    devices: int = 1
    apart: bool = False
    one_core: bool = False
    run: Callable[[Bench], Answer] = _nothing

    def __call__(self, run: Callable[[Bench], Answer]) -> Experiment:
        return replace(self, run=run)

    def uses_one_core(self, gpus: int) -> bool:
        """Whether each device is one core of the CPU, on a machine with this many GPUs."""
        virtual = self.devices > (gpus if self.apart else max(1, gpus))
        return virtual or (self.one_core and not gpus)


def load(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        guess = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise BadSettings(f"there is no experiment {name!r}; {guess}")
    loaded: Experiment = importlib.import_module(f"manyhands.lab.experiments.{name.replace('-', '_')}").run
    return loaded
