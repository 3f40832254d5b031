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
WEIGHT = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 4.0])


def sums(rows: Sequence[int], weight: Any) -> tuple[float, Any]:
    """The weighted sum of the squared errors of some rows, and its gradient."""
    picked = list(rows)
    error = X[picked].sum(1) - Y[picked]
    return float((weight[picked] * error**2).sum()), 2 * (weight[picked] * error) @ X[picked]


def mean(rows: Sequence[int], weight: Any = WEIGHT) -> Pass:
    """A weighted mean that does not say what it is divided by."""
    total, gradient = sums(rows, weight)
    factor = len(rows) / weight[list(rows)].sum()
    return Pass([Term(total * factor, len(rows), [gradient * factor])])


def tried(compute: Any, size: int = 6, precision: str = "float64", *, own_step: bool = False) -> str | None:
    data = Arrays((X[:size], Y[:size]))
    notes = check_source(data, lambda _, rows: compute(rows), precisions=[precision], own_step=own_step)
    return notes[0] if notes else None


def test_a_mean_over_samples_passes() -> None:
    assert tried(lambda rows: mean(rows, np.ones(6))) is None


def test_another_mean_is_refused_with_advice_for_where_it_is_written() -> None:
    with pytest.raises(BadSettings, match=r"put together from 6 parts.*let the loss return .* mh\.LossSum"):
        tried(mean)
    with pytest.raises(BadSettings, match=r"from training_step: `return mh\.LossSum"):
        tried(mean, own_step=True)

    def compared(rows: Sequence[int]) -> Pass:
        total, gradient = sums(rows, np.ones(6))
        return Pass([Term(total**2, len(rows), [2 * total * gradient])])

    with pytest.raises(BadSettings, match="depends on the other samples"):
        tried(compared)


def test_sums_and_counts_pass_also_beside_a_mean() -> None:
    def both(rows: Sequence[int]) -> Pass:
        total, gradient = sums(rows, WEIGHT)
        return Pass([*mean(rows, np.ones(6)).terms, Term(total, WEIGHT[list(rows)].sum(), [gradient])])

    assert tried(both) is None


def test_equal_losses_hide_nothing() -> None:
    """As with a last layer of zeros: each loss is 1, but not each gradient."""

    def flat(rows: Sequence[int]) -> Pass:
        gradients = mean(rows).terms[0].gradients
        return Pass([Term(len(rows), len(rows), gradients)])

    with pytest.raises(BadSettings, match="the gradients of 6 samples"):
        tried(flat)


def test_gradients_may_round_where_losses_do_not() -> None:
    """In float32 a ReLU may be on in the whole batch and off in a part, which moves gradients by a few thousandths."""

    def moved(by: float) -> Any:
        def compute(rows: Sequence[int]) -> Pass:
            term = mean(rows, np.ones(6)).terms[0]
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
    assert "not checked" in str(tried(mean, 1))
    assert "there is only one sample" in str(tried(mean, 1))
    assert "NaN" in str(tried(lambda rows: mean(rows, np.full(6, np.nan))))

    def of_all(rows: Sequence[int]) -> Pass:
        if len(rows) < 6:
            raise ValueError("too few")
        return mean(rows)

    assert "fails" in str(tried(of_all))

    def fails(rows: Sequence[int]) -> Pass:
        raise ValueError("too few\nand more")

    assert "fails" in str(tried(fails)) or "(ValueError: too few)" in str(tried(fails))


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


def test_a_rare_label_that_weighs_more_is_found() -> None:
    weight = np.ones(3000)
    X = np.random.default_rng(3).normal(size=(3000, 3))
    labels = np.arange(3000) % 25
    labels[2222], weight[2222] = 25, 4.0

    def weighted(_: Arrays, rows: Sequence[int]) -> Pass:
        picked = list(rows)
        factor = len(picked) / weight[picked].sum()
        losses, gradients = X[picked].sum(1), X[picked]
        total, gradient = (weight[picked] * losses).sum(), (weight[picked][:, None] * gradients).sum(0)
        return Pass([Term(total * factor, len(picked), [gradient * factor])])

    with pytest.raises(BadSettings, match="not a mean over the samples"):
        check_source(Arrays((X, labels)), weighted, precisions=["float32"], own_step=False)
