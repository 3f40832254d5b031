"""The threads behind :mod:`manyhands.tasks.scope`: which jobs are ready, and which thread runs each.

A job is ready when all jobs that it depends on are done: those whose results it takes, and those that touch the same
memory, one of them writing (:mod:`manyhands.tasks.dependencies`).

No thread is woken in vain. A thread without work sleeps on its own lock, its bell, and is woken when more jobs are
ready than running threads will take anyway: a thread that has just finished a job takes the next one itself, so a chain
stays on one thread. A thread that waits for a job is woken when that job is done, not when any job is.

Worker threads never wait for the lock, because each of them would have to be woken to get it. A finished job is put
into a list; a thread that finds the lock free records all jobs of the list, and a thread that releases the lock checks
the list again. A job that can start belongs to the thread that takes it out of ``_to_do``, which only one thread can.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Set

from manyhands.addresses import share
from manyhands.amounts import counted
from manyhands.errors import EngineError, TaskCancelled
from manyhands.tasks.dependencies import Dependencies
from manyhands.tasks.job import TAKES, Job, cancel_because_of, note_wait


class _Working(threading.local):
    job: Job | None = None  # the job that this thread runs


_working = _Working()
_WAIT = 1.0  # seconds of one wait


class WorkerPool:
    """Threads that run jobs, started when needed. With a size of 0, a job runs when it is submitted."""

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self._size = size
        self._lock = threading.Lock()
        self._done: deque[Job] = deque()  # finished jobs that are not recorded yet
        self._to_do: dict[int, Job] = {}  # the jobs that can begin, by their numbers
        self._ready: list[int] = []  # a heap of the numbers: what was submitted first is done first
        self._threads: list[threading.Thread] = []
        self._resting: list[threading.Lock] = []  # the bells of threads that have nothing to do
        self._bells: dict[Job | None, list[threading.Lock]] = {}  # of threads that wait for a job; None: that help
        self._closing = False
        self._dependencies = Dependencies()
        self._spoiled: list[tuple[Set[Hashable], Job]] = []  # what failed jobs should have written

    # Submitting

    def submit(self, job: Job) -> None:
        """Put a job behind everything that it conflicts with."""
        try:
            while strangers := self._enter(job):
                for stranger in strangers:
                    stranger.wait(None)
        finally:
            self._enter_done()
        if not self._size:
            self._do(job)

    def _enter(self, job: Job) -> list[Job]:
        """Enter a job, or return the unfinished jobs of other pools that it must wait for first."""
        with self._lock:
            touched = job.look()  # with the lock held: no result comes in between
            if strangers := [other for other in touched[2] if other.workers is not self and not other.over]:
                return strangers
            job.unsettled[job] = None
            reached = [other for other in touched[3] if other.workers is self]
            if needs := self._dependencies.enter(job, (*touched[:3], reached)):
                job.needs = tuple(need for need in needs if not need.over)
                job.missing = len(job.needs)
                for need, why in needs.items():
                    if need.over:
                        if why == TAKES and need.error is not None:
                            cancel_because_of(job, need.origin)
                    elif need.followers is None:
                        need.followers = [(job, why)]
                    else:
                        need.followers.append((job, why))
            if not job.missing:
                self._call(self._can_begin(job))
            return []

    def _can_begin(self, job: Job) -> int:
        """Everything that a job needs is done. Returns how many jobs became ready."""
        if job.error is not None:
            return self._finished(job)
        self._to_do[job.number] = job
        if self._size:
            heapq.heappush(self._ready, job.number)
        return 1

    def _call(self, count: int) -> None:
        """Wake or start threads for this many more jobs."""
        for _ in range(count):
            if self._resting:
                self._resting.pop().release()
            elif len(self._threads) < self._size:
                name = f"manyhands task {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run_jobs, name=name, daemon=True))
                self._threads[-1].start()

    # Doing

    def _run_jobs(self) -> None:
        """What a thread does until the pool is closed."""
        bell = _bell()
        while True:
            if (job := self._next()) is not None:
                self._work(job)
                self._done.append(job)
                del job  # it may hold a large result
                self._enter_done(taken=1)
            elif self._closing:
                return
            else:
                self._rest(bell)

    def _next(self) -> Job | None:
        """Take the ready job that was submitted first."""
        while self._ready:
            try:
                number = heapq.heappop(self._ready)
            except IndexError:
                return None  # another thread was quicker
            if (job := self._to_do.pop(number, None)) is not None:  # else a thread that waited for it was quicker
                job.begun = True
                return job
        return None

    def _rest(self, bell: threading.Lock) -> None:
        self._resting.append(bell)
        if self._ready or self._closing:  # since we looked
            try:
                self._resting.remove(bell)
                return
            except ValueError:
                pass  # it was rung
        bell.acquire()

    def _do(self, job: Job) -> None:
        """Do a job in this thread, unless another thread has started it."""
        if self._to_do.pop(job.number, None) is None:
            return
        job.begun = True
        try:
            self._work(job)
        finally:
            self._done.append(job)
            self._enter_done()

    def _enter_done(self, taken: int = 0) -> None:
        """Record finished jobs, if nobody holds the lock. ``taken``: jobs that this thread takes itself."""
        while self._done and self._lock.acquire(blocking=False):
            try:
                ready = 0
                while self._done:
                    ready += self._finished(self._done.popleft())
                self._call(ready - taken)
            finally:
                self._lock.release()

    def _work(self, job: Job) -> None:
        if self._spoiled and (culprit := self._culprit(job)) is not None:
            cancel_because_of(job, culprit.origin)
            return
        before, _working.job = _working.job, job
        try:
            job.value = job.work()
        except BaseException as error:
            job.error, job.trace = error, error.__traceback__
            if not self._size and not isinstance(error, Exception):
                raise  # the caller's own thread: an interrupt is an interrupt
        finally:
            _working.job = before

    def _finished(self, job: Job) -> int:
        """A job is over, and so are jobs that are cancelled because of it. Returns how many jobs became ready."""
        finished, ready = [job], 0
        while finished:
            over = finished.pop()
            over.over = True
            self._dependencies.forget(over)
            try:
                self._dependencies.place_result(over)
            except Exception as error:  # it is unknown what memory its result is in
                over.error, over.trace = error, error.__traceback__
            if over.error is None:
                over.unsettled.pop(over, None)
            else:
                over.begun = over.begun and over.origin is over
                if written := over.written_memories():
                    self._spoiled.append((written, over))
            over.release()
            for follower, why in over.followers or ():
                if why == TAKES and over.error is not None and not follower.over:
                    cancel_because_of(follower, over.origin)
                follower.missing -= 1
                if not follower.missing:
                    if follower.error is not None:
                        finished.append(follower)
                    else:
                        ready += self._can_begin(follower)
            over.followers, over.needs = None, ()
            if self._bells:
                _ring(self._bells.pop(over, []))
        if self._bells:
            _ring(self._bells.pop(None, []))
        return ready

    def _culprit(self, job: Job) -> Job | None:
        """The failed job that should have written what this one touches."""
        touched = job.accessed()
        failed = (culprit for written, culprit in self._spoiled if culprit.blocks(job) and share(touched, written))
        return min(failed, key=lambda culprit: culprit.number, default=None)

    # Waiting

    def wait(self, job: Job, timeout: float | None) -> None:
        """Wait until a job is done. A worker thread runs the job itself, unless another thread does."""
        if self.process != os.getpid():
            raise EngineError(f"{job.name} belongs to the process that this one was forked from: wait for it there")
        me = _working.job
        if me is not None and timeout is None:  # a wait with a timeout is no deadlock
            note_wait(me, job)
        try:
            self._wait(job, timeout, me)
        finally:
            if me is not None:
                me.waits_for = None

    def _wait(self, job: Job, timeout: float | None, me: Job | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        helps = me is not None and me.workers is self
        while True:
            with self._lock:
                needed = self._can_be_done_for(job) if helps and not job.over else None
                if needed is None and not job.over:
                    bell, bells = _bell(), self._bells.setdefault(None if helps else job, [])
                    bells.append(bell)
            self._enter_done()
            if needed is not None:
                assert me is not None
                if timeout is not None:
                    me.waits_for = needed  # a timeout does not interrupt a job that this thread runs itself
                self._do(needed)
                if timeout is not None:
                    me.waits_for = None
            elif job.over:
                return
            elif not _wait_for_bell(bell, end):
                with self._lock:
                    late = bell not in bells  # it was rung after all
                    if not late:
                        bells.remove(bell)
                self._enter_done()
                if not late:
                    assert timeout is not None
                    raise TimeoutError(f"{job.name} is not over after {counted(timeout, 'second')}")

    def _can_be_done_for(self, job: Job) -> Job | None:
        """A ready job that this one needs, or this one itself."""
        seen, stack = {job}, [job]
        while stack:
            needed = stack.pop()
            if needed.number in self._to_do:
                return needed
            new = [need for need in needed.needs if not need.over and need not in seen]
            seen.update(new)
            stack.extend(new)
        return None

    def cancel(self, jobs: Iterable[Job], why: str) -> None:
        """Cancel the jobs that have not started."""
        with self._lock:
            for job in [*jobs]:
                can_begin = self._to_do.pop(job.number, None) is not None
                if job.error is None and (job.missing or can_begin):
                    job.error = TaskCancelled(f"{job.name} was not run: {why}")
                if can_begin:
                    self._call(self._finished(job))
        self._enter_done()

    def close(self, *, join: bool) -> None:
        with self._lock:
            self._closing = True
            _ring(self._resting)
        self._enter_done()
        for thread in self._threads if join else ():
            thread.join()


def _wait_for_bell(bell: threading.Lock, end: float | None) -> bool:
    """Wait for a bell, at most until ``end``.

    In short waits: an interrupt that comes right before a wait does not end it, and is handled after it.
    """
    while True:
        left = _WAIT if end is None else min(_WAIT, max(0.0, end - time.monotonic()))
        if bell.acquire(timeout=left):
            return True
        if end is not None and time.monotonic() >= end:
            return False


def _bell() -> threading.Lock:
    """A locked lock: acquiring it waits until somebody releases it."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def _ring(bells: list[threading.Lock]) -> None:
    while bells:
        bells.pop().release()
