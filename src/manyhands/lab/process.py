"""Runs one experiment in a separate process.

There are three reasons: virtual devices and the number of threads are fixed when a framework starts, one framework
takes all of a GPU's memory, and a crash must not stop the other experiments. The child pickles into a pipe: strings
(progress) and finally its :class:`Result`. The output of frameworks goes to a file, whose end is shown if the child
dies without a result.
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
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from manyhands.errors import ManyhandsError, NotHere, first_line
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment, load
from manyhands.lab.finding import Finding, Implausible
from manyhands.lab.report import Result, Status, marked
from manyhands.placement.moves import VIRTUAL_DEVICES

# A virtual device is one core: otherwise a single device would use all cores, and two could not be faster.
_AS_DEVICES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",  # products still use all cores: `marked` says so
    # Memory is reused, as GPU allocators do. Otherwise the kernel would clear new pages for every large tensor, which
    # costs more than the copies that the experiment shows.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_ARENA_MAX": "1",
}
_BUSY = 30.0  # percent of the CPU that other programs use
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def run(experiment: Experiment, framework: str, *, quick: bool, gpus: int, say: Callable[[str], None]) -> Result:
    """Run the experiment and return its result; an interrupt (Ctrl-C) ends the child and reaches the caller."""
    reading, writing = os.pipe()
    settings = {"experiment": experiment.name, "framework": framework, "quick": quick, "gpus": gpus, "pipe": writing}
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(settings)],
            stdin=subprocess.PIPE,  # the child ends when this end is closed, even if we are killed
            stdout=noise,
            stderr=noise,
            pass_fds=(writing,),
            start_new_session=True,  # a terminal's Ctrl-C reaches only us; we end the child
            env=environment(one_core=experiment.uses_one_core(gpus)),
        )
        os.close(writing)
        try:
            with open(reading, "rb") as stream:
                while isinstance(message := _next(stream), str):
                    say(message)
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # including the processes that the experiment has started
            child.wait()
            raise
        finally:
            assert child.stdin is not None
            child.stdin.close()
        if message is not None:
            return message
        noise.seek(0)
        last = [line.strip() for line in noise if line.strip()][-3:]
    why = f"its process ended with status {child.returncode}: {' / '.join(last) or 'it said nothing'}"
    return _result(experiment, framework, "failed", begin, why=why)


def _next(stream: Any) -> str | Result | None:
    """What the child sends next; None if it has ended without a result."""
    try:
        message: str | Result = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):
        return None
    return message


def environment(*, one_core: bool) -> dict[str, str]:
    """The child's environment variables; the child creates its virtual devices itself."""
    threads = dict(_AS_DEVICES) if one_core else {}
    if "XLA_FLAGS" in threads and "XLA_FLAGS" in os.environ:
        threads["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {threads['XLA_FLAGS']}"
    inherited = {name: value for name, value in os.environ.items() if name != VIRTUAL_DEVICES}
    return {**_QUIET, **inherited, **threads}


def check_load() -> None:
    """Raise if other programs use the CPU; call it while this process computes nothing."""
    import psutil

    load = psutil.cpu_percent(interval=0.5)
    if load > _BUSY:
        raise Implausible(f"other programs use {load:.0f}% of the CPU")


def _measure(experiment: Experiment, bench: Bench) -> Finding:
    bench.recorded.clear()
    check_load()
    finding = experiment.run(bench)
    check_load()
    return marked(finding, bench.virtual, bench.framework)


def perform(experiment: Experiment, bench: Bench) -> Result:
    """Run the experiment in this process, a second time if its times cannot be true; the result says how it ended."""
    begin = time.perf_counter()
    status: Status = "done"
    finding, why = None, ""
    try:
        try:
            finding = _measure(experiment, bench)
        except Implausible:
            finding = _measure(experiment, bench)
    except NotHere as reason:
        status, why = "not here", str(reason)
    except Implausible as reason:
        status, why = "not measured", f"the machine is busy: {reason}"
    except ManyhandsError as error:
        status, why = "failed", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        status, why = "failed", f"{first_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
    rest = {"finding": finding, "trials": bench.recorded, "virtual": bench.virtual, "why": why}
    return _result(experiment, bench.framework, status, begin, **rest)


def _result(experiment: Experiment, framework: str, status: Status, begin: float, **rest: Any) -> Result:
    spent = time.perf_counter() - begin
    return Result(experiment.name, experiment.question, experiment.exercise, framework, status, spent, **rest)


def _child(settings: dict[str, Any]) -> None:
    os.set_inheritable(settings["pipe"], False)  # a process that the experiment starts must not hold it open
    threading.Thread(target=_end_with_parent, daemon=True).start()
    experiment = load(settings["experiment"])
    with open(settings["pipe"], "wb") as stream:

        def send(message: str | Result) -> None:
            pickle.dump(message, stream)
            stream.flush()

        bench = Bench(
            importlib.import_module(f"manyhands.{settings['framework']}"),
            settings["framework"],
            quick=settings["quick"],
            real_gpus=settings["gpus"],
            most_devices=experiment.devices,
            apart=experiment.apart,
            say=send,
        )
        send(perform(experiment, bench))


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: if a thread holds its lock when Python exits, that is a fatal error
    os._exit(1)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
