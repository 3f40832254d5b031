"""A ``tf.data.Dataset`` whose order can be repeated: by a resumed job, by every process, on any number of devices.

A dataset that shuffles draws another order each time it is iterated, from a generator that lives as long as the
program. A job that is resumed in another program would get other batches. So the dataset is rebuilt from its graph,
with separate generators: with the user's seed, or with the job's seed if the user gave none. The order of an epoch is
then a function of the epoch::

    shuffle(1000, seed=3)    epoch 0, 1, 2: what the first, second, third loop over it gives in a new program
    shuffle(1000)            the same, with a seed that is made of the job's

Where the dataset repeats itself, one iteration draws several orders; each epoch then gets generators with seeds made of
the user's and the epoch.

A dataset without an end has epochs of ``Limits(limit_batches=100)`` batches. As in Keras, each epoch continues where
the one before ended.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops import options as dataset_options
from tensorflow.python.ops import gen_experimental_dataset_ops

_SHUFFLE = "ShuffleDatasetV3"
# The older operation has a generator of its own; the newer one is given the program's.
_SHUFFLE_WITH_GENERATOR = "ShuffleDataset"
_REPEAT = "RepeatDataset"


class RepeatableDataset:
    """A dataset that shuffles, as a loader: ``set_epoch(n)``, then iterate."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self._seed, self._epoch = dataset, seed, 0
        # Not kept: it holds a copy of arrays that the dataset was made of.
        self._repeats = any(node.op == _REPEAT for node in _graph_of(dataset).node)
        self._rebuilt: Any = None
        self._iterations = 0  # of what was made

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self._repeats:
            return iter(self.rebuild(self._epoch))
        if self._rebuilt is None or self._iterations > self._epoch:
            self._rebuilt, self._iterations = self.rebuild(), 0
        while self._iterations < self._epoch:  # each draws an order
            iter(self._rebuilt)
            self._iterations += 1
        self._iterations += 1
        return iter(self._rebuilt)

    def __len__(self) -> int:
        return len(self.dataset)

    def rebuild(self, epoch: int | None = None) -> Any:
        """The dataset with separate generators; with an epoch, seeded for that epoch."""
        graph = _graph_of(self.dataset)
        constants = {node.name: node for node in graph.node if node.op == "Const"}
        for number, node in enumerate([node for node in graph.node if node.op == _SHUFFLE]):
            node.op = _SHUFFLE_WITH_GENERATOR
            del node.input[4:]
            seeds = [int(tf.make_ndarray(constants[name].attr["value"].tensor)) for name in node.input[2:4]]
            seeds = self._seeds(seeds, number, epoch if node.attr["reshuffle_each_iteration"].b else None)
            for place, seed in enumerate(seeds, 2):
                name = f"manyhands_seed_{number}_{place}"
                graph.node.append(_constant(name, seed))
                node.input[place] = name
        variant = gen_experimental_dataset_ops.dataset_from_graph(graph.SerializeToString())
        return dataset_ops._VariantDataset(variant, self.dataset.element_spec)

    def _seeds(self, seeds: list[int], number: int, epoch: int | None) -> list[int]:
        """The seeds of the number-th shuffle of a dataset. TensorFlow's 0, 0 means no seed."""
        if any(seeds) and epoch is None:
            return seeds
        parts = [seed % 2**64 for seed in seeds] if any(seeds) else [self._seed, number]
        mixed = np.random.SeedSequence([*parts, 0 if epoch is None else epoch]).generate_state(2, np.uint32)
        return [int(number) + 1 for number in mixed]


class EndlessDataset:
    """A dataset without an end, in epochs of ``batches`` batches."""

    def __init__(self, data: Any, batches: int) -> None:
        self._data, self._batches, self._epoch = data, batches, 0
        self._left: Iterator[Any] | None = None
        self._passed = 0  # batches before those that are left

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        start = self._epoch * self._batches
        if self._left is None or self._passed != start:
            dataset = self._data.rebuild() if isinstance(self._data, RepeatableDataset) else self._data
            self._left, self._passed = iter(dataset.skip(start)), start
        for batch in itertools.islice(self._left, self._batches):
            self._passed += 1
            yield batch


def repeatable(data: Any, seed: int, batches: int | None = None) -> Any:
    """The same data; a dataset that shuffles gets a repeatable order, if its graph can be rebuilt.

    ``batches``: the batches of an epoch, for a dataset without an end.
    """
    if not isinstance(data, tf.data.Dataset):
        return data
    seeded = data
    if _shuffles(data):
        # Not a graph of more than 2 GB, or with something that has no form in a graph: its batches are compared where
        # a job is resumed.
        with contextlib.suppress(Exception):
            rebuilt = RepeatableDataset(data, seed)
            rebuilt.rebuild(0)
            seeded = rebuilt
    if batches is None or int(data.cardinality()) != tf.data.INFINITE_CARDINALITY:
        return seeded
    return EndlessDataset(seeded, batches)


def _shuffles(dataset: Any) -> bool:
    return type(dataset).__name__ == "_ShuffleDataset" or any(map(_shuffles, dataset._inputs()))


def _graph_of(dataset: Any) -> Any:
    policy = dataset_options.ExternalStatePolicy.IGNORE  # variables and Python functions are this program's
    return tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(external_state_policy=policy).numpy())


def _constant(name: str, value: int) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.int64.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
    return node
