"""Measures the step of one device: seconds by part, gradients as bucketed, bytes by what they are for.

The step is that of the trainer with several ranks, without the sums over processes: the same objective, precision,
memory format and optimizer, gradients as views of the same buckets. It is made on a copy of the model.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyhands import machine
from manyhands.amounts import counted
from manyhands.errors import BadSettings, ManyhandsError, first_line
from manyhands.predict.memory_lines import History, memory_lines
from manyhands.predict.profile import Bucket, MemoryLine, Profile, StepTime
from manyhands.training.settings import Settings
from manyhands.training.torch.data.batches import Batch, rows, tensors_in
from manyhands.training.torch.predict import real_steps
from manyhands.training.torch.predict.memory_count import MemoryCount
from manyhands.training.torch.predict.subject import Subject, job_of, shard_of, subject_of
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.state import randomness

_WARM_UP = 2
_TRIALS = (3, 20)  # at least and at most
_LONG_ENOUGH = 1.0  # seconds of trials
_FEW = 8  # samples that are not divided


def profile(
    model: torch.nn.Module,
    batch: Batch,
    *,
    loss: Any = None,
    optimizer: Any = None,
    settings: Settings | None = None,
    device: torch.device | None = None,
    contentions: Sequence[int] = (),
) -> Profile:
    """Measure a step of the model on the batch, and on halves and quarters of it.

    ``contentions``: with so many virtual CPU devices at once, too, to see how they slow each other down.
    """
    checks.check_trainable(model)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = settings or Settings()
    try:
        with randomness.preserved(device):
            measured, half = _profile(model, batch, loss, optimizer, settings, device)
            if device.type != "cpu":
                return measured
            if settings.precision == "auto":
                settings = replace(settings, precision="bf16" if half else "fp32")
            return real_steps.as_in_a_job(
                measured, batch, lambda: job_of(model, loss, optimizer, settings), contentions
            )
    except ManyhandsError:
        raise
    except Exception as error:
        raise BadSettings(
            f"the model cannot be run on this batch: {first_line(error)}. A step is loss(model(*inputs), target) of a "
            "batch (inputs, target), or the model's own training_step(batch)"
        ) from error


def _profile(
    model: torch.nn.Module, batch: Batch, loss: Any, optimizer: Any, settings: Settings, device: torch.device
) -> tuple[Profile, bool]:
    """The profile of plain steps, and whether they are in bfloat16."""
    size, on_gpu = rows(batch), device.type == "cuda"
    base = torch.cuda.memory_allocated(device) if on_gpu else 0
    subject, notes = subject_of(job_of(model, loss, optimizer, settings), device)
    cores = 0 if on_gpu else machine.usable_cores()
    times: dict[tuple[int, int], StepTime] = {}
    memory: list[MemoryLine] = []
    buckets: tuple[Bucket, ...] = ()
    for several in (False, True):
        runs: dict[int, _Run] = {}
        for shard in _shards(size, several):
            threads = max(1, cores // max(2, round(size / shard))) if several and cores else cores
            if len(runs) == 2:
                break
            with subject.several(several), _threads(threads if several else 0):
                try:
                    runs[shard] = _run(subject, shard_of(subject.model, batch, shard), shard, threads, base)
                except torch.cuda.OutOfMemoryError:  # what fits is enough: the rest is on lines
                    notes.append(
                        f"a shard of {counted(shard, 'sample')} does not fit into the memory of one device: figures "
                        "are extrapolated."
                    )
                    torch.cuda.empty_cache()
                    continue
            times.setdefault((shard, threads), runs[shard].time)
            buckets = buckets or runs[shard].buckets
        memory += _memory(subject, several, [runs[shard] for shard in sorted(runs)])
    if not times or not buckets:
        raise BadSettings(
            f"a part of the batch, {counted(-(-size // 16), 'sample')}, does not fit into memory: give a smaller one"
        )
    capacity = torch.cuda.get_device_properties(device).total_memory if on_gpu else machine.host_memory().total
    measured = Profile(
        type(model).__name__,
        torch.cuda.get_device_name(device) if on_gpu else machine.host_name(),
        size,
        tuple(times.values()),
        buckets,
        kind="gpu" if on_gpu else "cpu",
        cores=cores,
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch)) / size,
        memory=tuple(memory),
        capacity=int(capacity),
        notes=tuple(notes),
    )
    return measured, subject.number_format.autocast is torch.bfloat16


def _shards(size: int, several: bool) -> list[int]:
    """The numbers of samples to measure with: two, unless one of them does not fit.

    One sample alone is no good measure, as some operations treat it in a way of its own.
    """
    if size < _FEW:
        return [size, 2 * size]
    return [-(-size // count) for count in ((2, 4, 8, 16) if several else (1, 2, 4, 8))]


@dataclass(frozen=True)
class _Run:
    """The measurements with one shard. ``allocated``: the allocator's peak on a GPU."""

    time: StepTime
    history: History
    buckets: tuple[Bucket, ...]
    allocated: float | None


def _run(subject: Subject, part: Batch, shard: int, threads: int, base: int) -> _Run:
    time = _timed(subject, part, shard, threads)
    buckets = () if subject.gradients is None else _arrivals(subject, part)
    return _Run(time, _counted(subject, part, shard), buckets, _allocated(subject, part, base))


def _memory(subject: Subject, several: bool, runs: list[_Run]) -> list[MemoryLine]:
    """The lines of memory; on a GPU what the allocator had beyond what was counted is workspace."""
    if not runs:
        return []
    lines = memory_lines(several, *(run.history for run in runs))
    if several:  # all gradients are there all the time, and the buckets have a few numbers more
        gradients = sum(p.numel() * p.element_size() for p in subject.model.parameters() if p.requires_grad)
        lines = [
            replace(line, fixed=replace(line.fixed, gradients=gradients, buckets=line.fixed.gradients - gradients))
            for line in lines
        ]
    # What the allocator held beyond the count stays from step to step, as the memory that cuBLAS keeps.
    uncounted = max((run.allocated - run.history.peak() for run in runs if run.allocated is not None), default=0.0)
    if uncounted <= 0:
        return lines
    return [replace(line, fixed=replace(line.fixed, workspace=line.fixed.workspace + uncounted)) for line in lines]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for PyTorch's operations on a CPU; 0: as they are."""
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _timed(subject: Subject, part: Batch, shard: int, threads: int) -> StepTime:
    """The mean time of each part. On a GPU the parts are scaled to the time of a step without synchronisation."""
    for _ in range(_WARM_UP):
        subject.step(part)
    trials: list[tuple[float, float, float]] = []
    until = time.perf_counter() + _LONG_ENOUGH
    while len(trials) < _TRIALS[0] or (len(trials) < _TRIALS[1] and time.perf_counter() < until):
        start = subject.clock()
        subject.begin()
        loss = subject.forward(part)
        middle = subject.clock()
        loss.backward()
        end = subject.clock()
        subject.optimizer.step()
        trials.append((middle - start, end - middle, subject.clock() - end))
    forward, backward, update = (statistics.fmean(part) for part in zip(*trials, strict=True))
    step = StepTime(shard, forward, backward, update, threads)
    if subject.device.type != "cuda":
        return step
    start = subject.clock()
    for _ in range(len(trials)):
        subject.step(part)
    return step.times((subject.clock() - start) / len(trials) / step.total)


def _arrivals(subject: Subject, part: Batch) -> tuple[Bucket, ...]:
    """The buckets, and when the last gradient of each is there."""
    assert subject.gradients is not None
    moment = _moments(subject.device)
    trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    subject.begin()
    loss = subject.forward(part)
    arrived: dict[int, Callable[[], float]] = {}

    def note(parameter: torch.Tensor) -> None:
        arrived[id(parameter)] = moment()

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    try:
        start = moment()
        loss.backward()
        stop = moment()
    finally:
        for handle in handles:
            handle.remove()
    begin, end = start(), stop()
    buckets = []
    for size, parameters in subject.gradients.contents():
        last = max((arrived[id(each)]() for each in parameters if id(each) in arrived), default=end)
        buckets.append(Bucket(size, min(1.0, max(0.0, (last - begin) / max(end - begin, 1e-12)))))
    return tuple(buckets)


def _moments(device: torch.device) -> Callable[[], Callable[[], float]]:
    """A function that records a moment of the device, and returns how to read it when the device is done."""
    if device.type != "cuda":

        def note() -> Callable[[], float]:
            now = time.perf_counter()
            return lambda: now

        return note
    first = torch.cuda.Event(enable_timing=True)
    first.record()

    def record() -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()

        def seconds() -> float:
            event.synchronize()
            return float(first.elapsed_time(event)) / 1e3

        return seconds

    return record


def _allocated(subject: Subject, part: Batch, base: int) -> float | None:
    """The allocator's peak in a step, beyond what was there before; None on a CPU."""
    if subject.device.type != "cuda":
        return None
    torch.cuda.synchronize(subject.device)
    torch.cuda.reset_peak_memory_stats(subject.device)
    subject.step(part)
    torch.cuda.synchronize(subject.device)
    return float(torch.cuda.max_memory_allocated(subject.device) - base)


def _counted(subject: Subject, part: Batch, shard: int) -> History:
    """Every storage of a step, and what it is for."""
    subject.optimizer.zero_grad(set_to_none=True)
    if subject.gradients is not None:
        subject.begin()
    count = MemoryCount(subject.device)
    with count:
        count.hold("weights", [*subject.model.parameters(), *subject.model.buffers()])
        count.hold("optimizer", (value for state in subject.optimizer.state.values() for value in state.values()))
        count.hold("batch", tensors_in(part))
        if subject.gradients is not None:
            count.hold("gradients", [parameter.grad for parameter in subject.model.parameters()])
        subject.step(part)
        count.hold("gradients", [parameter.grad for parameter in subject.model.parameters()])
    return count.history(shard)
