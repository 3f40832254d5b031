"""A process that loads PyTorch once and forks the workers of CPUs (on Linux), which takes milliseconds.

The standard library's server would import the caller's main module. This one runs no user code and no threads of its
own, and ends with its caller. Workers of GPUs are not forked: CUDA must not be in use before a fork, and what an import
of PyTorch uses differs between versions.
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
import threading
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

from manyhands.errors import WorkerFailed

_START_SECONDS, _MESSAGE_BYTES = 120, 1 << 16
_LOST = 255  # the status of a worker whose server is gone; without its caller's connection it ends


@dataclass
class Forked:
    """A worker that the server forked, with the methods of ``subprocess.Popen`` that a pool calls."""

    server: ForkServer
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self.server.ask({"status": self.pid})
            except (OSError, WorkerFailed):
                self.returncode = _LOST
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # its number is its own until the server has collected its status
            os.kill(self.pid, number)


class ForkServer:
    """The server, as its caller sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self._asked, self._lock = environment, 0, threading.Lock()
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(_START_SECONDS)
        with other:
            code, null = f"from {__name__} import main; main({other.fileno()})", subprocess.DEVNULL
            how: dict[str, Any] = {"env": environment, "pass_fds": [other.fileno()], "stdin": null, "stdout": null}
            self.process = subprocess.Popen([sys.executable, "-c", code], **how)

    def fork(self, address: str, rank: int, key: bytes, *descriptors: int) -> Forked:
        """A new worker, ``worker.main(address, rank, key)``; the descriptors are its output and its errors."""
        place = {"folder": os.getcwd(), "cores": sorted(os.sched_getaffinity(0))}
        return Forked(self, self.ask({**place, "arguments": [address, rank, key.hex()]}, *descriptors))

    def ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        """Send a request, and wait for its answer; that of a request that was interrupted is dropped."""
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self._asked += 1
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


def forget() -> ForkServer | None:
    """Return the server and forget it: in a fork of the caller it belongs to the parent."""
    global _server
    server, _server = _server, None
    return server


def stop() -> None:
    if (server := forget()) is not None:
        server.process.kill()
        server.process.wait()
        server.socket.close()


def main(descriptor: int) -> None:
    """The server itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they are for the caller and its workers
        signal.signal(number, signal.SIG_IGN)
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.zero_grad()
    optimizer.step()
    from manyhands.training.torch.workers import worker

    gc.collect()
    gc.freeze()  # what is never collected stays in memory that all workers share
    requests = socket.socket(fileno=descriptor)
    while (received := socket.recv_fds(requests, _MESSAGE_BYTES, 2))[0]:
        count, request = json.loads(received[0])
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads: they are idle, and safe to fork
                answer = os.fork()
            if answer == 0:
                requests.close()
                _become(worker, request, received[1])
            for copied in received[1]:
                os.close(copied)
        requests.send(json.dumps([count, answer]).encode())


def _become(worker: Any, place: dict[str, Any], descriptors: list[int]) -> None:
    """In a fork: be this worker until it ends."""
    try:
        for number, copied in enumerate(descriptors, start=1):
            os.dup2(copied, number)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(place["folder"])
        os.sched_setaffinity(0, place["cores"])
        worker.main(*place["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
