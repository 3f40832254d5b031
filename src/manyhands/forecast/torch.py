"""Measures a training step in PyTorch: seconds by part, gradients as bucketed, bytes by what they are for.

The step is that of the trainer with several ranks, without the sums over processes: the same objective, precision,
memory format and optimizer, gradients as views of the same buckets. It is made on a copy of the model.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyhands import machine
from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.backends.torch import devices as backend
from manyhands.errors import BadSettings
from manyhands.forecast.profile import Bucket, MemoryByPart, MemoryLine, Profile, StepTime, memory_lines
from manyhands.placement.moves import Placement
from manyhands.training.loss import own_step
from manyhands.training.options import Settings
from manyhands.training.torch import optimizers
from manyhands.training.torch.data.batches import Batch, as_the_model, cut, map_tensors, pick, rows, tensors_in
from manyhands.training.torch.job import Job, NumberFormat, number_format_for
from manyhands.training.torch.objective import Objective, objective_for, place
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.preflight import checks, precision
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state, randomness
from manyhands.training.torch.step.logged import attach

_WARM_UP = 2
_TRIALS = (3, 20)  # at least and at most
_LONG_ENOUGH = 1.0  # seconds of trials
_FEW = 8  # samples that are not divided


def has_gpu() -> bool:
    return torch.cuda.is_available()


def noise(batch_size: int) -> Batch:
    """A batch for a model of ``manyhands train``."""
    return torch.rand(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))


def resize(batch: Batch, batch_size: int) -> Batch:
    """A batch of ``batch_size`` samples, taken from another batch; they repeat if there are too few."""
    count = rows(batch)
    return pick(batch, [number % count for number in range(batch_size)])


def profile(
    model: torch.nn.Module, batch: Batch, *, loss: Any, optimizer: Any, settings: Settings, device: Any = None
) -> Profile:
    """Measure a step of the model on the batch, and on halves and quarters of it."""
    checks.check_trainable(model)
    size, here = rows(batch), _device(device)
    base = torch.cuda.memory_allocated(here) if here.type == "cuda" else 0
    job = _job_of(model, loss, optimizer, settings)
    with randomness.preserve(here), attach(job.model):
        subject, notes = _subject_of(job, here)
        runs = [run for several in (False, True) for run in _runs(subject, batch, several, base, notes)]
    if not any(run.buckets for run in runs) or all(run.buckets for run in runs):
        raise BadSettings(
            f"a part of the batch, {count_of(-(-size // 16), 'sample')}, does not fit into memory: give a smaller one"
        )
    memory: list[MemoryLine] = []
    for several in (False, True):
        memory += memory_lines(several, *sorted(run.held for run in runs if bool(run.buckets) is several))
    times = {run.time.batch: run.time for run in reversed(runs)}
    on_gpu = here.type == "cuda"
    capacity = torch.cuda.get_device_properties(here).total_memory if on_gpu else machine.host_memory().total
    return Profile(
        type(model).__name__,
        torch.cuda.get_device_name(here) if on_gpu else machine.host_name(),
        size,
        tuple(times[shard] for shard in sorted(times, reverse=True)),
        next(run.buckets for run in runs if run.buckets),
        kind="gpu" if on_gpu else "cpu",
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch)) / size,
        memory=tuple(memory),
        capacity=int(capacity),
        notes=tuple(notes),
    )


def _device(device: Any) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (native,) = Placement(backend).distinct([device])
    if native.type == "cpu" and native.index:
        raise BadSettings(f"device={device!r} is a virtual device. Measure the CPU itself: device='cpu'")
    return native


# Each size of shard


@dataclass(frozen=True)
class _Run:
    """The measurements with one shard; with ``buckets`` if gradients were laid out as with several ranks."""

    time: StepTime
    buckets: tuple[Bucket, ...]
    held: tuple[int, list[MemoryByPart]]


def _runs(subject: _Subject, batch: Batch, several: bool, base: int, notes: list[str]) -> Iterator[_Run]:
    """Measure with the two largest shards that fit."""
    size, measured = rows(batch), 0
    # One sample alone is no good measure, as some operations treat it in a way of its own.
    few = size < _FEW
    shards = [size, 2 * size] if few else [-(-size // count) for count in ((2, 4, 8, 16) if several else (1, 2, 4, 8))]
    for shard in shards:
        if measured == 2:
            return
        try:
            with subject.several(several):
                part = _shard_of(subject.model, batch, shard)
                time = _time(subject, part, shard)
                buckets = _arrivals(subject, part) if several else ()
                run = _Run(time, buckets, (shard, _held(subject, part, base)))
        except torch.cuda.OutOfMemoryError:  # what fits is enough: the rest is on lines
            notes.append(
                f"a shard of {count_of(shard, 'sample')} does not fit into the memory of one device: times and bytes "
                "are extrapolated."
            )
            torch.cuda.empty_cache()
            continue
        measured += 1
        yield run


# Time


def _time(subject: _Subject, part: Batch, shard: int) -> StepTime:
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
    step = StepTime(shard, forward, backward, update)
    if subject.device.type != "cuda":
        return step
    start = subject.clock()
    for _ in range(len(trials)):
        subject.step(part)
    return step.times((subject.clock() - start) / len(trials) / step.total)


def _arrivals(subject: _Subject, part: Batch) -> tuple[Bucket, ...]:
    """The buckets, and when the last gradient of each is there."""
    assert subject.gradients is not None
    trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    subject.begin()
    loss = subject.forward(part)
    arrived: dict[int, Any] = {}

    def note(parameter: torch.Tensor) -> None:
        arrived[id(parameter)] = _moment(subject.device)

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    try:
        start = _moment(subject.device)
        loss.backward()
        whole = _between(start, _moment(subject.device))
    finally:
        for handle in handles:
            handle.remove()
    buckets = []
    for size, parameters in subject.gradients.contents():
        last = max((_between(start, arrived[id(each)]) for each in parameters if id(each) in arrived), default=whole)
        buckets.append(Bucket(size, min(1.0, max(0.0, last / max(whole, 1e-12)))))
    return tuple(buckets)


def _moment(device: torch.device) -> Any:
    """A moment of the device, which has not to be waited for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    """Seconds between two moments, when the device is done."""
    if isinstance(second, float):
        return second - float(first)
    second.synchronize()
    return float(first.elapsed_time(second)) / 1e3


# Memory


def _held(subject: _Subject, part: Batch, base: int) -> list[MemoryByPart]:
    """The memory in use after each operation of a step; ``base``: what a GPU's allocator had given out before."""
    subject.optimizer.zero_grad(set_to_none=True)
    if subject.gradients is not None:
        subject.begin()
    parameters = [*subject.model.parameters()]
    weights = [*parameters, *subject.model.buffers()]
    state = [value for kept in subject.optimizer.state.values() for value in kept.values()]
    batch = tensors_in(part)
    fixed = MemoryByPart(weights=_bytes(weights), optimizer=_bytes(state, like=subject.device), batch=_bytes(batch))

    if subject.device.type == "cuda":
        in_use: Callable[[Any], int] = _allocator_peak(subject.device, base)
    else:
        in_use = _LiveBytes([*weights, *state, *batch, *(parameter.grad for parameter in parameters)])

    def moment(result: Any) -> MemoryByPart:
        total = in_use(result)
        gradients = _bytes(parameter.grad for parameter in parameters)
        return replace(fixed, gradients=gradients, activations=max(0.0, total - fixed.total - gradients))

    with _AfterEach(moment) as after:
        subject.step(part)
    values: list[MemoryByPart] = after.values
    return values


class _AfterEach(compat.TorchDispatchMode):
    """Calls a function with the result of each operation."""

    def __init__(self, function: Callable[[Any], MemoryByPart]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function
        self.values: list[MemoryByPart] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.values.append(self._function(result))
        return result


def _allocator_peak(device: torch.device, base: int) -> Callable[[Any], int]:
    """The peak of a GPU's allocator since the last call, with what an operation takes for itself while it runs."""
    torch.cuda.reset_peak_memory_stats(device)

    def peak(result: Any) -> int:
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most - base

    return peak


class _LiveBytes:
    """The bytes of all storages on the CPU that operations made and PyTorch has not freed."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._bytes = 0
        self._living: dict[int, Any] = {}
        self([*tensors])

    def __call__(self, result: Any) -> int:
        for leaf in compat.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                self._add(leaf.untyped_storage())
        return self._bytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = compat.storage_id(storage), storage.nbytes()
        if key in self._living:
            return

        def free(_: Any) -> None:
            self._bytes -= size
            del self._living[key]

        self._bytes += size
        self._living[key] = weakref.ref(storage, free)


def _bytes(tensors: Iterable[Any], like: torch.device | None = None) -> int:
    """The bytes of the storages of these tensors, each once."""
    storages = {
        compat.storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and (like is None or tensor.device.type == like.type)
    }
    return sum(storages.values())


# The step


@dataclass
class _Subject:
    """A copy of the model, ready for steps."""

    model: torch.nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    number_format: NumberFormat
    device: torch.device
    gradients: GradientSum | None = None

    def begin(self) -> None:
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.begin()

    def forward(self, part: Batch) -> torch.Tensor:
        cast_batch = self.number_format.cast(part)
        with self.number_format.scope(self.device):
            loss, _ = self.objective(self.model, cast_batch)
        return loss

    def step(self, part: Batch) -> None:
        self.begin()
        self.forward(part).backward()
        self.optimizer.step()

    @contextlib.contextmanager
    def several(self, yes: bool) -> Iterator[None]:
        """Gradients as with several ranks: views of buckets."""
        self.gradients = GradientSum(self.model.parameters()) if yes else None
        try:
            yield
        finally:
            if self.gradients is not None:
                self.gradients.close()
            self.gradients = None
            self.optimizer.zero_grad(set_to_none=True)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _job_of(model: torch.nn.Module, loss: Any, optimizer: Any, settings: Settings) -> Job:
    """A job that trains a copy of the model; it has no data yet."""
    copies = checks.lazy_buffers(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        model, optimizer = copy.deepcopy((model, optimizer), copies)
    else:
        model = copy.deepcopy(model, copies)
    own_step.take_over_plots(model)
    nothing: Any = None
    make = optimizers.optimizer_for(model, optimizer, settings.lr)
    return Job(model, objective_for(model, loss), nothing, None, settings, make)


def _subject_of(job: Job, device: torch.device) -> tuple[_Subject, list[str]]:
    """The job's model on the device, and what is to be said of its precision."""
    model, objective, settings = job.model, job.objective, job.settings
    number_format = number_format_for(job, device)
    model.to(device).train()
    if settings.precision == "fp64":
        model.double()
    notes = []
    if settings.precision == "auto":
        chosen, why = precision.choose(job, model, World(0, 1, device), None)
        if chosen == "bf16":
            notes.append(f"precision {chosen}: {why}.")
            number_format = number_format_for(job, device, chosen)
    if number_format.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own_optimizer = job.make_optimizer(model).optimizer
    if isinstance(own_optimizer, Several):
        raise BadSettings(
            f"{type(model).__name__} has several optimizers, so a step is several passes: forecast each model with its "
            "own optimizer"
        )
    job_state.settle(own_optimizer)
    return _Subject(model, place(objective, device, number_format.dtype), own_optimizer, number_format, device), notes


def _shard_of(model: torch.nn.Module, batch: Batch, shard: int) -> Batch:
    """A shard where the model is, in memory of its own: a view would hold the whole batch's."""
    size = rows(batch)
    part = cut(batch, 0, shard) if shard <= size else pick(batch, [n % size for n in range(shard)])
    return as_the_model(model, map_tensors(torch.clone, part))
