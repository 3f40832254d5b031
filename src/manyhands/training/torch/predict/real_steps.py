"""Times steps as a job makes them: the trainer's loop with its data, its figures and its worker processes.

A step that is repeated on one batch in an idle process is faster than a step of a job, and the best of several steps is
faster than their mean. So steps of the trainer itself are timed, and the mean counts.

Virtual devices of one CPU share its cores, caches and memory. That cost is measured, too: as many worker processes as
the job would have make their steps at the same time, each on its shard. They begin each step together, as the sum of
gradients makes the ranks of a job do; but here each rank sums alone, because the link accounts for the exchange. For
example two ranks that take 10 and 12 ms for a step: on average a step takes 11 ms, and the job's takes 12.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from manyhands.errors import NotSendable, WorkerFailed
from manyhands.predict.profile import Contention, Profile
from manyhands.training import loop as loops
from manyhands.training.learner import Say
from manyhands.training.loop import Loop
from manyhands.training.options import Limits
from manyhands.training.torch.data import sources
from manyhands.training.torch.data.batches import Batch, tensors_in
from manyhands.training.torch.data.sources import Arrays, Source, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.learner import Rank, loop_of
from manyhands.training.torch.predict.subject import shard_of
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.workers.pool import Pool

MOST = 4  # worker processes at once
_WARM_UP = 2
_STEPS = (8, 300)  # at least and at most
_LONG_ENOUGH = 1.5  # seconds of steps
_BYTES = 64 << 20  # of data to train on; more are epochs of fewer steps


def as_in_a_job(profile: Profile, batch: Batch, make: Callable[[], Job], contentions: Sequence[int]) -> Profile:
    """The profile of a CPU with the times that a job's steps take, alone and beside others; ``make`` gives the job."""

    def job(shard: int, seconds: float) -> Job:
        template, steps = make(), _WARM_UP + min(_STEPS[1], max(_STEPS[0], math.ceil(_LONG_ENOUGH / seconds)))
        limits = Limits(max_steps=steps)
        settings = dataclasses.replace(template.settings, batch_size=shard, max_epochs=steps, limits=limits)
        data = _data(shard_of(template.model, batch, shard), steps)
        return dataclasses.replace(template, train=data, settings=settings)

    times = [
        point.times(alone(job(point.batch, point.total)) / point.total) if point.threads == profile.cores else point
        for point in profile.times
    ]
    profile, seen, notes = dataclasses.replace(profile, times=tuple(times)), [], list(profile.notes)
    for count in contentions:
        if count > profile.batch_size:
            continue
        step = profile.step(-(-profile.batch_size // count), count).total
        try:
            together = at_once(job(profile.batch_size, step * profile.slowdown(count)), count)
        except (NotSendable, WorkerFailed) as error:
            notes.append(f"How ranks slow each other down is estimated, not measured: {str(error).splitlines()[0]}")
            break
        seen.append(Contention(count, together.mean / step, together.slowest / together.mean - 1))
    return dataclasses.replace(profile, contentions=tuple(seen), notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Seconds of a step: on average over the ranks, and until the slowest of them is done."""

    mean: float
    slowest: float


def _data(batch: Batch, steps: int) -> Source:
    """Data for so many steps, or for as many as fit: the samples of the batch, again and again."""
    size = sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(batch))
    count = max(_WARM_UP, min(steps, _BYTES // max(1, size)))
    plain = isinstance(batch, (tuple, list, dict)) and len(tensors_in(batch)) == len(batch)
    source = sources.source(batch) if plain else None
    if not isinstance(source, Arrays):
        return Stream([batch] * count)
    repeated = tuple(tensor.repeat(count, *[1] * (tensor.dim() - 1)) for tensor in source.tensors)
    return dataclasses.replace(source, tensors=repeated)


def alone(job: Job) -> float:
    """Seconds of a step of a job on the CPU, in this process."""
    loop, rank = loop_of(job, World(0, 1, torch.device("cpu")), lambda event: None)
    return statistics.fmean(end - start for start, end in _step_times(loop, rank, lambda: None)[_WARM_UP:])


def at_once(job: Job, ranks: int) -> AtOnce:
    """Seconds of a step of a job on so many devices made of this CPU, without the exchange of gradients."""
    workers = Pool([torch.device("cpu")] * ranks)
    workers.start()
    try:
        spans = workers.run(dataclasses.replace(job, purpose="time"), lambda event: None)["spans"]
    finally:
        workers.stop()
        workers.folder.cleanup()
    steps = list(zip(*spans, strict=True))[_WARM_UP:]
    mean = statistics.fmean(end - start for step in steps for start, end in step)
    slowest = statistics.fmean(max(end for _, end in step) - min(start for start, _ in step) for step in steps)
    return AtOnce(mean, slowest)


def in_worker(job: Job, here: World, say: Say) -> dict[str, Any]:
    """Make this rank's steps while the other ranks make theirs; returns when each step of each rank was made."""
    groups = [dist.new_group([rank]) for rank in range(here.size)]
    loop, rank = loop_of(job, dataclasses.replace(here, sums_over=groups[here.rank]), say)
    spans = _step_times(loop, rank, dist.barrier)
    of_ranks = here.gather(torch.tensor(spans, dtype=torch.float64))
    return {"kind": "done", "step": len(spans), "spans": [of_rank.tolist() for of_rank in of_ranks]}


def _step_times(loop: Loop, rank: Rank, together: Callable[[], Any]) -> list[tuple[float, float]]:
    """Run the loop; when each step began and ended, on the clock that all processes share.

    ``together`` is called between two steps. The first step of an epoch does not count: between epochs a job does other
    things.
    """
    spans: list[tuple[float, float]] = []
    started = 0.0

    def ended() -> None:
        nonlocal started
        now = time.perf_counter()
        if loop.cursor.batch:
            spans.append((started, now))
        together()
        started = time.perf_counter()

    _set_rate_to_zero(rank)
    loops.step_listeners.append(ended)
    try:
        loop.fit()
    finally:
        with contextlib.suppress(ValueError):
            loops.step_listeners.remove(ended)
    return spans


def _set_rate_to_zero(rank: Rank) -> None:
    """The weights stay as they are, so that no step becomes NaN, and each costs the same."""
    rank.base_rates = [0.0] * len(rank.base_rates)
    for group in rank.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].zero_()
        else:
            group["lr"] = 0.0
