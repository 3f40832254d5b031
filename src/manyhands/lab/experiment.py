'''How an experiment is written.

One short file in ``lab/experiments/``, listed in ``experiments/__init__.py``: the question, the code that a reader
would write, the trials, the plot, and the sentence that the figures support::

    """Two devices, fifty matrix products each: do they work at once?"""

    @experiment("two-devices", question="Do two devices work at once?", devices=2)
    def run(bench: Bench) -> Finding:
        mh = bench.mh                                        # the framework's door: the public verbs
        size = bench.size(gpu=4000, cpu=300, quick=200)
        inputs = [bench.random((size, size), device) for device in bench.devices(2)]

        def at_once():
            with mh.parallel():
                tasks = [mh.task(products)(x) for x in inputs]
            return [task.result() for task in tasks]
        ...
        bench.equal(at_once(), one_after_the_other())        # before any timing: raises if they differ
        times = bench.trials({"one after the other": one_after_the_other, "at once": at_once})
        gain = times.compare("at once", to="one after the other")
        conclusion = f"At once {gain}." if gain.faster else ...
        return Finding(conclusion, [times.table(to="one after the other")], [times.bars("Two devices")])

The runner does the rest:

- It runs each experiment in a separate process. If an experiment asks for more ``devices`` than the machine has, they
  are virtual: each is one core of the CPU, and the report marks every table, plot and conclusion that uses them.
- It keeps every trial of ``bench.trials``. Trials alternate, and each ends with a wait for all devices.
- It shows errors in the report, and continues with the other experiments. ``bench.not_here("why")`` is not an error:
  the experiment has nothing to show on this machine or in this framework.

Write framework-neutral code: ``bench.random``, ``bench.operations.matmul``, ``norm``, ``relu`` compute on the device of
their arguments; ``a + b`` and ``a * b`` work everywhere (if there is a GPU, TensorFlow computes them on it). The
conclusion follows from the figures, so write one sentence for each outcome: a gain, no clear difference, a loss.
With ``--quick`` an experiment must end in about fifteen seconds on two cores.
'''

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
    """A question and the function that answers it."""

    name: str
    question: str
    frameworks: tuple[str, ...]
    devices: int
    apart: bool
    run: Callable[[Bench], Finding]
    one_core: bool = False

    def uses_one_core(self, gpus: int) -> bool:
        """Whether each device is one core of the CPU, on a machine with this many GPUs."""
        return self.virtual(gpus) or (self.one_core and not gpus)

    def virtual(self, gpus: int) -> bool:
        """Whether it uses virtual devices, on a machine with this many GPUs."""
        return self.devices > (gpus if self.apart else max(1, gpus))


def experiment(
    name: str,
    *,
    question: str,
    frameworks: tuple[str, ...] = FRAMEWORKS,
    devices: int = 1,
    apart: bool = False,
    one_core: bool = False,
) -> Callable[[Callable[[Bench], Finding]], Experiment]:
    """Turn a function into an experiment.

    ``frameworks``: the frameworks in which it makes sense. ``devices``: how many it may ask ``bench.devices`` for; if
    the machine has fewer, this many virtual ones are made. ``devices=1`` means the GPU if there is one, else the CPU.
    ``apart``: none of them may be the host, because the experiment shows copies. ``one_core``: without a GPU, the CPU
    computes with one thread, because the experiment compares ways and not numbers of threads (if other programs run,
    two threads can be much slower).
    """

    def make(function: Callable[[Bench], Finding]) -> Experiment:
        return Experiment(name, question, frameworks, devices, apart, function, one_core)

    return make
