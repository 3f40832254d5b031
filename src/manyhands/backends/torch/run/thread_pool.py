"""The threads of the CPU: workers that run lanes, and how many threads each operation uses.

Workers are started when they are needed, kept from run to run, and joined before the interpreter ends.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class _Worker:
    """A thread that does jobs one after the other, and sleeps between them."""

    def __init__(self, number: int) -> None:
        self._go, self._over = closed_lock(), closed_lock()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self._threads = self._wanted = 0  # threads per operation: set in the thread, and wanted by the job
        self._thread = threading.Thread(target=self._work, name=f"manyhands lane {number}", daemon=True)
        self._thread.start()

    def give(self, job: Callable[[], None], threads: int) -> None:
        """Start a job, which must not raise, with ``threads`` threads for each operation."""
        self._over, self._job, self._wanted, self._busy = closed_lock(), job, threads, True
        self._go.release()

    def wait(self) -> KeyboardInterrupt | None:
        """Wait until the job is done, even if the user interrupts; returns the interrupt, if there was one."""
        interrupt = None
        while self._busy:
            try:
                self._over.acquire(timeout=1.0)
            except KeyboardInterrupt as error:
                interrupt = error
        return interrupt

    def dismiss(self) -> None:
        self._go.release()
        self._thread.join()

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            self._go.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            if self._threads != self._wanted:
                torch.set_num_threads(self._wanted)
                self._threads = self._wanted
            job()
            del job  # it holds tensors
            self._busy = False
            self._over.release()


class Pool:
    """The workers of one process; a run borrows as many as it needs, and more are started when none is idle."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._numbers = itertools.count(1)
        self.closed = False

    def borrow(self, count: int) -> list[_Worker]:
        borrowed = []
        for _ in range(count):
            try:
                borrowed.append(self._idle.pop())
            except IndexError:
                borrowed.append(_Worker(next(self._numbers)))
        return borrowed

    def give_back(self, workers: Sequence[_Worker]) -> None:
        self._idle.extend(workers)

    def close(self) -> None:
        self.closed = True
        while self._idle:
            self._idle.pop().dismiss()


# A child of os.fork has only the thread that forked, so it gets a new pool.
_pools: dict[int, Pool] = {}


@functools.cache
def initialize_vector_math() -> None:
    """Call one vector function before threads do.

    Intel's vector math library, which PyTorch uses for ``sin``, ``exp`` and the like, chooses its kernels in its first
    call. If two threads make that call at once, one of them may run a less accurate kernel.
    """
    torch.exp(torch.zeros(1, device="cpu"))


def pool() -> Pool:
    initialize_vector_math()
    process = os.getpid()
    return _pools.get(process) or _pools.setdefault(process, Pool())


@atexit.register
def _close() -> None:
    """Join the workers before the interpreter ends."""
    if workers := _pools.get(os.getpid()):
        workers.close()


def closed_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@contextmanager
def operation_threads(wanted: int) -> Iterator[None]:
    """Use ``wanted`` threads for each operation that this thread calls."""
    before = torch.get_num_threads()
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)
