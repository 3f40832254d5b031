"""The book's functions that count correct predictions, on one device or on all, in every framework.

Predictions are counted on the device, and the counts are read at the end: the program never waits for a device between
two batches. Every sample counts once, whatever the batch sizes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from manyhands import tree
from manyhands.errors import BadBatch
from manyhands.placement.moves import Placement
from manyhands.placement.verbs import Verbs

Predictor = Callable[[Any], Any]
Split = Callable[[Any, Any, Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


class Accuracy(abc.ABC):
    """The three functions, on one framework."""

    # Implemented by each framework

    backend: Any  # the adapter for tensors and devices

    @staticmethod
    def native(leaf: Any) -> Any:
        """An array of the user's or of NumPy as the framework's."""
        return leaf

    @abc.abstractmethod
    def count(self, y_hat: Any, y: Any) -> Any:
        """The number of right predictions, left on the device."""

    @abc.abstractmethod
    def predicting(self, net: Any, devices: Sequence[Any]) -> AbstractContextManager[Sequence[Predictor]]:
        """The net in evaluation mode, as a function on each of these devices; on None as it is."""

    @abc.abstractmethod
    def home(self, net: Any) -> Any:
        """The device of the net; None for a plain function."""

    # The book's functions

    def accuracy(self, y_hat: Any, y: Any) -> float:
        """The number of predictions that are right.

        ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
        Reading the number waits for the device.
        """
        return float(self.count(self.native(y_hat), self.native(y)))

    def evaluate_accuracy_gpu(self, net: Predictor, data_iter: Iterable[tuple[Any, Any]], device: Any = None) -> float:
        """The fraction of all samples that the net gets right, on one device (by default where the net is)."""
        native = self.home(net) if device is None else Placement(self.backend).existing(device)

        def moved(leaf: Any) -> Any:
            return self.native(leaf) if native is None else Placement(self.backend).to_leaf(self.native(leaf), native)

        def shards(X: Any, y: Any) -> Iterable[tuple[Any, Any]]:
            return [(tree.map_leaves(moved, X), moved(y))]

        return self._evaluate(net, data_iter, [native], shards)

    def evaluate_accuracy_gpus(
        self, net: Predictor, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None
    ) -> float:
        """The fraction of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

        Each batch is split over the devices, by ``split_f(X, y, devices)`` if it is given: it returns the shards of
        ``X`` and those of ``y``. The net is not moved: the devices work on copies.
        """
        devices = [self.backend.gpu(i) for i in range(self.backend.num_gpus())] or [self.backend.cpu()]
        split: Split = split_f or Verbs(self.backend).split_batch

        def shards(X: Any, y: Any) -> Iterable[tuple[Any, Any]]:
            X, y = tree.map_leaves(self.native, X), self.native(y)
            return zip(*split(X, y, devices), strict=True)

        return self._evaluate(net, data_iter, devices, shards)

    def _evaluate(
        self,
        net: Predictor,
        batches: Iterable[tuple[Any, Any]],
        devices: Sequence[Any],
        shards: Callable[[Any, Any], Iterable[tuple[Any, Any]]],
    ) -> float:
        samples, counts = 0, []
        with self.predicting(net, devices) as predictors:
            for X, y in batches:
                for predictor, (X_shard, y_shard) in zip(predictors, shards(X, y), strict=True):
                    labels = math.prod(y_shard.shape)
                    if labels:  # more devices than samples leave some without
                        counts.append(self.count(predictor(X_shard), y_shard))
                        samples += labels
            if not samples:
                raise BadBatch("there was no sample to evaluate on: was the iterator used up before?")
            return float(sum(map(float, counts))) / samples
