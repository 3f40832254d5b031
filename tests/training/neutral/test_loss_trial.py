"""Is a loss a mean over samples? Linear models in NumPy, whose losses and gradients are written out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from manyhands.errors import BadSettings
from manyhands.training.data.sources import Arrays
from manyhands.training.loss.loss_trial import DRAWS, Pass, Term, check_source, choose, unlike

X = np.random.default_rng(0).normal(size=(6, 3))
Y = np.linspace(-1, 1, 6)


def mean(rows: Sequence[int], weight: Any = 1.0) -> Pass:
    """Mean squared errors of some rows; with a weight of each sample it does not say what it is divided by."""
    picked = list(rows)
    error = X[picked].sum(1) - Y[picked]
    weights = np.broadcast_to(weight, 6)[picked]
    total, gradient = float((weights * error**2).sum()), 2 * (weights * error) @ X[picked]
    factor = len(rows) / weights.sum()
    return Pass([Term(total * factor, len(rows), [gradient * factor])])


def tried(compute: Any, size: int = 6, precision: str = "float64") -> str | None:
    data = Arrays((X[:size], Y[:size]))
    notes = check_source(data, lambda _, rows: compute(rows), precisions=[precision], own_step=False)
    return notes[0] if notes else None


def test_gradients_may_round_where_losses_do_not() -> None:
    """In float32 a ReLU may be on in the whole batch and off in a part, which moves gradients by a few thousandths."""

    def moved(by: float) -> Any:
        def compute(rows: Sequence[int]) -> Pass:
            term = mean(rows).terms[0]
            factor = 1 + by * (len(rows) == 6)
            return Pass([Term(term.total, term.count, [array * factor for array in term.gradients])])

        return compute

    assert tried(moved(4e-3), precision="float32") is None
    for by, precision in ((4e-3, "float64"), (0.5, "float32")):
        with pytest.raises(BadSettings, match="the gradients of"):
            tried(moved(by), precision=precision)


def test_why_it_is_not_known() -> None:
    generator = np.random.default_rng(1)
    assert DRAWS in str(tried(lambda rows: mean(rows, generator.uniform(size=6))))
    assert "there is only one sample" in str(tried(mean, 1))
    assert "NaN" in str(tried(lambda rows: mean(rows, np.nan)))

    def of_all(rows: Sequence[int]) -> Pass:
        if len(rows) < 6:
            raise ValueError("too few")
        return mean(rows)

    assert "fails" in str(tried(of_all))


def test_samples_that_are_unlike() -> None:
    """The one text that is short, the one label that is rare, whatever is before and after them."""
    texts = np.full((500, 9), 5)
    texts[321, 2:] = 0
    labels = np.zeros(500, int)
    labels[123] = 1
    inputs = np.random.default_rng(2).normal(size=(500, 4))
    chosen = choose(Arrays((inputs, texts, labels)))
    assert {321, 123} <= set(chosen[0])
    assert len(chosen[0]) == 8
    assert unlike([], 3, lambda number, samples: samples) == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [int, float, np.uint8])
def test_every_label_is_tried(dtype: Any) -> None:
    """Of many samples too; where there are more labels than can be tried, the rarest."""
    labels = np.arange(50_000) % 20
    labels[40_001] = 20
    chosen = choose(Arrays((np.zeros((50_000, 2)), labels.astype(dtype))))
    tried_labels = labels[[*itertools.chain(*chosen)]]
    assert set(tried_labels) == set(range(21))
    assert max(map(len, chosen)) <= 8
    assert min(map(len, chosen)) >= 2
    labels = np.arange(50_000) % 100
    labels[31_313] = 100
    chosen = choose(Arrays((np.zeros((50_000, 2)), labels.astype(dtype))))
    assert 100 in labels[[*itertools.chain(*chosen)]]
