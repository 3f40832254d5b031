"""A process that loads PyTorch once and forks the workers of CPUs (on Linux).

Loading PyTorch takes seconds of each worker's time, and a worker's first optimizer step loads as much again. The server
has done both: a fork of it starts in milliseconds. The standard library's server would import the caller's main module.

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
import time
import traceback
import warnings
from typing import Any

from manyhands.errors import WorkerFailed

_START_SECONDS = 120
_MESSAGE_BYTES = 1 << 16
_LOST = 255  # the status of a worker whose server is gone; without its caller's connection it ends


class Forked:
    """A worker that the server forked, with the methods of ``subprocess.Popen`` that a pool calls."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._server.ask({"status": self.pid})
            except (OSError, WorkerFailed):
                self.returncode = _LOST
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is its own until the server has collected its status
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server, as its caller sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self._asked = environment, 0
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(_START_SECONDS)
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, env=environment, pass_fds=[other.fileno()], **streams)

    def fork(self, address: str, rank: int, key: bytes, output: int, log: int) -> Forked:
        """A new worker, as ``worker.main(address, rank)``; it writes to the two file descriptors."""
        cores = sorted(os.sched_getaffinity(0))
        place = {"address": address, "rank": rank, "key": key.hex(), "folder": os.getcwd(), "cores": cores}
        return Forked(self, self.ask(place, output, log))

    def ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        """Send a request, and wait for its answer; that of a request that was interrupted is dropped."""
        self._asked += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            socket.send_fds(self.socket, [json.dumps([self._asked, request]).encode()], descriptors)
            while message := self.socket.recv(_MESSAGE_BYTES):
                number, answer = json.loads(message)
                if number == self._asked:
                    return answer
        raise WorkerFailed("the process that starts the workers did not answer: the standard error has its errors")


_server: ForkServer | None = None


def current(environment: dict[str, str]) -> ForkServer:
    """The running server, or a new one if it has ended or loaded PyTorch in another environment."""
    global _server
    environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    if _server is None or _server.environment != environment or _server.process.poll() is not None:
        stop()
        _server = ForkServer(environment)
    return _server


def stop() -> None:
    """End the server, if there is one."""
    if (server := forget()) is not None:
        server.process.kill()
        server.process.wait()
        server.socket.close()


def forget() -> ForkServer | None:
    """Return the server and forget it: in a fork of the caller it belongs to the parent."""
    global _server
    server, _server = _server, None
    return server


# In the server


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they are for the caller and its workers
        signal.signal(number, signal.SIG_IGN)
    import torch

    from manyhands.training.torch.workers import worker  # noqa: F401

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.zero_grad()
    optimizer.step()
    gc.collect()
    gc.freeze()  # what is never collected stays in memory that all workers share
    requests = socket.socket(fileno=descriptor)
    while (received := socket.recv_fds(requests, _MESSAGE_BYTES, 2))[0]:
        count, request = json.loads(received[0])
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = _fork(requests, request, received[1])
        requests.send(json.dumps([count, answer]).encode())


def _fork(requests: socket.socket, place: dict[str, Any], descriptors: list[int]) -> int:
    import numpy as np

    from manyhands.training.torch.workers import worker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads: they are idle, and safe to fork
        pid = os.fork()
    for number, descriptor in enumerate(descriptors, start=1):
        if pid == 0:
            os.dup2(descriptor, number)
        os.close(descriptor)
    if pid:
        return pid
    try:
        requests.close()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(place["folder"])
        os.sched_setaffinity(0, place["cores"])
        os.environ["MANYHANDS_WORKER_KEY"] = place["key"]
        np.random.seed()  # each process has numbers of its own, as Python's and PyTorch's generators see to themselves
        worker.main(place["address"], place["rank"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
