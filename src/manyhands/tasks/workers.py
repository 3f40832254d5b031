"""The threads behind :mod:`manyhands.tasks.scope`: which jobs are ready, and which thread runs each.

A job is ready when all jobs that it depends on are done: those whose results it takes, and those that touch the same
memory, one of them writing (:class:`Dependencies`). Ready jobs start in the order in which they were
submitted. A thread that has just finished a job takes the next one itself, so a chain stays on one thread, and a thread
that waits for a job inside a task runs what that job needs.

Dependencies say which jobs (submitted tasks) read and write which memory, so that a new job knows which jobs it must
wait for.

For each memory it is enough to remember the last writer and the readers since then, because "done" is transitive: a
cancelled job counts as done only after all jobs that it depends on.

The result of an unfinished job may be any memory that the job touches. The job itself stands for that unknown memory,
so that a long chain of jobs, each taking the result before it, costs no more per job than a short chain. The writer
pays: a write to an unknown result is a write to everything that it may be, up the chain; a write to a memory affects
all unknown results that it may be, down the chain, and each of them remembers that. Example: A reads x, B takes A's
result, W writes x. W waits for A and for B; and C, which takes B's result after that, reads x as well and waits for W.
Once a result is known, the jobs that took it are listed with the memories that it really is in.
"""

from __future__ import annotations

import bisect
import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Set

from manyhands.addresses import AddressRange, share
from manyhands.amounts import count_of
from manyhands.errors import EngineError, TaskCancelled
from manyhands.tasks.job import NOTHING, ORDER, TAKES, TaskCall, thread_state

_WAIT = 1.0  # seconds of one wait: an interrupt that comes right before a wait does not end it, and is handled after it


class WorkerPool:
    """Threads that run jobs, started when needed. With a size of 0, a job runs when it is submitted."""

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self._size = size
        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)  # idle threads wait for it
        self._ended = threading.Condition(self._lock)  # threads wait for jobs to end
        self._awaited: set[TaskCall | None] = set()  # the jobs that they wait for; None: any, for those that help
        self._ready: list[tuple[int, TaskCall]] = []  # a heap: what was submitted first is done first
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closing = False
        self._dependencies = Dependencies()
        self._spoiled: list[tuple[Set[Hashable], TaskCall]] = []  # what failed jobs should have written

    # Submitting

    def submit(self, job: TaskCall) -> None:
        """Put a job behind everything that it conflicts with."""
        while strangers := self._enter(job):
            for stranger in strangers:
                stranger.wait(None)
        if not self._size:
            with self._lock:
                if job.ready:
                    self._do(job)

    def _enter(self, job: TaskCall) -> list[TaskCall]:
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

    def _can_begin(self, job: TaskCall) -> int:
        """Everything that a job needs is done. Returns how many jobs became ready."""
        if job.error is not None:
            return self._finish(job)
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

    def _next(self) -> TaskCall | None:
        """The ready job that was submitted first."""
        while self._ready:
            _, job = heapq.heappop(self._ready)
            if job.ready:  # else a thread that waited for it was quicker
                return job
        return None

    def _do(self, job: TaskCall) -> int:
        """Run a ready job in this thread. Returns how many jobs became ready."""
        job.ready, job.begun = False, True
        self._lock.release()
        try:
            self._work(job)
        finally:
            self._lock.acquire()
            ready = self._finish(job)
        return ready

    def _work(self, job: TaskCall) -> None:
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

    def _finish(self, job: TaskCall) -> int:
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

    def _culprit(self, job: TaskCall) -> TaskCall | None:
        """The failed job that should have written what this one touches."""
        reads, writes, _ = job.look()  # its inputs are known now
        touched = reads | writes
        failed = (culprit for written, culprit in self._spoiled if culprit.blocks(job) and share(touched, written))
        return min(failed, key=lambda culprit: culprit.number, default=None)

    # Waiting

    def wait(self, job: TaskCall, timeout: float | None) -> None:
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

    def _wait(self, job: TaskCall, timeout: float | None, me: TaskCall | None) -> None:
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
                    raise TimeoutError(f"{job.name} is not over after {count_of(timeout, 'second')}")
                self._awaited.add(job if helper is None else None)
                self._ended.wait(left)

    def _ready_for(self, job: TaskCall) -> TaskCall | None:
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

    def cancel(self, jobs: Iterable[TaskCall], why: str) -> None:
        """Cancel the jobs that have not started."""
        with self._lock:
            for job in [*jobs]:
                if not job.begun and job.error is None:
                    job.error = TaskCancelled(f"{job.name} was not run: {why}")
                    if job.ready:
                        job.ready = False
                        self._call(self._finish(job))

    def close(self, *, join: bool) -> None:
        with self._lock:
            self._closing = True
            self._work_to_do.notify_all()
        for thread in self._threads if join else ():
            thread.join()


# Dependencies


class Dependencies:
    """The last writer of each memory and the readers since, of jobs that are not over."""

    def __init__(self) -> None:
        self._writer: dict[Hashable, TaskCall] = {}
        self._readers: dict[Hashable, set[TaskCall]] = {}
        self._regions = Regions()

    def enter(
        self, job: TaskCall, reads: Set[Hashable], written: Set[Hashable], inputs: list[TaskCall]
    ) -> dict[TaskCall, int]:
        """List a job that takes the results of others; returns the jobs that it needs, and why."""
        reads, written = self._regions.of(reads), self._regions.of(written)
        needs = dict.fromkeys(inputs, TAKES)
        job.touched = job.listed = only_read = reads | written if written else reads
        if needs:  # otherwise all its memories are known
            # A write to an unknown result may write to all that it may be in; a read may read what was written so.
            written = self._reach(written, lambda unknown: unknown.touched) if written else written
            job.listed = only_read = self._reach(job.touched, lambda unknown: unknown.overwritten) | written
        for memory in job.listed:
            if (writer := self._writer.get(memory)) is not None:
                needs.setdefault(writer, ORDER)
        if written:
            only_read = job.listed - written
            for earlier in self._may_share(written):
                needs.setdefault(earlier, ORDER)
                earlier.overwritten = earlier.overwritten | written
            for memory in written:
                self._readers.pop(memory, None)
                self._writer[memory] = job
        for memory in only_read:
            self._readers.setdefault(memory, set()).add(job)
        return needs

    def _may_share(self, memories: Set[Hashable]) -> set[TaskCall]:
        """The jobs that use one of these memories, or whose results may be in one."""
        stack = [user for memory in memories for user in self._readers.get(memory, ())]
        stack += [user for memory in memories if (user := self._writer.get(memory)) is not None]
        jobs: set[TaskCall] = set()
        while stack:
            user = stack.pop()
            if user not in jobs:
                jobs.add(user)
                stack.extend(follower for follower, why in user.followers if why)
        return jobs

    def forget(self, job: TaskCall) -> None:
        """No job has to wait for it any more."""
        for memory in job.listed:
            if (readers := self._readers.get(memory)) is not None:
                readers.discard(job)
                if not readers:
                    del self._readers[memory]
            if self._writer.get(memory) is job:
                del self._writer[memory]
            if type(memory) is AddressRange and memory not in self._readers and memory not in self._writer:
                self._regions.drop(memory)
        job.touched = job.overwritten = job.listed = NOTHING  # they hold other jobs, and those their results

    def place_result(self, job: TaskCall) -> None:
        """Its result is known: list its users under the memories that it is in."""
        readers, writer = self._readers.get(job, set()), self._writer.get(job)
        if not readers and writer is None:
            return
        memories = self._regions.of(job.stored_in())
        for user in readers if writer is None else {*readers, writer}:
            user.listed = user.listed | memories
        for memory in memories:
            self._readers.setdefault(memory, set()).update(readers)
            other = self._writer.get(memory)
            if writer is not None and (other is None or other.number < writer.number):
                self._writer[memory] = writer

    def _reach(self, memories: Set[Hashable], further: Callable[[TaskCall], Set[Hashable]]) -> Set[Hashable]:
        """These memories, those that the results among them are in, and what leads further from unknown ones."""
        stack, reached = [*memories], set[Hashable]()
        while stack:
            memory = stack.pop()
            if memory not in reached:
                reached.add(memory)
                if isinstance(memory, TaskCall):
                    stack.extend(self._regions.of(memory.stored_in()) if memory.over else further(memory))
        return reached


class Regions:
    """The pieces of memory that tasks use as a whole, in the order of their addresses."""

    def __init__(self) -> None:
        self._regions: list[AddressRange] = []

    def of(self, memories: Set[Hashable]) -> Set[Hashable]:
        """These memories, with regions in place of other spans."""
        if not any(type(memory) is AddressRange for memory in memories):
            return memories
        regions: set[Hashable] = set()
        for memory in memories:
            regions.update(self._overlaps(memory) if type(memory) is AddressRange else (memory,))
        return regions

    def _overlaps(self, span: AddressRange) -> list[AddressRange]:
        place = bisect.bisect_right(self._regions, (span.start, math.inf))
        if place and self._regions[place - 1].end > span.start:
            place -= 1
        regions, cursor = [], span.start
        while cursor < span.end:
            start = self._regions[place].start if place < len(self._regions) else span.end
            if start > cursor or place == len(self._regions):
                self._regions.insert(place, AddressRange(cursor, min(start, span.end)))
            regions.append(self._regions[place])
            cursor, place = self._regions[place].end, place + 1
        return regions

    def drop(self, region: AddressRange) -> None:
        """Forget a region that is no longer used: its addresses may be allocated anew."""
        place = bisect.bisect_left(self._regions, region)
        if place < len(self._regions) and self._regions[place] == region:
            del self._regions[place]
