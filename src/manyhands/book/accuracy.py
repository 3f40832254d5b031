"""The number of correct predictions, on one device or on all, in every framework.

They are counted on the device and read once, at the end: the program never waits for a device between two batches.
Every sample counts once, whatever the batch sizes. Each framework implements how arrays are compared and how a
net is called on a device (``manyhands.training.<framework>.book.accuracy``).
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic

from manyhands import shares, tree
from manyhands.amounts import counted
from manyhands.backends.protocol import Backend, D
from manyhands.device import Device
from manyhands.errors import BadBatch, DeviceMismatch, NotATensor, type_in_words
from manyhands.placement.moves import Placement

Predictor = Callable[[Any], Any]
Split = Callable[[Any, Any, Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


class Accuracy(abc.ABC, Generic[D]):
    """The book's three functions, on one framework."""

    models: ClassVar[tuple[type, ...]]  # what can have copies on several devices
    model_name: ClassVar[str]

    def __init__(self, backend: Backend[Any, D, Any]) -> None:
        self.place = Placement(backend)

    # Implemented by each framework

    @abc.abstractmethod
    def count(self, y_hat: Any, y: Any) -> Any:
        """The number of right predictions, left on the device."""

    @abc.abstractmethod
    def predicting(
        self, net: Any, devices: Sequence[D | None], *, replicate: bool
    ) -> AbstractContextManager[Sequence[Predictor]]:
        """The net as a function on each of these devices, in evaluation mode; ``replicate``: with a copy on each."""

    @abc.abstractmethod
    def homes(self, net: Any) -> list[D]:
        """The devices that hold the net's tensors; none for a plain function."""

    def read(self, count: Any) -> int:
        """A count from the device, as an int; waits for it."""
        return int(count)

    def native(self, leaf: Any) -> Any:
        """An array of the user's as the framework's."""
        return leaf

    def on(self, device: D | None) -> AbstractContextManager[object]:
        """Within it new arrays are on the device, if the framework does not place them with the arguments."""
        return nullcontext()

    def build(self, net: Any, X: Any) -> None:
        """Make the weights of a net that gets its shapes from its first samples."""

    def destination(self, net: Any, device: D | Device | str | None) -> D | None:
        """Where samples have to go; None leaves them where they are (a function without parameters)."""
        homes = self.homes(net)
        if device is None:
            return homes[0] if homes else None
        native, neutral = self.place.existing(device), self.place.backend.neutral
        if homes and neutral(native) not in map(neutral, homes):
            raise DeviceMismatch(
                f"the net is on {neutral(homes[0])} and its samples were to go to {neutral(native)}: move the net "
                "there first (mh.to(net, device)), or name no device"
            )
        return native

    # The book's functions

    def accuracy(self, y_hat: Any, y: Any) -> float:
        """The number of predictions that are right.

        ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
        Reading the number waits for the device.
        """
        return float(self.read(self.count(self.native(y_hat), self.native(y))))

    def evaluate_accuracy_gpu(
        self, net: Predictor, data_iter: Iterable[tuple[Any, Any]], device: D | Device | str | None = None
    ) -> float:
        """The fraction of all samples that the net gets right, on one device (by default where the net is)."""
        native = self.destination(net, device)

        def moved(X: Any, y: Any, devices: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            return ([X], [self.native(y)]) if native is None else ([self._to(X, native)], [self._to(y, native)])

        return self._evaluate(net, data_iter, [native], moved, replicate=False)

    def evaluate_accuracy_gpus(
        self, net: Any, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None
    ) -> float:
        """The fraction of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

        Each batch is split over the devices, by ``split_f(X, y, devices)`` if it is given: it returns the shards of
        ``X`` and those of ``y``. The net is not moved: the devices work on copies.
        """
        if not isinstance(net, self.models):
            raise NotATensor(
                f"{type_in_words(net)} cannot be copied to several devices, a {self.model_name} can: "
                "evaluate_accuracy_gpu takes any function"
            )
        backend = self.place.backend
        devices = [backend.gpu(i) for i in range(backend.num_gpus())] or [backend.cpu()]

        def split(X: Any, y: Any, devices: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            self.build(net, X)
            X, y = tree.map_leaves(self.native, X), tree.map_leaves(self.native, y)
            X_shards, y_shards = (split_f or functools.partial(_split, self.place))(X, y, devices)
            _check_whole(X_shards, y_shards, y, devices)
            return X_shards, y_shards

        return self._evaluate(net, data_iter, devices, split, replicate=True)

    def _evaluate(
        self, net: Any, batches: Iterable[Any], devices: Sequence[D | None], split: Split, *, replicate: bool
    ) -> float:
        counted, sums = 0, dict[int, Any]()  # one number on each device
        with self.predicting(net, devices, replicate=replicate) as predictors:
            for X, y in batches:
                counted += labels(y)
                for i, (X_shard, y_shard) in enumerate(zip(*split(X, y, devices), strict=True)):
                    if labels(y_shard):  # more devices than samples leave some without
                        with self.on(devices[i]):
                            now = self.count(predictors[i](X_shard), y_shard)
                            sums[i] = sums[i] + now if i in sums else now
            return _fraction(sum(map(self.read, sums.values())), counted)

    def _to(self, values: Any, device: D) -> Any:
        return tree.map_leaves(lambda leaf: self.place.to_leaf(self.native(leaf), device), values)


def check_shapes(y_hat: Any, classes: Any, y: Any) -> None:
    """Refuse predictions that do not match the labels one to one; ``classes``: the classes of ``y_hat``."""
    if labels(classes) != labels(y) or tuple(classes.shape[:1]) != tuple(y.shape[:1]):
        raise BadBatch(
            f"predictions of shape {tuple(y_hat.shape)} and labels of shape {tuple(y.shape)} do not belong together: "
            "give one row of scores, or one class number, per label"
        )


def labels(y: Any) -> int:
    """How many labels there are in an array of them."""
    return math.prod(map(int, y.shape))


def _split(place: Placement[Any, Any, Any], X: Any, y: Any, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Shards of ``X`` and of ``y`` as even as can be, in order, each on its device."""
    leaves, structure = tree.flatten((X, y))
    total = place.lengths(leaves, structure)[0][1]
    pairs, start = [], 0
    for device, size in zip(devices, shares.sizes(total, len(devices)), strict=True):
        pairs.append(structure.unflatten(place.shard(leaf, start, start + size, device) for leaf in leaves))
        start += size
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _check_whole(X_shards: Sequence[Any], y_shards: Sequence[Any], y: Any, devices: Sequence[Any]) -> None:
    """Check that ``split_f`` returned one shard per device, and together the whole batch."""
    if not len(X_shards) == len(y_shards) == len(devices):
        raise BadBatch(
            f"split_f gave {len(X_shards)} and {counted(len(y_shards), 'shard')} for {counted(len(devices), 'device')}"
        )
    total = sum(labels(shard) for shard in y_shards)
    if total != labels(y):
        raise BadBatch(
            f"split_f made shards with {counted(total, 'label')} of a batch with {labels(y)}: every sample has to be "
            "counted once"
        )


def _fraction(correct: int, counted: int) -> float:
    if not counted:
        raise BadBatch("there was no sample to evaluate on: was the iterator used up before?")
    return correct / counted
