"""Runs one experiment in a separate process.

There are three reasons: virtual devices and the number of threads are fixed when a framework starts, one framework
takes all of a GPU's memory, and a crash must not stop the other experiments. The child prints its progress and pickles
its :class:`ExperimentResult` into a file. Its last lines are shown if it ends without a result.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands import machine
from manyhands.errors import ManyhandsError, NotMeasured, first_line
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment, load
from manyhands.lab.finding import Answer
from manyhands.lab.report import ExperimentResult, mark_virtual
from manyhands.placement.moves import VIRTUAL_DEVICES

# A virtual device is one core: otherwise a single device would use all cores, and two could not be faster.
_ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    # Products still use all cores: `mark_virtual` says so.
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip(),
    # Memory is reused, as GPU allocators do. Otherwise the kernel would clear new pages for every large tensor, which
    # costs more than the copies that the experiment shows.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_ARENA_MAX": "1",
}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def run(
    experiment: Experiment, framework: str, *, quick: bool, gpus: int, say: Callable[[str], None]
) -> ExperimentResult:
    """Run the experiment and return its result; an interrupt (Ctrl-C) ends the child and reaches the caller."""
    begin = time.perf_counter()
    environment = {name: value for name, value in {**_QUIET, **os.environ}.items() if name != VIRTUAL_DEVICES}
    environment |= _ONE_CORE if experiment.uses_one_core(gpus) else {}
    settings: dict[str, Any] = {"framework": framework, "quick": quick, "real_gpus": gpus}
    settings |= {"most_devices": experiment.devices, "apart": experiment.apart}
    last: deque[str] = deque(maxlen=3)  # what it said
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, experiment.name, json.dumps(settings), str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C reaches only us; we end the child
            env=environment,
        )
        assert child.stdout is not None
        try:
            for line in filter(None, map(str.strip, child.stdout)):
                last.append(line)
                say(line)
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # including the processes that the experiment has started
            child.wait()
            raise
        if file.exists():
            return pickle.loads(file.read_bytes())  # type: ignore[no-any-return]
    why = f"its process ended with status {child.returncode}: {' / '.join(last) or 'it said nothing'}"
    return ExperimentResult.of(experiment, framework, "failed", seconds=time.perf_counter() - begin, why=why)


def _measure(experiment: Experiment, bench: Bench) -> Answer:
    bench.recorded.clear()
    return experiment.run(bench)


def perform(experiment: Experiment, bench: Bench) -> ExperimentResult:
    """Run the experiment in this process, a second time if its times cannot be true; the result says how it ended."""
    begin = time.perf_counter()
    status, finding, why = "done", None, ""
    try:
        finding = machine.undisturbed(lambda: _measure(experiment, bench))
        finding = mark_virtual(finding, bench.virtual, bench.framework)
    except NotMeasured as reason:
        status, why = "not measured", f"the machine is busy: {reason}"
    except ManyhandsError as error:
        status, why = "failed", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        status, why = "failed", f"{first_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
    rest = {"finding": finding, "trials": bench.recorded, "virtual": bench.virtual, "why": why}
    return ExperimentResult.of(experiment, bench.framework, status, seconds=time.perf_counter() - begin, **rest)


def _child(name: str, settings: dict[str, Any], file: Path) -> None:
    mh = importlib.import_module(f"manyhands.{settings['framework']}")
    file.write_bytes(pickle.dumps(perform(load(name), Bench(mh, **settings))))


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
