"""The threads behind :mod:`manyhands.engine.futures`: jobs, what each needs, and who does them.

A job is ready when all jobs that it needs are over: those whose results it takes, and those that touch the same memory,
one of them writing. It is enough to remember, for each memory, the last writer and the readers since, because "over" is
transitive: a job that will not be run is over only after all that it needs.

A job fails with those whose results it takes. What a failed job was to write is spoiled, and a job that touches it is
not run; that is looked at when the job begins, because only then all results are there, and it is known what is in
which memory. A writes x and fails, B reads x, C writes x, D reads y: B and C are not run, D is not concerned.

A job may also ask for a result while it runs. It is then looked whether what it asks for waits, over however many jobs,
for itself: that circle would never end, and the one that closes it gets an error.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any

from manyhands.errors import EngineError, TaskCancelled, WaitsForItself

_numbers = itertools.count()
_working = threading.local()  # the job that this thread is doing
_circles = threading.Lock()  # held while it is looked who waits for whom, in all crews


class Job:
    """A call that is done once, by some thread, when what it needs is over."""

    def __init__(self, crew: Crew | None, name: str, work: Callable[[], Any] | None) -> None:
        self.crew, self.name, self.work = crew, name, work
        self.number = next(_numbers)
        # The memories that it may touch, and those that it does touch and write, known when it begins.
        self.touched: frozenset[Hashable] = frozenset()
        self.really_touched: Callable[[], Iterable[Hashable]] | None = None
        self.really_written: Callable[[], Iterable[Hashable]] | None = None
        self.needs: list[Job] = []
        self.waits_for: Job | None = None  # the job whose result it has asked for while running
        self.followers: list[tuple[Job, bool]] = []
        self.missing = 0
        self.begun = self.over = False
        self.seen_at: int | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self._origin: Job | None = None
        self.unsettled: dict[Job, None] = {}  # where its scope keeps it, until it has gone well

    @property
    def origin(self) -> Job:
        """The job that failed, where this one was not run because of it; else itself."""
        return self._origin or self

    def state(self) -> str:
        if not self.over:
            return "running" if self.begun else "waiting"
        return "done" if self.error is None else "cancelled" if self.cancelled() else "failed"

    def cancelled(self) -> bool:
        return isinstance(self.error, TaskCancelled) and not self.begun

    def see(self) -> None:
        """Somebody knows its error from now on."""
        if self.seen_at is None:
            self.seen_at = next(_numbers)

    def spoils(self, later: Job) -> bool:
        """Whether what it was to write is no good for another job: given later, but before the error was seen."""
        seen = (one.seen_at for one in (self, self.origin))
        return self.number < later.number and not any(at is not None and at < later.number for at in seen)

    def wait(self, timeout: float | None) -> None:
        if not self.over:
            assert self.crew is not None
            self.crew.wait(self, timeout)

    def raise_error(self) -> None:
        if self.error is not None:
            self.see()
            raise self.error.with_traceback(self.trace)


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
        self._writer: dict[Hashable, Job] = {}
        self._readers: dict[Hashable, set[Job]] = {}
        self._spoiled: dict[Hashable, list[Job]] = {}

    # Giving

    def give(self, job: Job, reads: frozenset[Hashable], writes: frozenset[Hashable], inputs: Iterable[Job]) -> None:
        """Put a job behind everything that it conflicts with. ``inputs`` are jobs whose results it takes."""
        inputs = dict.fromkeys(inputs)
        for one in inputs:
            if one.crew is not self:
                one.wait(None)
        with self._lock:
            needs = dict.fromkeys(inputs, True)
            for memory in reads | writes:
                if (writer := self._writer.get(memory)) is not None:
                    needs.setdefault(writer, False)
            for memory in writes:
                for reader in self._readers.pop(memory, ()):
                    needs.setdefault(reader, False)
                self._writer[memory] = job
            for memory in reads - writes:
                self._readers.setdefault(memory, set()).add(job)
            for need, fatal in needs.items():
                if not need.over:
                    need.followers.append((job, fatal))
                    job.needs.append(need)
                elif fatal and need.error is not None:
                    _doom(job, need.origin)
            job.missing = len(job.needs)
            if not job.missing:
                self._can_begin(job)
        if not self._size:
            self._do(job)

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
                _doom(job, culprit.origin)
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
            self._forget(one)
            for follower, fatal in one.followers:
                if fatal and one.error is not None and not follower.over:
                    _doom(follower, one.origin)
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

    def _forget(self, job: Job) -> None:
        """Nobody has to wait for it any more."""
        for memory in job.touched:
            if (readers := self._readers.get(memory)) is not None:
                readers.discard(job)
                if not readers:
                    del self._readers[memory]
            if self._writer.get(memory) is job:
                del self._writer[memory]

    # Waiting

    def wait(self, job: Job, timeout: float | None) -> None:
        """Until a job is over. One of our own threads does meanwhile what it is waiting for, if nobody else does."""
        if self.process != os.getpid():
            raise EngineError(f"{job.name} belongs to the process that this one was forked from: wait for it there")
        me: Job | None = getattr(_working, "job", None)
        if me is not None and timeout is None:  # a wait that ends by itself closes no circle
            _ask(me, job)
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


def _doom(job: Job, origin: Job) -> None:
    """It will not be run, because of the job that failed."""
    if job.error is None:
        failure = origin.error
        job.error = TaskCancelled(
            f"{job.name} was not run: it needs {origin.name}, which failed with {type(failure).__name__}: {failure}"
        )
        job.error.__cause__ = failure
        job._origin = origin


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


def _ask(me: Job, wanted: Job) -> None:
    """Note that a job waits for another one, unless that one waits for it."""
    with _circles:
        reached: dict[Job, Job | None] = {wanted: None}
        stack = [wanted]
        while stack and me not in reached:
            one = stack.pop()
            for need in (*one.needs, *([one.waits_for] if one.waits_for else ())):
                if not need.over and need not in reached:
                    reached[need] = one
                    stack.append(need)
        if me in reached:
            way, last = [me], reached[me]
            while last is not None:
                way.append(last)
                last = reached[last]
            circle = ", which waits for ".join(job.name for job in reversed(way)) if len(way) > 1 else "itself"
            raise WaitsForItself(
                f"{me.name} asks for the result of {circle}: nobody could ever go on. Give the result as an argument, "
                "task(fn)(future), of a task that was given before"
            )
        me.waits_for = wanted


def settle(jobs: dict[Job, None]) -> None:
    """Raise the first error that nobody has seen; what was cancelled because of it is not an error of its own.

    What is over is nobody's business then, and is let go of.
    """
    failed = [job for job in jobs if job.error is not None and job.seen_at is None and not job.cancelled()]
    for job in [job for job in jobs if job.over]:
        job.unsettled.pop(job, None)
    for job in failed:
        job.see()
    if failed:
        if len(failed) > 1 and failed[0].error is not None:
            failed[0].error.add_note(f"failed as well: {', '.join(job.name for job in failed[1:])}")
        failed[0].raise_error()
