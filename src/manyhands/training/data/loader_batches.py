"""Batches that a loader gives: the same on every process, and the same again when a job is resumed.

A loader has its own order. Every process of a job iterates over all of it and takes its shard of each batch, so all
processes must get the same batches. A resumed job skips the batches that are done, so the loader must give them once
more. A digest, chained from batch to batch, shows both::

    batch      1   2   3   4   5   6   7
    digest     a   b   c   d   e   f   g      c = crc(b, what batch 3 holds)
    compared   *   *       *           *      between processes: batches 1, 2, 4, 8, ... and the last one

A digest stands for all batches before it too. So a few comparisons cover every batch, which matters because each makes
the host wait for the devices: a difference is found at the latest at the end of its epoch, before the epoch's
metrics are shown; loaders that shuffle differently are found at the first batch, before its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import random
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from manyhands import tree
from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings, WrongCheckpoint, type_in_words
from manyhands.training.data.order import Cursor, Window, epoch_order, length

B = TypeVar("B")

_SAMPLED = 4096  # elements of an array that its digest is made of
_ENDLESS = (itertools.cycle, itertools.count, itertools.repeat)


@dataclass
class BatchFactory:
    """The batches that a function of the user's makes for each epoch: ``batches()`` or ``batches(epoch)``."""

    function: Callable[..., Iterable[Any]]
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        parameters = inspect.signature(self.function).parameters.values()
        takes_epoch = any(each.default is each.empty and each.kind not in (2, 4) for each in parameters)  # no * or **
        return iter(self.function(self.epoch) if takes_epoch else self.function())


def windows(
    loader: Any, batches: Iterable[B], cursor: Cursor, rows: Callable[[B], int], pieces: Callable[[B], Iterable[bytes]]
) -> Iterator[tuple[Window, B]]:
    """The batches that are left of the cursor's epoch, each with its window.

    ``batches`` are all batches of the epoch, ``rows`` counts the samples of one, and ``pieces`` gives what its digest
    is made of.
    """
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(cursor.epoch)
    start = digest = number = 0
    repeated = True
    for number, batch in enumerate(batches, 1):
        for piece in pieces(batch):
            digest = zlib.crc32(piece, digest)
        stop = start + rows(batch)
        if number > cursor.batch:
            if not repeated:
                raise _not_repeated(cursor)
            yield Window(cursor.epoch, start, stop, cursor.step + number - cursor.batch - 1, digest), batch
        elif number == cursor.batch:
            repeated = stop == cursor.sample and cursor.digest in (None, digest)
        start = stop
    if not number:
        once = f"{type_in_words(loader)} can be iterated only once, and this one is used up. {_AGAIN}"
        why = once if isinstance(loader, Iterator) else "it has no samples"
        raise BadBatch(f"the loader gave no batch for epoch {cursor.epoch + 1}: {why}")
    if number < cursor.batch:
        raise _not_repeated(cursor)
    if not repeated:  # the epoch was at its end: no sample is missed
        warnings.warn(not_repeated_epoch(cursor.epoch + 1), stacklevel=2)


def of_size(batches: Iterable[B], size: int | None, rows: Callable[[B], int]) -> Iterator[B]:
    """The same batches; an error where the first has another size, unless it is short and the only one."""
    left = iter(batches)
    first = list(itertools.islice(left, 1))
    if size is not None and first and rows(first[0]) != size and (rows(first[0]) > size or any(True for _ in left)):
        raise another_size(size, rows(first[0]))
    yield from first
    yield from left


def another_size(size: int, of_data: int) -> BadSettings:
    return BadSettings(
        f"batch_size={size} was given to the trainer, and the data come in batches of {of_data}: give one of them, or "
        "both alike. A batch is divided over all devices"
    )


def check_agreement(pairs: Iterable[tuple[Window, B]], all_have: Callable[[int], bool]) -> Generator[tuple[Window, B]]:
    """The same batches; an error where the loaders of other processes give other ones."""
    window = None
    for number, (window, batch) in enumerate(pairs, 1):
        if number & (number - 1) == 0:
            check_agreed(window, all_have)
        yield window, batch
    if window is not None:
        check_agreed(window, all_have)


def check_agreed(window: Window, all_have: Callable[[int], bool]) -> None:
    """Refuse batches that differ from process to process, up to this one."""
    if window.digest is not None and not all_have(window.digest):
        raise BadBatch(
            f"the processes of this job are given different batches (noticed after sample {window.stop} of epoch "
            f"{window.epoch + 1}): each process takes its part of every batch, so all of them must iterate over the "
            f"same ones, the whole data. {_ADVICE}"
        )


def sampled_places(size: int) -> slice:
    """Where in a flat array the elements are that its digest is made of: few, and from all rows and columns."""
    stride = max(1, size // _SAMPLED)
    while math.gcd(stride, size) > 1:
        stride += 1
    return slice(None, None, stride)


# What is known of a loader beforehand


def is_used_up(loader: Any) -> bool:
    """Whether the loader can be iterated only once: a generator, or an iterator of Python's own."""
    return isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools")


def check(data: Any, epochs: int, *, may_be_endless: bool = False) -> None:
    """Refuse a loader that can be iterated once where there are several epochs, and one whose epoch never ends."""
    if may_be_endless:
        return
    loader = getattr(data, "loader", None)
    if isinstance(loader, _ENDLESS) or _says_endless(loader):
        name = type(loader).__name__ if isinstance(loader, _ENDLESS) else "data set"
        raise BadBatch(f"a {name} without an end was given: its first epoch would never end. {_END_IT}")
    if epochs > 1 and is_used_up(loader):
        once = f"{type_in_words(loader)} can be iterated only once, and max_epochs is {epochs}"
        raise BadBatch(f"{once}. {_AGAIN}, or max_epochs=1")


def _says_endless(loader: Any) -> bool:
    """A tf.data.Dataset knows how many elements it has; -1 is one without an end."""
    loader = getattr(loader, "dataset", loader)
    cardinality = getattr(loader, "cardinality", None)
    return callable(cardinality) and type(loader).__module__.startswith("tensorflow.") and int(cardinality()) == -1


_END_IT = (
    "Say where an epoch ends: in tf.data leave .repeat() out (the trainer iterates max_epochs times), or give "
    "dataset.take(1000); elsewhere give a function such as lambda: itertools.islice(batches(), 1000); or say where the "
    "training ends, limits=mh.Limits(max_steps=10000)"
)
_AGAIN = "Give the function that makes it (batches instead of batches()), or an object whose __iter__ starts over"


# Errors


def _not_repeated(cursor: Cursor) -> WrongCheckpoint:
    return WrongCheckpoint(
        f"the checkpoint is from after batch {cursor.batch} ({count_of(cursor.sample, 'sample')}) of epoch "
        f"{cursor.epoch + 1}, and the loader does not repeat the batches before it: some samples would be trained on "
        "twice and others never. "
        f"{_ADVICE}. This run can continue from a checkpoint at the end of an epoch"
    )


def not_repeated_epoch(epoch: int) -> str:
    """The warning for a job that is resumed at the start of an epoch with a loader that has another order now."""
    return (
        f"the loader does not repeat epoch {epoch} in the order that it had before the job was resumed, so this "
        f"run is not the one that would have come without a stop. {_ADVICE}"
    )


_ADVICE = (
    "The trainer seeds the shuffle of the framework's own loaders, Python's random and NumPy's global generator by the "
    "epoch. A random generator of your own (generator=..., a shuffle inside interleave) it cannot seed: leave it out, "
    "or give a function of the epoch, such as def batches(epoch): rng = np.random.default_rng((0, epoch)); ...; or "
    "give (X, y) arrays"
)


# Random numbers that a loader draws


class OwnRandomStream:
    """Within it, NumPy and Python draw from a separate stream, which the next ``with`` continues."""

    def __init__(self, seed: int) -> None:
        self._within: tuple[Any, Any] = np.random.RandomState(seed % 2**32).get_state(), random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._without = _state()
        _set(self._within)

    def __exit__(self, *_: object) -> None:
        self._within = _state()
        _set(self._without)


def draw_within(stream: AbstractContextManager[None], values: Iterable[Any]) -> Iterator[Any]:
    """The same values; the random numbers that they take are drawn from the stream."""
    end = object()
    with stream:
        values_left = iter(values)
    while True:
        with stream:
            value = next(values_left, end)
        if value is end:
            return
        yield value


@contextlib.contextmanager
def preserve_host_random_state() -> Iterator[None]:
    """Afterwards NumPy's and Python's random numbers go on as if nothing had been drawn within."""
    before = _state()
    try:
        yield
    finally:
        _set(before)


def _state() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _set(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])


# Only the first batches


def as_number(limit: float | None, source: Any, batch_size: int, option: str) -> int | None:
    """A limit as a number of batches; None: all. ``1`` is one batch, ``1.0`` all, ``0.5`` half of them.

    A source with ``drop_last`` (PyTorch's) is limited to its full batches.
    """
    full = source.count // batch_size if getattr(source, "drop_last", False) else None
    if full == 0:
        raise BadBatch(f"drop_last=True leaves no batch: {count_of(source.count, 'sample')}, batches of {batch_size}")
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return full
    if isinstance(limit, int):
        return limit if full is None else min(limit, full)
    batches = full or (length(source) if source.count is None else -(-source.count // batch_size))
    if batches is None:
        raise BadSettings(f"{option}={limit:g} is a part, and the loader has no __len__: give a number of batches")
    number = math.floor(batches * limit + 1e-9)  # 0.29 * 100 is a little less than 29
    if not number:
        raise BadSettings(f"{option}={limit:g} of {batches} batches is none: give at least {1 / batches:.3g}")
    return number


def first_batches(source: Any, limit: float | None, batch_size: int, option: str) -> Any:
    """The source with its first batches only: of a loader its own, else of ``batch_size`` samples each."""
    if source is None:
        return source
    batch_size = source.batch_size or batch_size
    batches = as_number(limit, source, batch_size, option)
    if batches is None:
        return source
    if source.count is None:
        return dataclasses.replace(source, loader=FirstBatches(source.loader, batches))
    return source.first(batches * batch_size) if batches * batch_size < source.count else source


class FirstBatches:
    """A loader that ends after this many batches; otherwise it is the one inside."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


# Random-access sources


def is_random_access(data: Any) -> bool:
    """Whether ``data[i]`` is a sample. What can also be iterated is a loader of batches, unless it gives numbers."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, (Sequence, Mapping)):
        return False
    if hasattr(data, "shape") or not len(data):
        return False
    return not hasattr(data, "__iter__") or any(not np.ndim(leaf) for leaf in tree.flatten(data[0])[0])


class Samples:
    """The batches of a random-access source: a loader in the job's order of the epoch, or in that of the source."""

    def __init__(self, source: Any, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size
        self._epoch = 0
        self._seed: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_order(self, seed: int | None) -> None:
        """The order of this seed; None: that of the source."""
        self._seed = seed

    def __len__(self) -> int:
        return -(-len(self._source) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = epoch_order(self._seed or 0, self._epoch, len(self._source), shuffle=self._seed is not None)
        for start in range(0, len(order), self._batch_size):
            yield _stack([self._source[int(number)] for number in order[start : start + self._batch_size]])


def _stack(samples: list[Any]) -> Any:
    leaves, structures = zip(*map(tree.flatten, samples), strict=True)
    if len(set(structures)) > 1:
        raise BadBatch("samples of the data have unlike parts: give every sample the same ones")
    try:
        return structures[0].unflatten([np.stack(parts) for parts in zip(*leaves, strict=True)])
    except ValueError as error:
        raise BadBatch(f"samples of the data have unlike shapes ({error}): pad them to make one array") from error
