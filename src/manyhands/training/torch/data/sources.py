"""Where samples come from: arrays in memory, a dataset, or a loader with its own order.

A source gives a rank its shards, batch by batch. ``Arrays`` can live on the device as a whole; a batch is then a
gather there and the host has nothing to do. ``Samples`` are fetched from a dataset by number, with the worker
processes, collate function and pinned memory of PyTorch's own DataLoader. ``Stream`` is a loader with an order of its
own (an iterable dataset, a custom sampler): every rank reads all of it and takes its part.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from manyhands.backends.torch import compat
from manyhands.errors import BadBatch
from manyhands.training import refusals
from manyhands.training.data.loader_batches import draw_within
from manyhands.training.data.order import spread
from manyhands.training.data.sources import check_lengths, check_numbers, is_list_of_numbers, with_arrays
from manyhands.training.torch.data.batches import Batch, check_asked, cut, rows_or_none
from manyhands.training.torch.data.dict_batches import Named
from manyhands.training.torch.state import randomness
from manyhands.training.torch.state.randomness import DrawnSamples, draws_nothing

_KINDS = "(X, y) tensors or arrays, a Dataset, or a DataLoader"
Prepare = Callable[[Batch], Batch]
Look = Callable[[Batch], None]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def scale_images(batch: Batch) -> Batch:
    """Bytes of grey images to numbers from 0 to 1 with a channel axis: done on the device, after the gather."""
    images, labels = batch
    return images.unsqueeze(1).float().div_(255), labels.long()


@dataclass
class Arrays:
    """Tensors with one row per sample; ``prepare`` makes a batch of the gathered rows, on the device."""

    tensors: tuple[torch.Tensor, ...]
    prepare: Prepare | None = None
    batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    rereadable: ClassVar[bool] = True  # the first samples can be read without consuming them

    def __post_init__(self) -> None:
        check_lengths(self.tensors)

    @property
    def count(self) -> int:
        return len(self.tensors[0])

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def few(self, count: int) -> Batch:
        """The first samples."""
        return self.take(torch.arange(min(count, self.count), device=self.tensors[0].device))

    def pick(self, numbers: Numbers, draws: int | None = None) -> Batch:
        """The samples of these numbers; ``draws``: the seed of what a collate function draws."""
        return self.take(torch.from_numpy(numbers).to(self.tensors[0].device))

    def take(self, index: torch.Tensor) -> Batch:
        """The samples of those numbers; everything happens on the device that the arrays are on."""
        rows = tuple(tensor.index_select(0, index) for tensor in self.tensors)
        return self.prepare(rows) if self.prepare else rows

    def first(self, count: int) -> Arrays:
        """Only the first samples."""
        return dataclasses.replace(self, tensors=tuple(tensor[:count] for tensor in self.tensors))

    def spread(self, count: int) -> Arrays:
        """Only this many samples, from the first to the last: data may be sorted, by length or by label."""
        numbers = torch.from_numpy(spread(self.count, count))
        return dataclasses.replace(self, tensors=tuple(tensor[numbers.to(tensor.device)] for tensor in self.tensors))

    def to(self, device: torch.device) -> Arrays:
        return dataclasses.replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))

    # As a loader, for loops written by hand.

    def __len__(self) -> int:
        return -(-self.count // (self.batch_size or 1))

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(self.count) if self.shuffle else torch.arange(self.count)
        return (self.take(part) for part in order.split(self.batch_size or 1))


@dataclass
class Samples:
    """A dataset that gives one sample for one number."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    batch_size: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    start_worker: Callable[[int], None] | None = None
    # The loader's options for its worker processes.
    options: dict[str, Any] = field(default_factory=dict)
    # Looks at each batch on the host, before it goes to the device; raises where it cannot be trained on.
    look: Look | None = None
    rereadable: ClassVar[bool] = True
    _kept: DataLoader[Any] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.count:
            raise BadBatch("the data set is empty: it has no samples")

    @property
    def count(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def first(self, count: int) -> Samples:
        """Only the first samples."""
        return dataclasses.replace(self, dataset=torch.utils.data.Subset(self.dataset, range(count)))

    def few(self, count: int) -> Batch:
        """The first samples; random numbers stay."""
        return self.pick(np.arange(min(count, self.count)))

    def pick(self, numbers: Numbers, draws: int | None = None) -> Batch:
        """The samples of these numbers; ``draws``: the seed of what a collate function draws."""
        plain = dataclasses.replace(self, workers=0, look=None)
        if self.collate is not None and draws is not None:
            plain.collate = functools.partial(_collate, self.collate, draws)
        (batch,) = plain.batches([numbers], seed=0, draws=0)
        return batch

    def batches(
        self, parts: Sequence[Numbers], *, seed: int, draws: int, pin: bool = False, divided: bool = False
    ) -> Iterator[Batch]:
        """A batch for each list of numbers; for an empty list a batch of no samples.

        ``seed`` is that of the loader's worker processes, ``draws`` that of what each sample draws. ``divided``: each
        is a part of a batch, so that all samples must be in it.
        """
        plain = draws_nothing(self.dataset, self.collate)
        numbers = [part.tolist() or [0] for part in parts]
        loader = self._loader(numbers if plain else [(draws, each) for each in numbers], plain, seed, pin)
        loaded = iter(loader)
        # Samples that are read in this process leave its random numbers as they are.
        stream = nullcontext() if plain or self.workers else randomness.OwnStream(draws)
        for part in parts:
            with stream:
                batch = _plain_dict(next(loaded))
            if divided:
                check_asked(batch, len(part) or 1)
            if self.look is not None:
                self.look(batch)
            yield batch if len(part) else cut(batch, 0, 0)

    def _loader(self, batches: list[Any], plain: bool, seed: int, pin: bool) -> DataLoader[Any]:
        """The loader of these batches; one with persistent workers is kept, and gets other batches."""
        if self._kept is not None:
            self._kept.batch_sampler[:] = batches  # type: ignore[index]
            return self._kept
        loader = DataLoader(
            self.dataset if plain else DrawnSamples(self.dataset),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=self.workers,
            pin_memory=pin,
            worker_init_fn=functools.partial(_start_worker, self.start_worker) if self.workers else None,
            # Without it the loader would draw from the numbers that dropout uses, and a resumed job once more.
            generator=torch.Generator().manual_seed(seed),
            **(self.options if self.workers else {}),
        )
        self._kept = loader if loader.persistent_workers else None
        return loader


@dataclass
class Stream:
    """A loader with its own order: every rank reads whole batches and takes its part of each."""

    loader: Any
    batch_size: int | None = None
    shuffle: bool = False
    count: int | None = None
    look: Look | None = None
    required_size: int | None = None  # the trainer's, where the loader does not say its own

    @property
    def rereadable(self) -> bool:
        return not isinstance(self.loader, Iterator)

    def few(self, count: int) -> Batch:
        """The first batch; nothing is consumed."""
        return next(dataclasses.replace(self, loader=_without_workers(self.loader), look=None).batches(0))

    def first_batch(self) -> tuple[Batch, Stream]:
        """The first batch, and the stream with all batches: an iterator gets it back."""
        if self.rereadable:
            return self.few(1), self
        batch = next(self.loader)
        return _plain_dict(batch), dataclasses.replace(self, loader=itertools.chain([batch], self.loader))

    def batches(self, seed: int) -> Iterator[Batch]:
        """All batches of an epoch; the loader draws the same random numbers on every rank."""
        stream = randomness.OwnStream(seed, getattr(self.loader, "generator", None))
        for from_loader in draw_within(stream, self._epoch()):
            batch = _plain_dict(from_loader)
            if rows_or_none(batch) == 0:
                continue
            if self.look is not None:
                self.look(batch)
            yield batch

    def _epoch(self) -> Iterator[Any]:
        """The loader's batches. Persistent workers get their seed once; each later epoch draws it, too, to be alike."""
        loader = self.loader
        if isinstance(loader, DataLoader) and getattr(loader, compat.PERSISTENT_ITERATOR) is not None:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        yield from loader


Source = Arrays | Samples | Stream


def source(data: Any, *, shuffle: bool = True) -> Source:
    """The source for a user's data: arrays, a dataset, a loader, or a source already."""
    if isinstance(data, (Arrays, Samples, Stream)):
        return data
    data = with_arrays(data)
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, IterableDataset):
        raise BadBatch("an IterableDataset gives samples, not batches: wrap it in a DataLoader with a batch_size")
    if type(data) is TensorDataset:  # one of a subclass may give something else than its tensors
        return Arrays(data.tensors, shuffle=shuffle)
    if _is_array(data):
        return Arrays((torch.as_tensor(data),), shuffle=shuffle)
    if isinstance(data, (tuple, list)) and data and all(_is_array(part) for part in data):
        check_numbers([part for part in data if isinstance(part, np.ndarray)])
        return Arrays(tuple(torch.as_tensor(x) for x in data), shuffle=shuffle)
    if isinstance(data, (tuple, list)) and data and is_list_of_numbers(data[0]):
        raise refusals.lists_of_numbers()
    if isinstance(data, Mapping) and 0 not in data:  # one with 0 may be a dataset
        if not data:
            raise refusals.not_data(data, _KINDS)
        if (name := next((name for name, part in data.items() if not _is_array(part)), None)) is not None:
            raise refusals.not_a_column(name, data[name])
        check_numbers([part for part in data.values() if isinstance(part, np.ndarray)])
        return Arrays(tuple(torch.as_tensor(part) for part in data.values()), Named(tuple(data)), shuffle=shuffle)
    if isinstance(data, (str, bytes)):
        raise refusals.not_data(data, _KINDS)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Samples(data, shuffle=shuffle)
    if hasattr(data, "__iter__"):
        return Stream(data)
    raise refusals.not_data(data, _KINDS)


def _is_array(part: object) -> bool:
    return isinstance(part, torch.Tensor | np.ndarray)


def _of_loader(loader: DataLoader[Any]) -> Source:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise BadBatch("the trainer divides a batch itself: give the loader shuffle=True, and no DistributedSampler")
    if not _gives_each_once(loader) or isinstance(loader.dataset, IterableDataset):
        return Stream(loader, loader.batch_size)
    shuffle = type(loader.sampler) is RandomSampler
    if type(loader.dataset) is TensorDataset and loader.collate_fn is torch.utils.data.default_collate:
        return Arrays(loader.dataset.tensors, None, loader.batch_size, shuffle, loader.drop_last)
    return Samples(
        loader.dataset,
        loader.collate_fn,
        loader.num_workers,
        loader.batch_size,
        shuffle,
        loader.drop_last,
        loader.worker_init_fn,
        _worker_options(loader),
    )


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How the loader wants its workers."""
    context: Any = loader.multiprocessing_context
    method = context.get_start_method() if hasattr(context, "get_start_method") else context  # a context cannot be sent
    names = ("prefetch_factor", "timeout", "persistent_workers")
    return {"multiprocessing_context": method, **{name: getattr(loader, name) for name in names}}


def _gives_each_once(loader: DataLoader[Any]) -> bool:
    """Whether the loader's order is one that we can make ourselves: all samples, in order or shuffled."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        plain = not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    else:
        plain = type(sampler) is SequentialSampler
    return plain and loader.batch_size is not None


def _start_worker(function: Callable[[int], None] | None, number: int) -> None:
    """Start a worker process of a loader: the user's function sees the dataset that the user has.

    Batches are handed over by the names of their files in shared memory. To pass file descriptors, as PyTorch does on
    Linux, takes the host twice as long, and a program that keeps batches runs out of them.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        torch.empty(1).share_memory_()
    except RuntimeError:  # the program that cleans up cannot be started
        torch.multiprocessing.set_sharing_strategy(before)
    if function is None:
        return
    information: Any = torch.utils.data.get_worker_info()
    if isinstance(information.dataset, DrawnSamples):
        object.__setattr__(information, "dataset", information.dataset.dataset)  # it refuses to be changed otherwise
    function(number)


def _collate(collate: Callable[[list[Any]], Any], seed: int, samples: list[Any]) -> Any:
    randomness.seed_all(seed)
    return collate(samples)


def _without_workers(loader: Any) -> Any:
    """A copy of the loader that reads in this process; the state of its sampler does not change."""
    if not isinstance(loader, DataLoader):
        return loader
    try:
        plain = copy.deepcopy(loader, {id(loader.dataset): loader.dataset})
    except Exception:  # it holds something that cannot be copied
        return loader
    plain.num_workers = plain.timeout = 0
    return plain


def _plain_dict(batch: Batch) -> Batch:
    """A batch by name as a plain dict: tokenizers return their own class, which is not a tree."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch
