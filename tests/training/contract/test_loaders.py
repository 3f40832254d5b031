"""Data that come from a loader with an order of its own: what is repeated, what moves the schedule, what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import StopAt, Stopped, same_rate
from training_bench import Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import BadBatch, BadSettings, WrongCheckpoint
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Window
from manyhands.training.options import Checkpoints


class Loader:
    """Batches of the framework's own arrays, in the order that a function gives."""

    def __init__(self, bench: Bench, order: Any = range) -> None:
        self.batches = list(bench.data(tested=64)[1])
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batches[number] for number in self.order(len(self.batches))])


class WithLength(Loader):
    def __len__(self) -> int:
        return len(self.batches)


class Seen:
    """A schedule that remembers how far the training was at each step, and can stop it."""

    def __init__(self, stop: int | None = None) -> None:
        self.done: list[float] = []
        self.stop = stop

    def __call__(self, done: float) -> float:
        if len(self.done) == self.stop:
            raise Stopped
        self.done.append(done)
        return 1 - done / 2


def stopped(bench: Bench, data: Any, step: int, **options: Any) -> Path:
    """A run of three epochs of four batches that was stopped at a step."""
    run = bench.new_run()
    with pytest.raises(Stopped):
        bench.fit(
            epochs=3, data=data, schedule=StopAt(step), run=run, **{"checkpoints": Checkpoints(every=1), **options}
        )
    return run


@pytest.mark.neutral
def test_the_batches_of_a_loader_have_the_size_that_was_given(bench: Bench) -> None:
    for size in (5, 50):
        with pytest.raises(BadSettings, match=f"batch_size={size} .* in batches of 16"):
            bench.fit(epochs=1, data=Loader(bench), batch_size=size)
    bench.fit(epochs=1, data=Loader(bench), batch_size=16)
    bench.fit(epochs=1, data=Loader(bench, lambda count: range(1)), batch_size=50)  # one short batch


# The schedule


@pytest.mark.neutral
def test_the_schedule_moves_with_every_batch(bench: Bench) -> None:
    arrays, with_length = Seen(), Seen()
    bench.fit(epochs=1, schedule=arrays, data=bench.data(samples=64)[0])
    bench.fit(epochs=1, schedule=with_length, data=WithLength(bench))
    assert with_length.done == arrays.done == [0, 0.25, 0.5, 0.75]


@pytest.mark.neutral
def test_the_schedule_of_a_loader_without_a_length(bench: Bench) -> None:
    """It learns from the first epoch, and still knows when it is resumed in the middle of the second."""
    whole, run = Seen(), bench.new_run()
    straight = bench.fit(epochs=2, schedule=whole, data=Loader(bench))
    assert whole.done == [0] * 4 + [0.5, 0.625, 0.75, 0.875]
    assert any("no __len__" in note for note in straight.notes)
    with pytest.raises(Stopped):
        bench.fit(epochs=2, schedule=Seen(6), data=Loader(bench), run=run, checkpoints=Checkpoints(every=1))
    rest = Seen()
    bench.fit(epochs=2, schedule=rest, data=Loader(bench), run=run, resume="auto")
    assert rest.done == whole.done[6:]
    assert largest_difference(bench.weights(run), bench.weights(straight.run)) == 0
    with pytest.raises(BadSettings, match="a loader without __len__"):
        bench.fit(epochs=1, schedule=same_rate, data=Loader(bench))


@pytest.mark.neutral
def test_a_length_that_is_wrong_is_corrected(bench: Bench) -> None:
    class Wrong(Loader):
        def __len__(self) -> int:
            return 2

    seen = Seen()
    bench.fit(epochs=2, schedule=seen, data=Wrong(bench))
    assert seen.done == [0, 0.25, 0.5, 0.5, 0.5, 0.625, 0.75, 0.875]


# Stop and go on


def shuffled(count: int) -> list[int]:
    """By the generators of the whole program, which the trainer seeds."""
    numbers = np.random.permutation(count).tolist()
    random.shuffle(numbers)
    return numbers


@pytest.mark.neutral
def test_a_loader_that_shuffles_goes_on_in_its_order(bench: Bench) -> None:
    whole = bench.fit(epochs=3, data=Loader(bench, shuffled), schedule=same_rate)
    other = bench.fit(epochs=3, data=Loader(bench, shuffled), schedule=same_rate, seed=4)
    assert largest_difference(bench.weights(other.run), bench.weights(whole.run)) > 0
    for step, every in ((6, 1), (9, None)):  # in the middle of an epoch, and at the start of one
        run = stopped(bench, Loader(bench, shuffled), step, checkpoints=Checkpoints(every=every))
        bench.fit(epochs=3, data=Loader(bench, shuffled), schedule=same_rate, resume="auto", run=run)
        assert largest_difference(bench.weights(run), bench.weights(whole.run)) == 0


@pytest.mark.neutral
def test_an_order_that_cannot_be_repeated_is_said(bench: Bench) -> None:
    drawn = itertools.cycle([[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3], [3, 0, 1, 2], [0, 2, 1, 3]])
    data = Loader(bench, lambda count: next(drawn))
    run = stopped(bench, data, 6)
    with pytest.raises(WrongCheckpoint, match=r"after batch 2 .32 samples. of epoch 2.*default_rng\(\(0, epoch\)\)"):
        bench.fit(epochs=3, data=data, schedule=same_rate, resume="auto", run=run)
    for every in (4, None):  # the last batch of an epoch is done, or the next epoch is begun
        run = stopped(bench, data, 9, checkpoints=Checkpoints(every=every))
        with pytest.warns(UserWarning, match="does not repeat epoch 2 in the order"):
            bench.fit(epochs=3, data=data, schedule=same_rate, resume="auto", run=run)


def test_a_function_makes_the_batches_of_each_epoch(bench: Bench) -> None:
    batches = Loader(bench).batches
    epochs = []

    def of(epoch: int) -> Iterator[Any]:
        epochs.append(epoch)
        for number in np.random.default_rng((0, epoch)).permutation(len(batches)):
            yield batches[number]

    whole = bench.fit(epochs=3, data=of, schedule=same_rate)
    assert sorted(set(epochs)) == [0, 1, 2]
    run = stopped(bench, of, 6)
    bench.fit(epochs=3, data=of, schedule=same_rate, resume="auto", run=run)
    assert largest_difference(bench.weights(run), bench.weights(whole.run)) == 0
    result = bench.fit(epochs=2, data=(lambda: iter(batches), lambda: iter(batches[:2])))
    assert [row["samples"] for row in result.rows] == [64, 64]


# What is refused


@pytest.mark.neutral
def test_batches_that_are_gone(bench: Bench) -> None:
    batches = Loader(bench).batches
    with pytest.raises(BadBatch, match=r"generator can be iterated only once, and max_epochs is 2.*instead of batches"):
        bench.fit(epochs=2, data=(batch for batch in batches))
    with pytest.raises(BadBatch, match="list_iterator can be iterated only once"):
        bench.fit(epochs=2, data=(WithLength(bench), iter(batches)))
    used = (batch for batch in batches)
    assert bench.fit(epochs=1, data=used).rows[0]["samples"] == 64
    with pytest.raises(BadBatch, match=r"no batch for epoch 1: a generator.*is used up"):
        bench.fit(epochs=1, data=used)


@pytest.mark.neutral
def test_an_epoch_without_an_end(bench: Bench) -> None:
    with pytest.raises(BadBatch, match="cycle without an end"):
        bench.fit(epochs=1, data=itertools.cycle(Loader(bench).batches))


# Several processes, without any


def test_processes_that_are_given_different_batches() -> None:
    pairs = [(Window(0, at, at + 1, at, digest=100 + at), None) for at in range(11)]
    asked: list[int] = []

    def all_have(number: int) -> bool:
        asked.append(number - 99)
        return number < 105

    with pytest.raises(BadBatch, match=r"different batches \(noticed after sample 8 of epoch 1\).*default_rng"):
        list(loader_batches.check_agreement(pairs, all_have))
    assert asked == [1, 2, 4, 8]
    asked.clear()
    assert len(list(loader_batches.check_agreement(pairs[:5], all_have))) == 5
    assert asked == [1, 2, 4, 5]


def test_a_digest_sees_the_order_of_large_batches(framework: str) -> None:
    from manyhands.training.data.sources import Stream

    X = np.zeros((200, 28, 28), np.float32)
    X[:, 14, 14] = np.arange(200)  # most of every sample is the same
    X[:, 3] = np.arange(200)[:, None] % 7

    def digest(order: Any) -> int | None:
        return next(Stream([(X[order], X[:, 0, 0])]).windows(Cursor(), 0))[0].digest

    swapped = np.arange(200)
    swapped[[5, 6]] = 6, 5
    assert digest(np.arange(200)) == digest(np.arange(200)) != digest(swapped)
