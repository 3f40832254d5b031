"""Which jobs (submitted tasks) read and write which memory, so that a new job knows which jobs it must wait for.

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
import math
from collections.abc import Callable, Hashable, Set

from manyhands.addresses import Span
from manyhands.tasks.job import NOTHING, ORDER, TAKES, Job


class Dependencies:
    """The last writer of each memory and the readers since, of jobs that are not over."""

    def __init__(self) -> None:
        self._writer: dict[Hashable, Job] = {}
        self._readers: dict[Hashable, set[Job]] = {}
        self._regions = Regions()

    def enter(self, job: Job, reads: Set[Hashable], written: Set[Hashable], inputs: list[Job]) -> dict[Job, int]:
        """List a job that takes the results of others; returns the jobs that it needs, and why."""
        reads, written = self._regions.of(reads), self._regions.of(written)
        needs = dict.fromkeys(inputs, TAKES)
        job.touched = job.listed = only_read = reads | written if written else reads
        if needs:  # otherwise all its memories are known
            # A write to an unknown result may write to all that it may be in; a read may read what was written so.
            written = self._reached(written, lambda unknown: unknown.touched) if written else written
            job.listed = only_read = self._reached(job.touched, lambda unknown: unknown.overwritten) | written
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

    def _may_share(self, memories: Set[Hashable]) -> set[Job]:
        """The jobs that use one of these memories, or whose results may be in one."""
        stack = [user for memory in memories for user in self._readers.get(memory, ())]
        stack += [user for memory in memories if (user := self._writer.get(memory)) is not None]
        jobs: set[Job] = set()
        while stack:
            user = stack.pop()
            if user not in jobs:
                jobs.add(user)
                stack.extend(follower for follower, why in user.followers if why)
        return jobs

    def forget(self, job: Job) -> None:
        """No job has to wait for it any more."""
        for memory in job.listed:
            if (readers := self._readers.get(memory)) is not None:
                readers.discard(job)
                if not readers:
                    del self._readers[memory]
            if self._writer.get(memory) is job:
                del self._writer[memory]
            if type(memory) is Span and memory not in self._readers and memory not in self._writer:
                self._regions.drop(memory)
        job.touched = job.overwritten = job.listed = NOTHING  # they hold other jobs, and those their results

    def place_result(self, job: Job) -> None:
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

    def _reached(self, memories: Set[Hashable], further: Callable[[Job], Set[Hashable]]) -> Set[Hashable]:
        """These memories, those that the results among them are in, and what leads further from unknown ones."""
        stack, reached = [*memories], set[Hashable]()
        while stack:
            memory = stack.pop()
            if memory not in reached:
                reached.add(memory)
                if isinstance(memory, Job):
                    stack.extend(self._regions.of(memory.stored_in()) if memory.over else further(memory))
        return reached


class Regions:
    """The pieces of memory that tasks use as a whole, in the order of their addresses."""

    def __init__(self) -> None:
        self._regions: list[Span] = []

    def of(self, memories: Set[Hashable]) -> Set[Hashable]:
        """These memories, with regions in place of other spans."""
        if not any(type(memory) is Span for memory in memories):
            return memories
        regions: set[Hashable] = set()
        for memory in memories:
            regions.update(self._overlapping(memory) if type(memory) is Span else (memory,))
        return regions

    def _overlapping(self, span: Span) -> list[Span]:
        place = bisect.bisect_right(self._regions, (span.start, math.inf))
        if place and self._regions[place - 1].end > span.start:
            place -= 1
        regions, cursor = [], span.start
        while cursor < span.end:
            start = self._regions[place].start if place < len(self._regions) else span.end
            if start > cursor or place == len(self._regions):
                self._regions.insert(place, Span(cursor, min(start, span.end)))
            regions.append(self._regions[place])
            cursor, place = self._regions[place].end, place + 1
        return regions

    def drop(self, region: Span) -> None:
        """Forget a region that is no longer used: its addresses may be allocated anew."""
        place = bisect.bisect_left(self._regions, region)
        if place < len(self._regions) and self._regions[place] == region:
            del self._regions[place]
