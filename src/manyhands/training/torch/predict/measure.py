"""Measures the step of one device: seconds by part, gradients as bucketed, bytes by what they are for.

The step is that of the trainer with several ranks, without the sums over processes: the same objective, precision,
memory format and optimizer, gradients as views of the same buckets. It is made on a copy of the model.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands import machine, tree
from manyhands.errors import BadSettings, ManyhandsError, first_line
from manyhands.predict.profile import Bucket, MemoryPoint, Profile, StepTime, from_mapping
from manyhands.training import refusals
from manyhands.training.settings import Settings
from manyhands.training.torch import optimizers
from manyhands.training.torch.data import sources
from manyhands.training.torch.data.samples import as_the_model
from manyhands.training.torch.data.sources import Batch
from manyhands.training.torch.job import Job, numbers_for
from manyhands.training.torch.objective import Objective, objective_for, placed
from manyhands.training.torch.predict.memory_count import MemoryCount
from manyhands.training.torch.preflight import precision
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import job_state, randomness
from manyhands.training.torch.step.eager import Numbers
from manyhands.training.torch.step.several_optimizers import Several

_WARM_UP = 2
_TRIALS = (3, 20)  # at least and at most
_LONG_ENOUGH = 1.0  # seconds of trials


@dataclass
class _Subject:
    """A copy of the model, ready for steps."""

    model: torch.nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    numbers: Numbers
    device: torch.device
    gradients: GradientSum | None = None
    arrivals: dict[int, Any] = field(default_factory=dict)

    def begin(self) -> None:
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.begin()

    def forward(self, part: Batch) -> torch.Tensor:
        laid = self.numbers.lay(part)
        with self.numbers.scope(self.device):
            loss, _ = self.objective(self.model, laid)
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


def profile(
    model: torch.nn.Module,
    batch: Batch,
    *,
    loss: Any = None,
    optimizer: Any = None,
    settings: Settings | None = None,
    device: torch.device | None = None,
) -> Profile:
    """Measure a step of the model on the batch, and on halves and quarters of it."""
    if not isinstance(model, torch.nn.Module):
        raise refusals.not_a_model(model, "a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadSettings(f"a {type(model).__name__} has no parameters that could be trained")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = settings or Settings()
    try:
        with randomness.kept(device):
            return _profile(model, batch, loss, optimizer, settings, device)
    except ManyhandsError:
        raise
    except Exception as error:
        raise BadSettings(
            f"the model cannot be run on this batch: {first_line(error)}. A step is loss(model(*inputs), target) of a "
            "batch (inputs, target), or the model's own training_step(batch)"
        ) from error


def _profile(
    model: torch.nn.Module, batch: Batch, loss: Any, optimizer: Any, settings: Settings, device: torch.device
) -> Profile:
    size = sources.rows(batch)
    name = type(model).__name__
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    subject, notes = _subject(model, loss, optimizer, settings, device)
    cores = 0 if device.type == "cuda" else machine.usable_cores()
    times: list[StepTime] = []
    memory: list[MemoryPoint] = []
    buckets: tuple[Bucket, ...] = ()
    for count, several in ((1, False), (2, False), (2, True), (4, True)):
        shard = -(-size // count)
        if any((point.batch, point.several) == (shard, several) for point in memory):
            continue
        part = _placed(subject, sources.cut(batch, 0, shard))
        threads = max(1, cores // count) if several else cores
        with subject.several(several), _threads(threads if several else 0):
            try:
                timed = _timed(subject, part, shard, threads)
            except torch.cuda.OutOfMemoryError:  # what fits is enough: the rest is on a line
                notes.append(f"{shard} samples do not fit into the memory of one device: figures are extrapolated.")
                torch.cuda.empty_cache()
                continue
            if (shard, threads) not in {(point.batch, point.threads) for point in times}:
                times.append(timed)
            if several and not buckets:
                buckets = _arrivals(subject, part)
            memory.append(MemoryPoint(shard, several, from_mapping(_counted(subject, part, base))))
    if not times:
        raise BadSettings(
            f"a quarter of the batch, {-(-size // 4)} samples, does not fit into memory: give a smaller one"
        )
    if not buckets:  # a batch of one sample
        with subject.several(True):
            buckets = _arrivals(subject, _placed(subject, batch))
    return Profile(
        name,
        torch.cuda.get_device_name(device) if device.type == "cuda" else machine.host_name(),
        size,
        tuple(times),
        buckets,
        kind="gpu" if device.type == "cuda" else "cpu",
        cores=cores,
        input_bytes=_batch_bytes(batch) / size,
        memory=tuple(memory),
        capacity=_capacity(device),
        notes=tuple(notes),
    )


def _subject(
    model: torch.nn.Module, loss: Any, optimizer: Any, settings: Settings, device: torch.device
) -> tuple[_Subject, list[str]]:
    if isinstance(optimizer, torch.optim.Optimizer):
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        model = copy.deepcopy(model)
    nothing: Any = None  # the data of a job: a step needs none
    objective = objective_for(model, loss)
    made = optimizers.optimizer_for(model, optimizer, settings.lr)
    job = Job(model, objective, nothing, None, settings, made)
    numbers = numbers_for(job, device)
    model.to(device).train()
    if settings.precision == "fp64":
        model.double()
    notes = []
    if settings.precision == "auto":
        choice = precision.choose(job, model, objective, World(0, 1, device), None)
        notes.append(f"{choice}.")
        numbers = precision.bf16_numbers(model) if choice.bf16 else numbers
    if numbers.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = job.make_optimizer(model)
    if isinstance(own, Several):
        raise BadSettings(
            f"{type(model).__name__} has several optimizers, so a step is several passes: predict each model with its "
            "own optimizer"
        )
    job_state.settle(own)
    return _Subject(model, placed(objective, device, numbers.dtype), own, numbers, device), notes


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


def _timed(subject: _Subject, part: Batch, shard: int, threads: int) -> StepTime:
    """The parts of the best trial: what disturbs only ever adds. On a GPU they are scaled to a step nobody waits in."""
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
    forward, backward, update = min(trials, key=sum)
    step = StepTime(shard, forward, backward, update, threads)
    if subject.device.type != "cuda":
        return step
    start = subject.clock()
    for _ in range(len(trials)):
        subject.step(part)
    return step.times((subject.clock() - start) / len(trials) / step.total)


def _arrivals(subject: _Subject, part: Batch) -> tuple[Bucket, ...]:
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
        last = max((arrived[id(one)]() for one in parameters if id(one) in arrived), default=end)
        buckets.append(Bucket(size, min(1.0, max(0.0, (last - begin) / max(end - begin, 1e-12)))))
    return tuple(buckets)


def _moments(device: torch.device) -> Callable[[], Callable[[], float]]:
    """What notes a moment of the device; its seconds are known when the device is done."""
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


def _counted(subject: _Subject, part: Batch, base: int) -> dict[str, float]:
    """Bytes at the peak of a step; on a GPU what the allocator had beyond the tensors is workspace."""
    on_gpu = subject.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(subject.device)
        torch.cuda.reset_peak_memory_stats(subject.device)
        subject.step(part)
        torch.cuda.synchronize(subject.device)
        peak = torch.cuda.max_memory_allocated(subject.device) - base
    subject.begin()
    if subject.gradients is None:
        subject.optimizer.zero_grad(set_to_none=True)
    with MemoryCount(subject.device) as count:
        count.hold("weights", [*subject.model.parameters(), *subject.model.buffers()])
        count.hold("optimizer", _optimizer_tensors(subject.optimizer))
        count.hold("batch", _tensors(part))
        if subject.gradients is not None:
            count.hold("gradients", [parameter.grad for parameter in subject.model.parameters()])
        subject.step(part)
        count.hold("gradients", [parameter.grad for parameter in subject.model.parameters()])
    parts: dict[str, float] = {**count.at_peak()}
    if subject.gradients is not None:
        own = sum(p.numel() * p.element_size() for p in subject.model.parameters() if p.requires_grad)
        parts["buckets"] = parts.get("gradients", 0) - own
        parts["gradients"] = own
    if on_gpu:
        parts["workspace"] = max(0.0, peak - sum(parts.values()))
    return parts


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for values in optimizer.state.values() for value in values.values()]
    return [value for value in kept if isinstance(value, torch.Tensor)]


def _placed(subject: _Subject, part: Batch) -> Batch:
    """A shard where the model is, in memory of its own: a view would hold the whole batch's."""
    return as_the_model(
        subject.model, tree.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, part)
    )


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [leaf for leaf in tree.flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _batch_bytes(batch: Batch) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(batch))


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine.host_memory().total
