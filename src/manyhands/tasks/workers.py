"""The threads behind :mod:`manyhands.tasks.scope`: which jobs are ready, and which thread runs each.

A job is ready when all jobs that it depends on are done: those whose results it takes, and those that touch the same
memory, one of them writing (:mod:`manyhands.tasks.dependencies`). Ready jobs start in the order in which they were
submitted. A thread that has just finished a job takes the next one itself, so a chain stays on one thread, and a thread
that waits for a job inside a task runs what that job needs.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Hashable, Iterable, Set

from manyhands.addresses import share
from manyhands.amounts import counted
from manyhands.errors import EngineError, TaskCancelled
from manyhands.tasks.dependencies import Dependencies
from manyhands.tasks.job import TAKES, Job, thread_state

_WAIT = 1.0  # seconds of one wait: an interrupt that comes right before a wait does not end it, and is handled after it


class WorkerPool:
    """Threads that run jobs, started when needed. With a size of 0, a job runs when it is submitted."""

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self._size = size
        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)  # idle threads wait for it
        self._ended = threading.Condition(self._lock)  # threads wait for jobs to end
        self._awaited: set[Job | None] = set()  # the jobs that they wait for; None: any, for those that help
        self._ready: list[tuple[int, Job]] = []  # a heap: what was submitted first is done first
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closing = False
        self._dependencies = Dependencies()
        self._spoiled: list[tuple[Set[Hashable], Job]] = []  # what failed jobs should have written

    # Submitting

    def submit(self, job: Job) -> None:
        """Put a job behind everything that it conflicts with."""
        while strangers := self._enter(job):
            for stranger in strangers:
                stranger.wait(None)
        if not self._size:
            with self._lock:
                if job.ready:
                    self._do(job)

    def _enter(self, job: Job) -> list[Job]:
        """Enter a job, or return the unfinished jobs of other pools that it must wait for first."""
        with self._lock:
            reads, written, inputs = job.look()  # with the lock held: no result comes in between
            if strangers := [other for other in inputs if other.workers is not self and not other.over]:
                return strangers
            job.unsettled[job] = None
            needs = self._dependencies.enter(job, reads, written, inputs)
            job.needs = tuple(need for need in needs if not need.over)
            job.missing = len(job.needs)
            for need, why in needs.items():
                if not need.over:
                    need.followers.append((job, why))
                elif why == TAKES and need.error is not None:
                    job.cancel_because_of(need.origin)
            if not job.missing:
                self._call(self._can_begin(job))
            return []

    def _can_begin(self, job: Job) -> int:
        """Everything that a job needs is done. Returns how many jobs became ready."""
        if job.error is not None:
            return self._finished(job)
        job.ready = True
        if self._size:
            heapq.heappush(self._ready, (job.number, job))
        return 1

    def _call(self, count: int) -> None:
        """Wake or start threads for this many more jobs."""
        for _ in range(count):
            if self._idle:
                self._idle -= 1
                self._work_to_do.notify()
            elif len(self._threads) < self._size:
                name = f"manyhands task {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run_jobs, name=name, daemon=True))
                self._threads[-1].start()

    # Doing; the lock is held, except while a job works

    def _run_jobs(self) -> None:
        """What a thread does until the pool is closed."""
        with self._lock:
            while True:
                job = self._next()
                if job is not None:
                    self._call(self._do(job) - 1)  # it takes one of them itself
                elif self._closing:
                    return
                else:
                    self._idle += 1
                    self._work_to_do.wait()

    def _next(self) -> Job | None:
        """The ready job that was submitted first."""
        while self._ready:
            _, job = heapq.heappop(self._ready)
            if job.ready:  # else a thread that waited for it was quicker
                return job
        return None

    def _do(self, job: Job) -> int:
        """Run a ready job in this thread. Returns how many jobs became ready."""
        job.ready, job.begun = False, True
        self._lock.release()
        try:
            self._work(job)
        finally:
            self._lock.acquire()
            ready = self._finished(job)
        return ready

    def _work(self, job: Job) -> None:
        if self._spoiled and (culprit := self._culprit(job)) is not None:
            job.cancel_because_of(culprit.origin)
            return
        before, thread_state.job = thread_state.job, job
        try:
            job.value = job.work()
        except BaseException as error:
            job.error, job.trace = error, error.__traceback__
            if not self._size and not isinstance(error, Exception):
                raise  # the caller's own thread: an interrupt is an interrupt
        finally:
            thread_state.job = before

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
                if written := over.written():
                    self._spoiled.append((written, over))
            over.release()
            for follower, why in over.followers:
                if why == TAKES and over.error is not None and not follower.over:
                    follower.cancel_because_of(over.origin)
                follower.missing -= 1
                if not follower.missing:
                    if follower.error is not None:
                        finished.append(follower)
                    else:
                        ready += self._can_begin(follower)
            over.followers, over.needs = [], ()
            if not self._awaited.isdisjoint((over, None)):
                self._awaited -= {over, None}
                self._ended.notify_all()
        return ready

    def _culprit(self, job: Job) -> Job | None:
        """The failed job that should have written what this one touches."""
        reads, writes, _ = job.look()  # its inputs are known now
        touched = reads | writes
        failed = (culprit for written, culprit in self._spoiled if culprit.blocks(job) and share(touched, written))
        return min(failed, key=lambda culprit: culprit.number, default=None)

    # Waiting

    def wait(self, job: Job, timeout: float | None) -> None:
        """Wait until a job is done. A worker thread runs the job itself, unless another thread does."""
        if self.process != os.getpid():
            raise EngineError(f"{job.name} belongs to the process that this one was forked from: wait for it there")
        me = thread_state.job
        if me is not None and timeout is None:  # a wait with a timeout is no deadlock
            me.note_wait(job)
        try:
            self._wait(job, timeout, me)
        finally:
            if me is not None:
                me.waits_for = None

    def _wait(self, job: Job, timeout: float | None, me: Job | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        helper = me if me is not None and me.workers is self else None
        with self._lock:
            while not job.over:
                if helper is not None and (needed := self._ready_for(job)) is not None:
                    if timeout is not None:
                        helper.waits_for = needed  # a timeout does not interrupt a job that this thread runs itself
                    self._call(self._do(needed))
                    if timeout is not None:
                        helper.waits_for = None
                    continue
                left = _WAIT if end is None else min(_WAIT, end - time.monotonic())
                if left <= 0:
                    assert timeout is not None
                    raise TimeoutError(f"{job.name} is not over after {counted(timeout, 'second')}")
                self._awaited.add(job if helper is None else None)
                self._ended.wait(left)

    def _ready_for(self, job: Job) -> Job | None:
        """A ready job that this one needs, or this one itself."""
        seen, stack = {job}, [job]
        while stack:
            needed = stack.pop()
            if needed.ready:
                return needed
            new = [need for need in needed.needs if not need.over and need not in seen]
            seen.update(new)
            stack.extend(new)
        return None

    def cancel(self, jobs: Iterable[Job], why: str) -> None:
        """Cancel the jobs that have not started."""
        with self._lock:
            for job in [*jobs]:
                if not job.begun and job.error is None:
                    job.error = TaskCancelled(f"{job.name} was not run: {why}")
                    if job.ready:
                        job.ready = False
                        self._call(self._finished(job))

    def close(self, *, join: bool) -> None:
        with self._lock:
            self._closing = True
            self._work_to_do.notify_all()
        for thread in self._threads if join else ():
            thread.join()
