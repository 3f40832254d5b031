"""Where samples come from in JAX, TensorFlow and MXNet: NumPy arrays, or a loader with its own order.

PyTorch has its own datasets and loaders, and sources for them: :mod:`manyhands.training.torch.data.sources`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from manyhands import tree
from manyhands.amounts import count_of
from manyhands.errors import BadBatch
from manyhands.training import refusals
from manyhands.training.data import loader_batches
from manyhands.training.data.loader_batches import OwnRandomStream, draw_within
from manyhands.training.data.order import Cursor, Window, epoch_order, spread

Batch = tuple[Any, ...]
Array = NDArray[Any]
_KINDS = "(X, y) arrays, or a loader that gives batches (X, y)"
_PUT_TOGETHER = "a loader of samples has to put them together (of a tf.data.Dataset: .batch(64))"
_NO_NUMBERS = "USOMm"  # kinds of NumPy's: text, bytes, objects, dates and spans of time


def check_lengths(arrays: Sequence[Any]) -> None:
    """The arrays of a data set have the same number of samples, and at least one."""
    lengths = [len(array) for array in arrays]
    if not lengths or len(set(lengths)) != 1:
        raise BadBatch(f"the arrays of a data set must have the same number of samples, these have {lengths}")
    if not lengths[0]:
        raise BadBatch("the data set is empty: it has no samples")


def not_finite(data: Any) -> str | None:
    """Which arrays of a data set have NaN or infinity, and where; None where there are none, or no arrays."""
    return bad_numbers(getattr(data, "arrays", getattr(data, "tensors", ())))


def bad_numbers(arrays: Sequence[Any], samples: Sequence[int] | None = None) -> str | None:
    """The same of some arrays; ``samples``: the numbers of the samples that their rows are, where they are a batch."""
    problems = []
    for number, array in enumerate(arrays):
        bad = _not_finite(array)
        if bad.any():
            name = ("X" if len(arrays) == 2 else f"array {number}") if number < len(arrays) - 1 else "y"
            rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1))
            count = int(bad.sum())
            amount = "1 number that is" if count == 1 else f"{count} numbers that are"
            where = "" if samples is None else " of the batch"
            problems.append(
                f"{name} has {amount} NaN or infinite, in {len(rows)} of {count_of(len(bad), 'sample')}{where} (the "
                f"first is sample {rows[0] if samples is None else samples[rows[0]]})"
            )
    return (
        f"The data are the cause: {'; '.join(problems)}. Leave these samples out, or fill them in" if problems else None
    )


def _not_finite(array: Any) -> NDArray[np.bool_]:
    if hasattr(array, "isfinite"):  # PyTorch's, of any precision, on any device
        return np.asarray(~array.isfinite().cpu().numpy(), dtype=np.bool_)
    if array.dtype.kind not in "fc":
        return np.zeros(len(array), dtype=np.bool_)
    return np.asarray(~np.isfinite(array), dtype=np.bool_)


def with_arrays(data: Any) -> Any:
    """``(X, [0, 2, 1])``: a list of numbers beside an array becomes an array; lists of text are refused."""
    if not isinstance(data, (tuple, list)) or not any(map(is_array, data)):
        return data
    if not all(is_array(part) or _is_plain_list(part) for part in data):
        return data
    try:
        parts = tuple(part if is_array(part) else np.asarray(part) for part in data)
    except ValueError as error:
        raise BadBatch(f"a list in the data has entries of unequal lengths, which make no array: {error}") from error
    check_numbers([part for part in parts if isinstance(part, np.ndarray)])
    return parts


def _is_plain_list(part: Any) -> bool:
    """Whether it is a list of numbers, text, or lists of them: not one of tensors or samples."""
    return isinstance(part, (list, tuple)) and bool(part) and isinstance(part[0], (int, float, str, bytes, list))


def check_numbers(parts: Sequence[Array]) -> None:
    """Refuse arrays of text, dates and objects: NumPy has them, but no framework computes with them."""
    for part in parts:
        if part.dtype.kind in _NO_NUMBERS:
            kind = "text" if part.dtype.kind in "US" else part.dtype.name
            raise BadBatch(
                f"the data hold {kind} where numbers are needed: of classes that have names, "
                "names, y = np.unique(y, return_inverse=True) makes numbers"
            )


def as_it_is(batch: Batch) -> Batch:
    """Returns the batch: it needs no preparation."""
    return batch


@dataclass(frozen=True)
class Arrays:
    """Arrays with one row per sample.

    ``prepare`` makes a batch of gathered rows, on the device and with the framework's own operations (bytes become
    numbers from 0 to 1); ``native`` makes the framework's tensors of NumPy's rows. Iterating gives native, prepared
    batches, for loops written by hand.
    """

    arrays: tuple[Array, ...]
    prepare: Callable[[Batch], Batch] = as_it_is
    native: Callable[[Array], Any] = np.asarray
    batch_size: int | None = None
    shuffle: bool = True
    structure: Structure | None = None  # where the user's parts have parts

    def __post_init__(self) -> None:
        check_lengths(self.arrays)
        check_numbers(self.arrays)

    @property
    def count(self) -> int:
        return len(self.arrays[0])

    is_read_once: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def rows(self, numbers: Sequence[int] | NDArray[np.int64] | slice) -> tuple[Array, ...]:
        """The samples of those numbers, as NumPy arrays: neither native nor prepared."""
        return tuple(array[numbers] for array in self.arrays)

    def nest(self, batch: Batch) -> Batch:
        """A prepared batch in the structure that the user's data have."""
        return batch if self.structure is None else self.structure.nest(batch)

    def few(self, count: int, native: Callable[[Array], Any]) -> Batch:
        """A batch of the first samples, as the model will get them."""
        return self.nest(self.prepare(tuple(map(native, self.rows(slice(count))))))

    def first(self, count: int) -> Arrays:
        """Only the first samples."""
        return replace(self, arrays=self.rows(slice(count)))

    def spread(self, count: int) -> Arrays:
        """Only this many samples, from the first to the last: data may be sorted, by length or by label."""
        return replace(self, arrays=self.rows(spread(self.count, count)))

    def __len__(self) -> int:
        return -(-self.count // (self.batch_size or 1))

    def __iter__(self) -> Iterator[Batch]:
        seed = int(np.random.default_rng().integers(2**62)) if self.shuffle else 0
        order = epoch_order(seed, 0, self.count, shuffle=self.shuffle)
        for start in range(0, self.count, self.batch_size or 1):
            rows = self.rows(order[start : start + (self.batch_size or 1)])
            yield self.prepare(tuple(map(self.native, rows)))


@dataclass(frozen=True)
class Stream:
    """A loader of batches (inputs, target) with its own order; every process reads all of it.

    ``required_size``: the trainer's ``batch_size``, if the loader does not say its own; a loader with batches of
    another size is refused. ``structure``: set if parts of a batch may be dicts and lists. ``targets``: whether a batch
    needs a target besides its inputs.
    """

    loader: Any
    batch_size: int | None = None
    shuffle: bool = False
    count: None = None
    required_size: int | None = None
    structure: Structure | None = None
    targets: bool = True

    def prepare(self, batch: Batch) -> Batch:
        """A loader's batches are ready for the model."""
        return batch

    @property
    def is_read_once(self) -> bool:
        """Whether reading the first samples would consume them."""
        return isinstance(self.loader, Iterator)

    def nest(self, batch: Batch) -> Batch:
        """A batch in the structure that the loader gave it."""
        return batch if self.structure is None else self.structure.nest(batch)

    def windows(self, cursor: Cursor, seed: int) -> Iterator[tuple[Window, tuple[Array, ...]]]:
        """The batches that are left of the cursor's epoch, in NumPy's arrays, each with its window.

        A loader that shuffles by NumPy's or Python's random numbers gives an epoch the same order each time: the
        numbers are seeded with the job's seed and the epoch while it works.
        """
        if hasattr(self.loader, "set_order"):
            self.loader.set_order(seed if self.shuffle else None)
        mixed = int(np.random.SeedSequence([seed, cursor.epoch]).generate_state(1)[0])
        from_loader: Iterable[Any] = draw_within(OwnRandomStream(mixed), self.loader)
        if not self.targets:
            from_loader = (batch if isinstance(batch, (tuple, list)) else (batch,) for batch in from_loader)
        batches = (_parts(batch, self.structure, 1 + self.targets) for batch in from_loader)
        full: Iterable[tuple[Array, ...]] = (parts for parts in batches if len(parts[0]))
        checked = loader_batches.of_size(full, self.required_size, _rows)
        yield from loader_batches.windows(self.loader, checked, cursor, _rows, _pieces)

    def few(self, count: int, native: Callable[[Array], Any]) -> Batch:
        """A batch of the first samples, as the model will get them; not for a loader that is read once."""
        return self.nest(tuple(native(part[:count]) for part in self.first_batch))

    @functools.cached_property
    def first_batch(self) -> tuple[Array, ...]:
        """The first batch, for a look at it.

        The loader is read once for all looks: a tf.data.Dataset has another order each time that it is read, and how
        often it is looked at depends on the number of devices.
        """
        _, parts = next(self.windows(Cursor(), 0))
        return parts


Source = Arrays | Stream


def prepared_by(source: Source) -> Callable[[Batch], Batch]:
    """A function that prepares the arrays of a batch, and puts them into the structure of the user's batches."""
    return lambda batch: source.nest(source.prepare(batch))


def source(data: Any, *, shuffle: bool = True, structure: Structure | None = None) -> Source:
    """The source that fits what the user has: arrays of any framework, something that gives batches, or a source."""
    if isinstance(data, (Arrays, Stream)):
        return data
    data = with_arrays(data)
    if structure is not None and is_dataset(data):
        parts = [np.asarray(part) if _is_plain_list(part) else part for part in data]
        return Arrays(tuple(map(as_numpy, structure.flat(parts))), shuffle=shuffle, structure=structure)
    if structure is not None and _is_of_arrays(data):  # by name
        return Arrays(tuple(map(as_numpy, structure.flat([data]))), shuffle=shuffle, structure=structure)
    if is_array(data):
        return Arrays((as_numpy(data),), shuffle=shuffle)
    if isinstance(data, (tuple, list)) and data and all(map(is_array, data)):
        return Arrays(tuple(as_numpy(part) for part in data), shuffle=shuffle)
    if isinstance(data, (tuple, list)) and data and is_list_of_numbers(data[0]):
        raise refusals.lists_of_numbers()
    if hasattr(data, "__iter__") and not isinstance(data, (Mapping, str, bytes)):
        return Stream(data, structure=structure)
    raise refusals.not_data(data, _KINDS)


def is_dataset(data: Any) -> bool:
    """Whether it is one data set, (inputs, targets) or (inputs, targets, weights), with dicts or lists of arrays in it.

    A pair of tuples is not: ``((X, y), (X_test, y_test))`` is data to train on and data to validate with. Nor is a list
    of batches.
    """
    if not isinstance(data, tuple) or len(data) not in (2, 3) or not any(map(is_nested, data)):
        return False
    if len(data) == 2 and isinstance(data[0], (tuple, list)) and not (is_array(data[1]) or _is_of_arrays(data[1])):
        return False
    return all(
        part is None or is_array(part) or _is_plain_list(part) or _is_of_arrays(part, tuple, list) for part in data
    )


def _is_of_arrays(part: Any, *kinds: type) -> bool:
    """Whether it is a dict of arrays, or of dicts of them; or one of the other kinds of collections."""
    if not isinstance(part, (Mapping, *kinds)) or not part:
        return False
    values: Any = part.values() if isinstance(part, Mapping) else part
    return all(is_array(value) or _is_of_arrays(value, *kinds) for value in values)


def is_array(part: Any) -> bool:
    """Whether it is an array of NumPy's or of a framework: something with a dtype and axes."""
    return hasattr(part, "shape") and hasattr(part, "dtype") and getattr(part, "ndim", 1) != 0


def is_list_of_numbers(entry: object) -> bool:
    """Whether it is a list of numbers, which should have been an array."""
    nested = isinstance(entry, list)
    while isinstance(entry, list) and entry:
        entry = entry[0]
    return nested and isinstance(entry, (int, float))


def as_numpy(part: Any) -> Array:
    """An array of a framework in the host's memory; MXNet's has its own word for it."""
    return np.asarray(part.asnumpy() if hasattr(part, "asnumpy") else part)


def _rows(parts: tuple[Array, ...]) -> int:
    return len(parts[0])


def _pieces(parts: tuple[Array, ...]) -> Iterator[bytes]:
    """What the digest of a batch is made of."""
    for part in parts:
        yield f"{part.dtype} {part.shape}".encode()
        yield part.flat[loader_batches.sampled_places(part.size)].tobytes()


def _parts(batch: Any, structure: Structure | None = None, fewest: int = 2) -> tuple[Array, ...]:
    if structure is not None and structure.dicts and isinstance(batch, Mapping):
        batch, fewest = (batch,), 1
    if not isinstance(batch, (tuple, list)) or len(batch) < fewest:
        raise BadBatch(f"the loader gave {refusals.in_words(batch)}, and a batch is (inputs, target): give both")
    if structure is not None:
        batch = structure.flat(batch)
    for part in batch:
        if isinstance(part, Mapping):
            raise BadBatch(
                f"a part of the loader's batch is a dict of {', '.join(map(repr, part))}, and dicts are not supported: "
                "give arrays, (inputs..., target), in the order in which the model takes them"
            )
    parts = tuple(map(as_numpy, batch))
    check_numbers(parts)
    if any(not part.ndim for part in parts):
        raise BadBatch(
            f"the loader gave single numbers where a batch has one row per sample: {_PUT_TOGETHER}; of lists make "
            "arrays, (np.array(X), np.array(y))"
        )
    if len({len(part) for part in parts}) != 1:
        raise BadBatch(
            f"the parts of a batch have {', '.join(str(len(part)) for part in parts)} rows: every part needs one row "
            f"per sample. If these are single samples, {_PUT_TOGETHER}"
        )
    return parts


# Nested batches


class Structure:
    """The structure of a data set's batches: that of the first one, which all others must have too.

    ``dicts``: a batch may be a dict with its target in it, ``{"image": X, "label": y}``. It is then a tuple of one.
    """

    def __init__(self, *, dicts: bool = False) -> None:
        self.dicts = dicts
        self._spec: tree.Structure | None = None

    def flat(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays of a batch."""
        arrays, spec = tree.flatten(tuple(batch))
        if self._spec is None:
            self._spec = spec
        elif self._spec != spec:
            before = _describe(self._spec)
            raise BadBatch(f"a batch has the parts {_describe(spec)}, the one before it {before}: give all the same")
        return tuple(arrays)

    def nest(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """A batch of these arrays, as the user's batches are."""
        if self._spec is None:
            return tuple(arrays)
        batch: Any = self._spec.unflatten(arrays)
        return tuple(batch)


def is_nested(part: Any) -> bool:
    """Whether a part of a batch has parts itself."""
    return isinstance(part, (Mapping, list, tuple))


def _describe(spec: tree.Structure) -> str:
    return str(spec.unflatten(["*"] * spec.num_leaves)).replace("'*'", "*")
