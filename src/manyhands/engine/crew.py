"""The threads behind :mod:`manyhands.engine.futures`: jobs, what each needs, and who does them.

A job is ready when all jobs that it needs are over: those whose results it takes, and those that touch the same memory,
one of them writing, which :mod:`manyhands.engine.ledger` knows.

A job fails with those whose results it takes. What a failed job was to write is spoiled, and a job that touches it is
not run; that is looked at when the job begins, because only then all results are there, and it is known what is in
which memory. A writes x and fails, B reads x, C writes x, D reads y: B and C are not run, D is not concerned.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable

from manyhands.engine.job import Job, ask, doom
from manyhands.engine.ledger import Ledger, Touched
from manyhands.errors import EngineError, TaskCancelled

_working = threading.local()  # the job that this thread is doing


class Crew:
    """Threads that do jobs, hired as they are needed; none at all: jobs are done when they are given."""

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self._size = size
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there is something to do, or the day is over
        self._over = threading.Condition(self._lock)  # a job is over
        self._ready: list[tuple[int, Job]] = []
        self._threads: list[threading.Thread] = []
        self._resting = 0
        self._closing = False
        self._ledger = Ledger()
        self._spoiled: dict[Hashable, list[Job]] = {}

    # Giving

    def give(self, job: Job, look: Callable[[], Touched]) -> None:
        """Put a job behind everything that it conflicts with. ``look`` tells what it touches, as far as it is known."""
        while strangers := self._enter(job, look):
            for one in strangers:
                one.wait(None)
        if not self._size:
            self._do(job)

    def _enter(self, job: Job, look: Callable[[], Touched]) -> list[Job]:
        """Enter a job, or give the unfinished jobs of other crews that have to be waited for first."""
        with self._lock:
            touched = look()  # with the lock held: no result comes in between
            if strangers := [one for one in touched.inputs if one.crew is not self and not one.over]:
                return strangers
            job.unsettled[job] = None
            for need, fatal in self._ledger.enter(job, touched).items():
                if not need.over:
                    need.followers.append((job, fatal))
                    job.needs.append(need)
                elif fatal and need.error is not None:
                    doom(job, need.origin)
            job.missing = len(job.needs)
            if not job.missing:
                self._can_begin(job)
            return []

    def _can_begin(self, job: Job) -> None:
        if job.error is not None:
            self._finished(job)
            return
        if not self._size:
            return
        heapq.heappush(self._ready, (job.number, job))
        if len(self._ready) > self._resting and len(self._threads) < self._size:
            name = f"manyhands task {len(self._threads)}"
            self._threads.append(threading.Thread(target=self._day, name=name, daemon=True))
            self._threads[-1].start()
        self._work.notify()

    # Doing

    def _day(self) -> None:
        while True:
            with self._lock:
                while not (self._ready or self._closing):
                    self._resting += 1
                    self._work.wait()
                    self._resting -= 1
                if not self._ready:
                    return
                _, job = heapq.heappop(self._ready)
            self._do(job)
            del job  # it may hold a large result

    def _do(self, job: Job) -> None:
        with self._lock:
            if job.begun or job.over:
                return  # somebody who waited for it was quicker, or it was cancelled
            job.begun = True
            work, job.work = job.work, None
        assert work is not None
        if (culprit := self._culprit(job)) is not None:
            with self._lock:
                job.begun = False
                doom(job, culprit.origin)
                self._finished(job)
            return
        before, _working.job = getattr(_working, "job", None), job
        try:
            job.value = work()
        except BaseException as error:
            job.error, job.trace = error, error.__traceback__
            if not self._size and not isinstance(error, Exception):
                raise  # the caller's own thread: an interrupt is an interrupt
        finally:
            _working.job = before
            del work
            with self._lock:
                self._finished(job)

    def _finished(self, job: Job) -> None:
        """A job is over; so are, perhaps, those that will not be run because of it."""
        finished = [job]
        while finished:
            one = finished.pop()
            one.over, one.work = True, None
            if one.error is None:
                one.unsettled.pop(one, None)
            elif one.really_written is not None:
                for memory in one.really_written():
                    self._spoiled.setdefault(memory, []).append(one)
            one.really_touched = one.really_written = None  # they hold the arguments
            self._ledger.forget(one)
            self._ledger.tell_where(one)
            for follower, fatal in one.followers:
                if fatal and one.error is not None and not follower.over:
                    doom(follower, one.origin)
                follower.missing -= 1
                if not follower.missing:
                    if follower.error is not None:
                        finished.append(follower)
                    else:
                        self._can_begin(follower)
            one.followers, one.needs = [], []
        self._over.notify_all()

    def _culprit(self, job: Job) -> Job | None:
        """The failed job that was to write what this one touches."""
        if not self._spoiled or job.really_touched is None:
            return None
        failed = (one for memory in job.really_touched() for one in self._spoiled.get(memory, ()))
        return min((one for one in failed if one.spoils(job)), key=lambda one: one.number, default=None)

    # Waiting

    def wait(self, job: Job, timeout: float | None) -> None:
        """Until a job is over. One of our own threads does meanwhile what it is waiting for, if nobody else does."""
        if self.process != os.getpid():
            raise EngineError(f"{job.name} belongs to the process that this one was forked from: wait for it there")
        me: Job | None = getattr(_working, "job", None)
        if me is not None and timeout is None:  # a wait that ends by itself closes no circle
            ask(me, job)
        try:
            self._wait(job, timeout, me)
        finally:
            if me is not None:
                me.waits_for = None

    def _wait(self, job: Job, timeout: float | None, me: Job | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                found = None
                helps = me is not None and me.crew is self
                while not job.over and not (helps and (found := _can_be_done_for(job))):
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"{job.name} is not over after {timeout} seconds")
                    self._over.wait(left)
                if found is None:
                    return
            assert me is not None
            if timeout is not None:
                me.waits_for = found  # what it does itself it waits for, however long that takes
            self._do(found)
            if timeout is not None:
                me.waits_for = None

    def cancel(self, jobs: Iterable[Job], why: str) -> None:
        """Those that have not begun will not be run."""
        with self._lock:
            for job in [*jobs]:
                if not job.begun and not job.over and job.error is None:
                    job.error = TaskCancelled(f"{job.name} was not run: {why}")
                    if not job.missing:
                        self._finished(job)

    def close(self, *, join: bool) -> None:
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads if join else ():
            thread.join()


def _can_be_done_for(job: Job) -> Job | None:
    """A job that can begin, and that this one needs, or itself."""
    seen, stack = {job}, [job]
    while stack:
        one = stack.pop()
        if not one.missing and not one.begun and not one.over:
            return one
        new = [need for need in one.needs if not need.over and need not in seen]
        seen.update(new)
        stack.extend(new)
    return None
