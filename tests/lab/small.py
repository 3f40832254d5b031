"""Runs experiments in this process with sizes that only show that they work: ``python small.py FRAMEWORK NAME...``.

Prints one line of JSON for each: its result, as it is in a report.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from manyhands import machine
from manyhands.lab import process
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import load
from manyhands.lab.experiments import training_scaling
from manyhands.lab.finding import Times


class SmallBench(Bench):
    """An eighth of the sizes of ``--quick``, and two rounds."""

    def size(self, *, gpu: int, cpu: int, quick: int) -> int:
        return max(2, quick // 8)

    def trials(
        self, methods: Mapping[str, Callable[[], Any]], settings: Mapping[str, Any] | None = None, *, rounds: int = 0
    ) -> Times:
        return super().trials(methods, settings, rounds=2)


def main(framework: str, names: list[str]) -> None:
    training_scaling.jobs = lambda bench: [  # type: ignore[assignment]
        training_scaling.TrainingJob("lenet", batch_size, 0.05) for batch_size in (32, 128)
    ]
    # Sizes as small as these say nothing about time, so no time is refused.
    machine.check_load = lambda: None
    compare = Times.compare
    Times.compare = lambda self, name, to, most=0: compare(self, name, to)  # type: ignore[method-assign]
    # One bench's devices serve all: their number cannot change in a process.
    asked = [load(name) for name in names]
    most, apart = max(each.devices for each in asked), all(each.apart for each in asked)
    mh = importlib.import_module(f"manyhands.{framework}")
    bench = SmallBench(mh, framework, quick=True, most_devices=most, apart=apart)
    for name in names:
        begin = time.perf_counter()
        bench.virtual, bench.recorded = [], []
        result = process.perform(load(name), bench)
        print(json.dumps(asdict(result)), flush=True)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
