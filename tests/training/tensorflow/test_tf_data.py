"""A tf.data.Dataset that shuffles has an order that the job's seed and the epoch decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_cases import fit, mlp, vectors
from support import StopAt, Stopped, same_rate

from manyhands.training.options import Checkpoints
from manyhands.training.tensorflow.dataset import repeatable


@pytest.fixture(autouse=True)
def _no_global_seed() -> None:
    """A global seed, which another test may have left, seeds every shuffle."""
    tf.random.set_seed(None)


def orders(dataset: Any, epochs: list[int], seed: int = 0) -> list[list[int]]:
    loader, found = repeatable(dataset, seed), []
    for epoch in epochs:
        loader.set_epoch(epoch)
        found.append([int(number) for batch in loader for number in batch.numpy()])
    return found


def test_the_order_of_an_epoch_does_not_depend_on_what_was_read_before() -> None:
    numbers = tf.data.Dataset.range(12)
    seeded = numbers.shuffle(12, seed=3).batch(5).prefetch(1)
    fresh = [[int(number) for batch in seeded for number in batch.numpy()] for _ in range(3)]
    assert orders(seeded, [0, 1, 2, 1, 0]) == [*fresh, fresh[1], fresh[0]]
    for dataset in (numbers.shuffle(12).batch(5), numbers.shuffle(12).repeat(2).batch(5)):
        in_order = orders(dataset, [0, 1, 2])
        assert len({tuple(order) for order in in_order}) == 3
        assert orders(dataset, [2]) == in_order[2:] != orders(dataset, [2], seed=1)
    once = orders(numbers.shuffle(12, reshuffle_each_iteration=False).batch(5), [0, 1])
    assert once[0] == once[1]
    assert repeatable(numbers.batch(5), 0) is not None
    assert isinstance(repeatable(numbers.batch(5), 0), tf.data.Dataset)


def shuffled(seed: int | None = None) -> Any:
    def doubled(x: Any, y: Any) -> Any:
        return 2 * x, y

    return tf.data.Dataset.from_tensor_slices(vectors()).shuffle(50, seed=seed).map(doubled).batch(8).prefetch(2)


def test_a_stopped_job_goes_on_at_the_very_batch(tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_size": None, "checkpoints": Checkpoints(every=2)}
    whole, stopped, resumed = mlp(), mlp(), mlp()
    fit(whole, shuffled(), 2, run=tmp_path / "whole", schedule=same_rate, **how)
    with pytest.raises(Stopped):
        fit(stopped, shuffled(), 2, run=tmp_path / "run", schedule=StopAt(12), **how)
    fit(resumed, shuffled(), 2, run=tmp_path / "run", resume="auto", schedule=same_rate, **how)
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_dataset_without_an_end_goes_on_from_epoch_to_epoch() -> None:
    numbers = tf.data.Dataset.range(10)
    for dataset in (numbers.repeat().batch(3), numbers.shuffle(10).repeat().batch(3)):
        loader = repeatable(dataset, 0, 4)
        found = []
        for epoch in (0, 1, 2, 1):
            loader.set_epoch(epoch)
            found.append([int(number) for batch in loader for number in batch.numpy()])
        assert [len(order) for order in found] == [12, 12, 12, 12]
        assert found[1] == found[3]
        passes = np.reshape(np.concatenate(found[:3])[:30], (3, 10))
        assert (np.sort(passes, 1) == np.arange(10)).all()
