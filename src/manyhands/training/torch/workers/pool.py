"""Worker processes, one per rank, that stay for the next job; and what happens when one of them fails.

If a worker dies or raises, the job ends within a second: the others are stopped, and the error names the rank and has
its traceback. A worker that hangs makes no step while the others wait for it: it is recognised by its silence, a signal
makes it write its stack, and the error names it. A signal that asks the caller to stop is passed on to the first rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from manyhands import errors, machine
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.training import stopping
from manyhands.training.learner import Say
from manyhands.training.torch.job import Job, torch_settings
from manyhands.training.torch.ranks import world
from manyhands.training.torch.workers import fork_server, job_bytes

_START_SECONDS = 120
_STDOUT = 1
_FIRST_STEPS = 10  # times as long as later ones may take: compilers and caches are cold
_STACK_SECONDS = 5  # how long a hanging worker may take to write its stack
# In the errors of a rank that lost another one: a consequence, not the cause.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "NCCL", "timed out", "Gloo", "gloo")


@dataclass
class _Worker:
    rank: int
    device: str
    process: subprocess.Popen[bytes] | fork_server.Forked
    log: Path
    connection: Connection = None  # type: ignore[assignment]
    heard: float = 0.0
    longest: float = 0.0  # between two messages
    step: int = -1  # none was reported
    outcome: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.device})"

    def wait(self, seconds: float) -> None:
        """Until the process has ended, so long at most."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)

    def patience(self, hang_seconds: float) -> float:
        """How long it may be silent."""
        return max(hang_seconds * (_FIRST_STEPS if self.step < 1 else 1), 5 * self.longest)


@dataclass
class Pool:
    """The workers of one list of devices."""

    devices: list[torch.device]
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-manyhands"))
    workers: list[_Worker] = field(default_factory=list)
    jobs: int = 0
    # Workers do not import the user's modules again.
    code: dict[str, int] = field(default_factory=lambda: _users_files())

    def start(self) -> None:
        """Start all workers, or none: an interruption leaves no process behind."""
        key, address = secrets.token_bytes(32), os.path.join(self.folder.name, "pool")
        until = time.monotonic() + _START_SECONDS
        try:
            with Listener(address, "AF_UNIX", backlog=len(self.devices), authkey=key) as listener:
                for rank in range(len(self.devices)):
                    self.workers.append(self._spawn(rank, address, key))
                listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
                while any(worker.connection is None for worker in self.workers):
                    with contextlib.suppress(TimeoutError):
                        connection = listener.accept()
                        self.workers[connection.recv()].connection = connection
                    for worker in self.workers:
                        if worker.process.poll() is not None or time.monotonic() > until:
                            raise WorkerFailed(f"the worker of rank {worker.rank} did not start:\n{_tail(worker.log)}")
        except BaseException:
            self.stop()
            self.folder.cleanup()
            raise

    def _spawn(self, rank: int, address: str, key: bytes) -> _Worker:
        device = self.devices[rank]
        log = Path(self.folder.name) / f"rank{rank}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.pop("MANYHANDS_VIRTUAL_DEVICES", None)  # a rank is a process of its own: it needs no pretence
        process: subprocess.Popen[bytes] | fork_server.Forked
        with log.open("wb") as file:
            if device.type == "cpu" and sys.platform == "linux":
                output = _STDOUT if rank == 0 and _is_open(_STDOUT) else file.fileno()
                process = fork_server.current(environment).fork(address, rank, key, output, file.fileno())
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", "manyhands.training.torch.workers.worker", address, str(rank)],
                    env={**environment, "MANYHANDS_WORKER_KEY": key.hex()},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else file,
                    stderr=file,
                )
        return _Worker(rank, str(device), process, log)

    @property
    def threads(self) -> int:
        on_cpu = sum(device.type == "cpu" for device in self.devices)
        return max(1, machine.usable_cores() // max(1, on_cpu))

    def alive(self) -> bool:
        return bool(self.workers) and all(worker.process.poll() is None for worker in self.workers)

    def code_changed(self) -> bool:
        """Whether a file of the user's modules has changed since this pool first saw it."""
        now = _users_files()
        changed = any(self.code.get(path, when) != when for path, when in now.items())
        self.code = {**now, **self.code}
        return changed

    def run(self, job: Job, say: Say) -> dict[str, Any]:
        """Run a job; returns what the first rank sends back: its result, the weights, and the optimizer's state."""
        self.jobs += 1
        pickled = job_bytes.to_bytes(job)
        now = time.monotonic()
        for worker in self.workers:
            worker.heard, worker.longest, worker.step, worker.outcome = now, 0.0, -1, None
        try:
            for worker in self.workers:
                self._send(worker, "job", (pickled, self._place(worker, job)))
            asked = None
            while any(worker.outcome is None for worker in self.workers):
                self._listen(say)
                if asked is None and (asked := stopping.current_requests().asked) is not None:
                    self._send(self.workers[0], "signal", asked)
                self._check(job.settings.workers.hang_seconds)
        except BaseException:
            self.stop()
            raise
        first = self.workers[0].outcome
        assert first is not None
        return first

    def _send(self, worker: _Worker, kind: str, content: Any) -> None:
        try:
            worker.connection.send((kind, content))
        except OSError:
            self._fail_dead(worker)

    def _place(self, worker: _Worker, job: Job) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "size": len(self.workers),
            "device": worker.device,
            "backend": world.backend_for(self.devices),
            "address": f"file://{self.folder.name}/store-{self.jobs}",
            "threads": self.threads,
            "path": [os.path.abspath(folder) for folder in sys.path],
            "torch": torch_settings(),
            "seconds": world.PATIENCE_IN_POOL * job.settings.workers.hang_seconds,
        }

    def _listen(self, say: Say) -> None:
        by_connection = {id(worker.connection): worker for worker in self.workers}
        for connection in wait([worker.connection for worker in self.workers if worker.outcome is None], timeout=0.2):
            worker = by_connection[id(connection)]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._fail_dead(worker)
            now = time.monotonic()
            if worker.step >= 0:
                worker.longest = max(worker.longest, now - worker.heard)
            worker.heard, worker.step = now, message.get("step", worker.step)
            if message["kind"] == "error":
                self._fail_with(worker, message)
            elif message["kind"] == "done":
                worker.outcome = message
            elif worker.rank == 0 or message["kind"] == "warning":
                self._pass_on(worker, message, say)

    def _pass_on(self, worker: _Worker, message: dict[str, Any], say: Say) -> None:
        """Give an event to the callbacks, and return their answer. Their time does not count as a worker's silence."""
        begun = time.monotonic()
        answer = say(message)
        if message.get("asks"):
            self._send(worker, "answer", answer)
        elif answer is not None and answer.get("stop") is not None:
            self._send(worker, "wish", answer)
        for each in self.workers:
            each.heard += time.monotonic() - begun

    def _check(self, hang_seconds: float) -> None:
        waiting = [worker for worker in self.workers if worker.outcome is None]
        for worker in waiting:
            if worker.process.poll() is not None and not worker.connection.poll():
                self._fail_dead(worker)
        now = time.monotonic()
        if waiting and all(now - worker.heard > worker.patience(hang_seconds) for worker in waiting):
            self._fail_hanging(waiting)

    def _fail_with(self, worker: _Worker, message: dict[str, Any]) -> None:
        """An error that a rank has raised: raise it here, with its rank and traceback."""
        if _is_consequence(message):
            self._blame_another(worker)
        kind = getattr(errors, message["type"], None)
        if isinstance(kind, type) and issubclass(kind, ManyhandsError):
            raise kind(f"{worker.name}: {message['text']}")
        raise WorkerFailed(f"{worker.name} raised an error:\n{message['traceback']}")

    def _blame_another(self, worker: _Worker) -> None:
        """A rank lost its connection: wait a moment for an error, or the death, of another rank."""
        until = time.monotonic() + 3
        others = [other for other in self.workers if other is not worker and other.outcome is None]
        while time.monotonic() < until:
            for other in others:
                if other.connection.poll():
                    with contextlib.suppress(EOFError, OSError):
                        message = other.connection.recv()
                        if message["kind"] == "error" and not _is_consequence(message):
                            self._fail_with(other, message)
                if other.process.poll() is not None:
                    self._fail_dead(other)
            time.sleep(0.05)

    def _fail_dead(self, worker: _Worker) -> None:
        worker.wait(2)
        code = worker.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
        raise WorkerFailed(f"{worker.name} {how} at step {worker.step}\n{_tail(worker.log)}")

    def _fail_hanging(self, waiting: list[_Worker]) -> None:
        before = {worker.rank: worker.log.stat().st_size for worker in waiting}
        for worker in waiting:
            worker.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _STACK_SECONDS
        while any(worker.log.stat().st_size == before[worker.rank] for worker in waiting) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # a stack is written line by line
        stacks = {worker.rank: _tail(worker.log, before[worker.rank], lines=80) for worker in waiting}
        guilty = [worker for worker in waiting if not _waits_for_others(stacks[worker.rank])] or waiting
        names = ", ".join(f"{worker.name}" for worker in guilty)
        seconds = time.monotonic() - min(worker.heard for worker in guilty)
        shown = "\n".join(f"rank {worker.rank} is here:\n{stacks[worker.rank]}" for worker in guilty)
        raise WorkerFailed(
            f"{names} made no step for {seconds:.0f} seconds and was stopped. If a step may take that long, give "
            f"workers=mh.Workers(hang_seconds=...).\n{shown}"
        )

    def stop(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGKILL)
        for worker in self.workers:
            worker.wait(_START_SECONDS)
            if worker.connection is not None:
                worker.connection.close()
        self.workers = []


_pool: Pool | None = None


def pool_for(devices: list[torch.device]) -> Pool:
    """The pool of these devices: that of the last job, if all its workers are alive."""
    global _pool
    if _pool is None or _pool.devices != devices or not _pool.alive() or _pool.code_changed():
        _stop_pool()  # idle workers of other devices would keep memory and cores
        pool = Pool(devices)
        pool.start()
        _pool = pool
    return _pool


_inherited: list[Any] = []  # in a fork: the parent's pool, kept alive because its finalizer would delete its folder


def _forget_in_fork() -> None:
    """A fork of the caller has no workers: they belong to the parent."""
    global _pool
    _inherited.append((_pool, fork_server.forget()))
    _pool = None


os.register_at_fork(after_in_child=_forget_in_fork)


@atexit.register
def stop_all() -> None:
    """End all workers, and the process that forks them."""
    _stop_pool()
    fork_server.stop()


def _stop_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.stop()
        _pool.folder.cleanup()
    _pool = None


def _is_consequence(message: dict[str, Any]) -> bool:
    return any(words in message["text"] for words in _CONSEQUENCES)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in _FOLDERS)


def _users_files() -> dict[str, int]:
    """The loaded modules that are neither Python's nor installed, and when their files were written."""
    times = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        is_users = path.endswith(".py") and not path.startswith(_INSTALLED)
        if is_users and name != "__main__":
            with contextlib.suppress(OSError):
                times[path] = os.stat(path).st_mtime_ns
    return times


def _waits_for_others(stack: str) -> bool:
    """Whether a rank's main thread is in a collective: then it is not the one that the others wait for."""
    _, _, main = stack.partition("Current thread")
    return any(os.path.join(*place) in main for place in (("torch", "distributed"), ("ranks", "gradient_sum.py")))


def _tail(log: Path, start: int = 0, lines: int = 30) -> str:
    """The last lines that a worker wrote to its standard error."""
    try:
        text = log.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
