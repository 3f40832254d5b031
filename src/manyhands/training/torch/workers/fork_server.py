"""A process that loads PyTorch once and forks the workers of CPUs.

Loading PyTorch takes seconds of each worker's time, and a worker's first optimizer step loads as much again. The server
has done both. A fork of it starts in milliseconds, the first pool loads PyTorch once instead of once per rank, and
pools that follow (after an error, for other ranks, for changed code) load nothing.

The server runs no user code and no threads of its own, and ends with its caller. Workers of GPUs are not forked: CUDA
must not be in use before a fork, and what an import of PyTorch uses differs between versions.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import IO, Any

from manyhands.errors import WorkerFailed

_START_SECONDS = 120
_MESSAGE_BYTES = 1 << 16
_LOST = 255  # the status of a worker whose server is gone
# pytest sets it anew for each test; no library reads it.
_IGNORED = ("PYTEST_CURRENT_TEST",)


class CodeFiles:
    """The files of some loaded modules. A process that has loaded them does not load them again when they change."""

    def __init__(self, counts: Callable[[str, str], bool]) -> None:
        """``counts``: whether a module of this name and file is one of them."""
        self._counts = counts
        self._times = self._times_now()

    def changed(self) -> bool:
        """Whether a file has changed since it was first seen."""
        now = self._times_now()
        changed = any(self._times.get(path, when) != when for path, when in now.items())
        self._times = {**now, **self._times}
        return changed

    def _times_now(self) -> dict[str, int]:
        times = {}
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and self._counts(name, path):
                with contextlib.suppress(OSError):
                    times[path] = os.stat(path).st_mtime_ns
        return times


class Forked:
    """A worker that the server forked, with the methods of ``subprocess.Popen`` that a pool calls."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self.returncode, self._server, self._lock = pid, None, server, threading.Lock()
        # The server collects a worker's exit status only on request: until then no other process gets its number.
        self._descriptor = os.pidfd_open(pid)

    returncode: int | None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and wait([self._descriptor], 0):
                self.returncode = self._server.status(self.pid)
                os.close(self._descriptor)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and not wait([self._descriptor], timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server, as its caller sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self._code = environment, CodeFiles(_is_ours)
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(1)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether it is alive, and a new process would load the same code in the same environment."""
        return not self._code.changed() and environment == self.environment and self.process.poll() is None

    def fork(self, address: str, rank: int, key: bytes, output: int, log: int) -> Forked:
        """A new worker, as ``worker.main(address, rank)``; it writes to the two file descriptors."""
        request = {
            "address": address,
            "rank": rank,
            "key": key.hex(),
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        try:
            return Forked(self, self._ask(request, output, log))
        except BaseException:  # an answer that is still on its way would be taken for the next one
            self.stop()
            raise

    def status(self, pid: int) -> int:
        """The exit status of a worker that has ended."""
        try:
            return self._ask({"ended": pid})
        except (OSError, WorkerFailed):
            return _LOST

    def _ask(self, request: dict[str, Any], *descriptors: int) -> int:
        try:
            socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
            until = time.monotonic() + _START_SECONDS
            while time.monotonic() < until:
                with contextlib.suppress(TimeoutError):
                    if reply := self.socket.recv(_MESSAGE_BYTES):
                        return int(reply)
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        raise WorkerFailed("the process that starts the workers did not answer:\n" + "\n".join(text.splitlines()[-30:]))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.output.close()


_server: ForkServer | None = None


def usable() -> bool:
    """Whether this system can watch processes that are not its children (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def current(environment: dict[str, str]) -> ForkServer:
    """The running server, if it fits the environment, else a new one."""
    global _server
    environment = {name: value for name, value in environment.items() if name not in _IGNORED}
    if _server is None or not _server.fits(environment):
        stop()
        _server = ForkServer(environment)
    return _server


def stop() -> None:
    """End the server, if there is one. Its workers stay."""
    global _server
    if _server is not None:
        _server.stop()
        _server = None


def forget() -> ForkServer | None:
    """Return the server and forget it: in a fork of the caller it belongs to the parent."""
    global _server
    server, _server = _server, None
    return server


def _is_ours(name: str, path: str) -> bool:
    """Whether a module is one of this library's: the server has loaded them too."""
    return name.partition(".")[0] == "manyhands"


# In the server


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they are for the caller and its workers
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as requests:
        _load()
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
            if not message:
                return
            request = json.loads(message)
            if "ended" in request:
                reply = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
            else:
                reply = _fork(requests, request, descriptors)
            requests.send(str(reply).encode())


def _load() -> None:
    """All that a worker loads up to its first step."""
    import torch

    from manyhands.training.torch.workers import worker  # noqa: F401

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.zero_grad()
    optimizer.step()
    gc.collect()
    gc.freeze()  # what is never collected stays in memory that all workers share


def _fork(requests: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads: they are idle, and safe to fork
        pid = os.fork()
    if pid == 0:
        try:
            requests.close()
            _become_worker(request, descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    import numpy as np

    from manyhands.training.torch.workers import worker

    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    os.environ["MANYHANDS_WORKER_KEY"] = request["key"]
    np.random.seed()  # each process has numbers of its own, as Python's and PyTorch's generators see to themselves
    worker.main(request["address"], request["rank"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
