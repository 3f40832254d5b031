"""Runs one experiment in a separate process.

There are three reasons: virtual devices and the number of threads are fixed when a framework starts, one framework
takes all of a GPU's memory, and a crash must not stop the other experiments. The child writes to a pipe, one JSON
object per line: ``say`` (progress) and finally ``result``. The output of frameworks goes to a file, whose end is shown
if the child dies without a result.
"""

from __future__ import annotations

import importlib
import json
import os
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
from manyhands.lab import experiments
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.result import Result, marked
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
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def run(experiment: Experiment, framework: str, *, quick: bool, gpus: int, say: Callable[[str], None]) -> Result:
    """Run the experiment and return its result; an interrupt (Ctrl-C) ends the child and reaches the caller."""
    reading, writing = os.pipe()
    settings = {"experiment": experiment.name, "framework": framework, "quick": quick, "gpus": gpus, "pipe": writing}
    begin, result_data = time.perf_counter(), None
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
            with open(reading) as lines:
                for line in lines:
                    message = json.loads(line)
                    if "say" in message:
                        say(message["say"])
                    result_data = message.get("result", result_data)
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # including the processes that the experiment has started
            child.wait()
            raise
        finally:
            assert child.stdin is not None
            child.stdin.close()
        if result_data is not None:
            return Result.from_data(result_data)
        noise.seek(0)
        last = [line.strip() for line in noise if line.strip()][-3:]
    why = f"its process ended with status {child.returncode}: {' / '.join(last) or 'it said nothing'}"
    seconds = time.perf_counter() - begin
    return Result(experiment.name, experiment.question, framework, "failed", seconds, why=why)


def environment(*, one_core: bool) -> dict[str, str]:
    """The child's environment variables; the child creates its virtual devices itself."""
    threads = dict(_AS_DEVICES) if one_core else {}
    if "XLA_FLAGS" in threads and "XLA_FLAGS" in os.environ:
        threads["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {threads['XLA_FLAGS']}"
    inherited = {name: value for name, value in os.environ.items() if name != VIRTUAL_DEVICES}
    return {**_QUIET, **inherited, **threads}


def perform(experiment: Experiment, bench: Bench) -> Result:
    """Run the experiment in this process; the result says how it ended."""
    begin = time.perf_counter()
    status, finding, why = "done", None, ""
    try:
        finding = marked(experiment.run(bench), bench.virtual, bench.framework)
    except NotHere as reason:
        status, why = "not here", str(reason)
    except ManyhandsError as error:
        status, why = "failed", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        status, why = "failed", f"{first_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return Result(
        experiment.name,
        experiment.question,
        bench.framework,
        status,  # type: ignore[arg-type]
        time.perf_counter() - begin,
        finding,
        bench.recorded,
        bench.virtual,
        why,
    )


def _child(settings: dict[str, Any]) -> None:
    pipe = settings["pipe"]
    os.set_inheritable(pipe, False)  # a process that the experiment starts must not hold it open
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    experiment = experiments.load(settings["experiment"])
    bench = Bench(
        importlib.import_module(f"manyhands.{settings['framework']}"),
        settings["framework"],
        quick=settings["quick"],
        real_gpus=settings["gpus"],
        most_devices=experiment.devices,
        apart=experiment.apart,
        say=lambda text: send({"say": text}),
    )
    data = json.dumps({"result": perform(experiment, bench).as_data()}).encode() + b"\n"
    with open(pipe, "wb") as stream:
        stream.write(data)


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: if a thread holds its lock when Python exits, that is a fatal error
    os._exit(1)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
