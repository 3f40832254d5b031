"""Brings each batch to the device before it is needed.

Arrays that fit live on the device: a batch is a gather there. Everything else is read ahead, by a loader's worker
processes or in a thread, and copied from pinned memory while the device computes. The host waits only where the loader
is slower than the device.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _threads_queues
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands import tree
from manyhands.backends.protocol import Arrival
from manyhands.backends.torch import devices as backend
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Window
from manyhands.training.torch.data.batches import Batch, Shard, cut, map_tensors, rows_or_none
from manyhands.training.torch.data.sources import Arrays, Samples, Source, Stream
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state.randomness import mixed_seed

_AHEAD = 2
_HOST = torch.device("cpu")


def resident(source: Source, device: torch.device) -> Source:
    """The source, on the device if it is arrays that fit there well, or arrays on another device."""
    if not isinstance(source, Arrays):
        return source
    places = {tensor.device for tensor in source.tensors}
    to_gpu = device.type == "cuda" and places == {_HOST}
    is_large = to_gpu and source.nbytes >= torch.cuda.mem_get_info(device)[0] // 2
    return source if is_large or places == {device} else source.to(device)


@dataclass
class Division:
    """How batches are divided over the ranks of a job, and the shard of this one into micro-batches."""

    world: World
    shares: list[float] | None = None  # None: equal ones
    least: int = 1  # no shard has fewer samples, unless it has none: normalisation over a shard needs two
    accumulate: int = 1  # micro-batches of a shard
    empty: bool = False  # whether a rank without samples gets a batch of none

    def spans(self, window: Window) -> list[tuple[int, int]]:
        """Where each micro-batch of this rank begins and ends in the epoch's order."""
        start, stop = window.part(self.world.rank, self.world.size, self.shares, least=self.least)
        size = stop - start
        count = self.accumulate if self.empty else min(self.accumulate, size)
        return [(start + size * n // count, start + size * (n + 1) // count) for n in range(count)]

    def shard(self, window: Window, parts: Iterable[Batch]) -> Shard | None:
        """This rank's shard of a batch, of which these are the micro-batches; None without samples."""
        sizes = tuple(stop - start for start, stop in self.spans(window))
        of_ranks = window.sizes(self.world.size, self.shares, least=self.least)
        return Shard(tuple(parts), sizes, tuple(of_ranks)) if sizes else None


def shards(
    source: Source, order: NDArray[np.int64], windows: Sequence[Window], division: Division, *, seed: int = 0
) -> Iterator[Shard | None]:
    """This rank's shard of every window of an epoch, on its device; ``seed``: what a dataset draws follows from it."""
    spans = [division.spans(window) for window in windows]
    batches = _take(source, order, windows, division.world, [span for each in spans for span in each], seed)
    for window, each in zip(windows, spans, strict=True):
        yield division.shard(window, itertools.islice(batches, len(each)))


def _take(
    source: Source,
    order: NDArray[np.int64],
    windows: Sequence[Window],
    world: World,
    parts: Sequence[tuple[int, int]],
    seed: int,
) -> Iterator[Batch]:
    """The samples of each of these parts of the epoch's order, on the device."""
    if isinstance(source, Arrays) and source.tensors[0].device == world.device:
        numbers = torch.from_numpy(order)
        if world.device.type == "cuda":
            numbers = numbers.pin_memory().to(world.device, non_blocking=True)
        return (source.take(numbers[start:stop]) for start, stop in parts)
    if isinstance(source, Arrays):
        return on_device((source.take(torch.from_numpy(order[start:stop])) for start, stop in parts), world.device)
    assert isinstance(source, Samples), "a stream has no order: see stream_shards"
    # Worker processes send pageable memory: PyTorch pins what they sent in a thread of its own.
    pin = world.device.type == "cuda" and source.workers > 0
    first = windows[0] if windows else Window(0, 0, 0, 0)
    seeds = {"seed": mixed_seed(seed, first.step, world.rank), "draws": mixed_seed(seed, first.epoch)}
    divided = len(parts) > len(windows) or world.size > 1
    picked = source.batches([order[start:stop] for start, stop in parts], **seeds, pin=pin, divided=divided)
    return on_device(picked, world.device, read_ahead=pin)


def stream_windows(source: Stream, cursor: Cursor, *, seed: int = 0) -> Iterator[tuple[Window, Batch]]:
    """The batches of a loader from the cursor on, each with its window."""
    batches = loader_batches.of_size(source.batches(seed), source.required_size, _count)
    return loader_batches.windows(source.loader, batches, cursor, _count, _pieces)


def _count(batch: Batch) -> int:
    """The samples of a batch; an object that shows none counts as one."""
    count = rows_or_none(batch)
    return 1 if count is None else count


def _pieces(batch: Batch) -> Iterator[bytes]:
    """The input of a batch's digest; of tensors on a GPU only dtype and shape, because reading them would wait."""
    for leaf in tree.flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            yield f"{leaf.dtype} {tuple(leaf.shape)}".encode()
            if leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested:
                few = leaf.detach().resolve_conj().reshape(-1)[loader_batches.sampled_places(leaf.numel())]
                yield few.contiguous().view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, (str, bytes, int, float)):
            yield repr(leaf).encode()
        elif isinstance(leaf, np.ndarray):
            yield f"{leaf.dtype} {leaf.shape}".encode()
            yield leaf.flat[loader_batches.sampled_places(leaf.size)].tobytes()


def stream_shards(batches: Iterable[tuple[Window, Batch]], division: Division) -> Iterator[tuple[Window, Shard | None]]:
    """The batches of a stream, and this rank's shard of each."""
    world = division.world
    is_cut = world.size > 1 or division.accumulate > 1

    def parts() -> Iterator[tuple[Window, Shard | None]]:
        for window, batch in batches:
            spans = [(start - window.start, stop - window.start) for start, stop in division.spans(window)]
            cuts = [cut(batch, *span) if is_cut and not window.whole else batch for span in spans]
            yield window, division.shard(window, cuts)

    return on_device(parts(), world.device)


# The thread of ``ahead`` forks a loader's workers. When a fork ends, concurrent.futures would join this very thread: an
# error, with which the worker ends, and for which PyTorch ends the job.
os.register_at_fork(after_in_child=_threads_queues.clear)  # type: ignore[attr-defined]


def ahead(values: Iterable[Any], device: torch.device = _HOST) -> Iterator[Any]:
    """The values, read a few ahead by a thread; an error is raised where its value would be.

    On the way to a GPU they are laid into pinned memory by that thread, too.
    """
    left, end, on_gpu = iter(values), object(), device.type == "cuda"

    def next_value() -> Any:
        value = next(left, end)
        return map_tensors(_pin, value) if on_gpu else value

    thread = ThreadPoolExecutor(1, "manyhands-feed")
    if on_gpu:
        thread.submit(torch.cuda.set_device, device)  # else it would create a context on the first GPU
    try:
        coming = collections.deque(thread.submit(next_value) for _ in range(1 + _AHEAD))
        while (value := coming.popleft().result()) is not end:
            coming.append(thread.submit(next_value))
            yield value
    finally:
        thread.shutdown(cancel_futures=True)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in pinned memory; sparse, nested and GPU tensors are not changed."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def on_device(values: Iterator[Any], device: torch.device, *, read_ahead: bool = False) -> Iterator[Any]:
    """The trees on the device; the next one is copied while this one is in use.

    ``read_ahead``: by processes, into pinned memory. On a CPU no thread reads ahead: while a loader draws random
    numbers, the model must not.
    """
    if device.type == "cpu":
        yield from values
        return

    def start(value: Any) -> Any:
        leaves, structure = tree.flatten(value)
        return [_start_copy(leaf, device) for leaf in leaves], structure

    def finish(started: Any) -> Any:
        moving, structure = started
        return structure.unflatten(leaf.result() if isinstance(leaf, Arrival) else leaf for leaf in moving)

    coming = collections.deque[Any]()
    for value in values if read_ahead else ahead(values, device):
        coming.append(start(value))
        if len(coming) > 1:
            yield finish(coming.popleft())
    yield from map(finish, coming)


def _start_copy(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return backend.start_move(leaf, device, source_is_final=True)  # a batch is ours alone
    return backend.move_model(leaf, device) if backend.is_model(leaf) else leaf  # a PackedSequence moves itself
