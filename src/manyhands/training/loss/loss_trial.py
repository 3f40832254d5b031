"""Tries model and loss on real samples before a job begins: do the parts of a batch add up to the whole?

On several devices, or with ``accumulate``, a batch is processed in parts, and their losses and gradients are added up:
means weighted by their samples, a ``LossSum`` by its counts. The result is that of the whole batch unless the loss is
another kind of mean, or model or loss compare samples with each other. No function is trusted by its name: loss and
gradients are computed for a few samples at once and for parts of them, and both must agree. For example a mean over
tokens, of two texts with 1 and 3 tokens whose losses are 4 and 2, 2, 2::

    whole   (4 + 2 + 2 + 2) / 4 = 2.5
    parts   (4 / 1 + 6 / 3) / 2 = 3.0     -> refused

Three things make the trial sensitive:

- The samples are as unlike as possible: targets with little and with much padding, and labels of every kind, the
  rarest first where there are many.
- Gradients are compared, not values alone: with a last layer of zeros every sample has the same loss.
- Parts are single samples, and halves with the small losses in one and the large ones in the other.

A framework's adapter computes the loss and the gradients of some of the samples (:class:`Pass`), in a way that leaves
the model as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import BadSettings
from manyhands.training.data.loader_batches import preserve_host_random_state
from manyhands.training.data.order import spread
from manyhands.training.data.sources import Array, Arrays, Source

FEW = 8  # samples of a batch that is tried
WIDTH = 4096  # numbers of a sample that are looked at
_LOOKED_AT = 1 << 22  # numbers of a part of the data in memory; labels, one number for each sample, are all looked at
_LABELS = 32  # distinct ones that are tried
# By precision, how far apart losses and gradients may be. Rounding switches a ReLU on or off here and there, which
# moves gradients far more than the loss: of 20 convolutions in float32 by 4e-3.
_CLOSE = {"float64": (1e-7, 1e-7), "float32": (1e-4, 3e-2), "tf32": (1e-3, 3e-2)}
_OTHERWISE_CLOSE = (3e-2, 3e-2)
_SMALL = 1e-3  # of all gradients: those of a weight that are smaller may be nothing but rounding


@dataclass(frozen=True)
class Term:
    """A part of a loss: a sum over some samples, what it is divided by, and the sum's gradient for each weight."""

    total: float
    count: float
    gradients: Sequence[Array]

    @property
    def divisor(self) -> float:
        return self.count or 1.0


@dataclass(frozen=True)
class Pass:
    """The loss of some samples, as the sum of its terms."""

    terms: Sequence[Term]

    @cached_property
    def loss(self) -> float:
        return sum(term.total / term.divisor for term in self.terms)

    @cached_property
    def gradients(self) -> list[Array]:
        columns = zip(*([array / term.divisor for array in term.gradients] for term in self.terms), strict=True)
        return [np.asarray(sum(column)) for column in columns]

    @cached_property
    def norms(self) -> list[float]:
        return [float(np.linalg.norm(array)) for array in self.gradients]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(map(math.isfinite, self.norms))


Compute = Callable[[Sequence[int]], Pass]


@dataclass(frozen=True)
class Difference:
    """The parts of a batch do not add up to the whole."""

    whole: Pass
    parts: Sequence[Pass]
    size: int

    def refusal(self, own_step: bool, coupled: str | None = None) -> str:
        """``own_step``: the loss comes from ``training_step``. ``coupled``: advice where samples are compared."""
        together = _together(self.parts)
        values = (
            f"it is {self.whole.loss:.6g} for {self.size} samples, and {together.loss:.6g} put together from "
            f"{len(self.parts)} parts of them"
        )
        if math.isclose(self.whole.loss, together.loss, rel_tol=1e-4):
            values = f"the gradients of {self.size} samples are not those of {len(self.parts)} parts of them together"
        return (
            f"the loss is not a mean over the samples of a batch: {values}. On several devices, or with accumulate, a "
            "batch is processed in parts, and this loss would then train another model than one device does. If it is "
            f"divided by something else than the number of samples, {_DIVIDED[own_step]}: `return mh.LossSum(total, "
            "count)` instead of `return total / count`. If the loss of a sample depends on the other samples of its "
            f"batch, {coupled or _COUPLED}"
        )


_DIVIDED = {
    True: "return a mean over samples, or a sum and its divisor, from training_step",
    False: "let the loss return one number per sample (called in it, a PyTorch or Keras loss with reduction='none' "
    "gives them), their mean, or a sum and its divisor",
}
_COUPLED = "it needs the whole batch: one device, and accumulate=1"


Batches = Sequence[tuple[Compute, int]]  # what computes some rows of a batch, and how many rows it has

DRAWS = "it draws random numbers, or counts its calls: two passes over the same samples differ"


def note(why: str | Exception) -> str:
    """The note for a trial without an answer; an error will be raised again by the first step."""
    if isinstance(why, Exception):
        why = f"{type(why).__name__}: {why}".splitlines()[0][:200]
    return f"it was not checked whether the loss is a mean over samples, which batches in several parts need ({why})"


def check_source(
    data: Source,
    compute: Callable[[Arrays, Sequence[int]], Pass],
    *,
    precisions: Iterable[str],
    own_step: bool,
    labels_weigh: bool = True,
) -> list[str]:
    """Refuse a loss whose parts do not add up over samples of the data; returns notes, where that is not known.

    ``compute`` gives the pass of some rows of the data, or of a loader's first batch. ``own_step``: the loss comes from
    ``training_step``; ``labels_weigh``: a label may weigh more than another. An error of the user's code is no reason
    to refuse a job: the first step raises it.
    """
    if data.is_read_once:
        return [note("the loader can be read only once")]
    arrays = data if isinstance(data, Arrays) else Arrays(data.first_batch, structure=data.structure)
    chosen = choose(arrays)[: None if labels_weigh else 1]

    def of_batch(batch: Sequence[int], rows: Sequence[int]) -> Pass:
        return compute(arrays, [batch[row] for row in rows])

    try:
        with preserve_host_random_state():
            outcome = compare([(partial(of_batch, batch), len(batch)) for batch in chosen], tolerances(precisions))
    except Exception as error:
        return [note(error)]
    if isinstance(outcome, Difference):
        raise BadSettings(outcome.refusal(own_step))
    return [] if outcome is None else [note(outcome)]


def tolerances(precisions: Iterable[str]) -> tuple[float, float]:
    """How far apart losses, and gradients, may be in these precisions."""
    return max(_CLOSE.get(name, _OTHERWISE_CLOSE) for name in precisions)


# Whole and parts


def compare(batches: Batches, close: tuple[float, float]) -> Difference | str | None:
    """How the parts of the batches differ from the whole, or why that is not known; None: they add up."""
    outcomes: list[str | None] = []
    for number, (compute, size) in enumerate(batches):
        outcome = _compare(compute, size, close, halves=not number)
        if isinstance(outcome, Difference):
            return outcome
        outcomes.append(outcome)
    return None if None in outcomes else next(iter(outcomes), None)


def _compare(compute: Compute, size: int, close: tuple[float, float], *, halves: bool) -> Difference | str | None:
    whole = compute(range(size))
    if not whole.is_finite:
        return "it is NaN for the samples that were tried"
    if size < 2:
        return "there is only one sample"
    why: str | None = "it is NaN, or fails, for a part of a batch"
    for passes in _divisions(compute, size, halves=halves):
        why = None
        if are_close(whole, _together(passes), passes, close):
            continue
        repeated = compute(range(size))
        if not repeated.is_finite or not are_close(whole, repeated, [repeated], close):
            return DRAWS
        return Difference(whole, passes, size)
    return why


def _divisions(compute: Compute, size: int, *, halves: bool) -> Iterator[list[Pass]]:
    """Single samples, and halves by their losses if wanted; halves in order where single samples fail."""
    order = list(range(size))
    if (singles := _all(compute, [[row] for row in order])) is not None:
        losses = [single.loss for single in singles]
        order.sort(key=losses.__getitem__)
        yield singles
        if not halves:
            return
    if (both := _all(compute, [order[: size // 2], order[size // 2 :]])) is not None:
        yield both


def _all(compute: Compute, parts: Iterable[Sequence[int]]) -> list[Pass] | None:
    """None where a part fails: a layer may want more than one sample."""
    try:
        passes = [compute(rows) for rows in parts]
    except Exception:
        return None
    same_terms = len({len(pass_.terms) for pass_ in passes}) == 1
    return passes if same_terms and all(pass_.is_finite for pass_ in passes) else None


def _together(passes: Sequence[Pass]) -> Pass:
    """The parts put together: all totals are added, and divided by all counts."""

    def sum_of(terms: Sequence[Term]) -> Term:
        columns = zip(*(term.gradients for term in terms), strict=True)
        gradients = [np.asarray(sum(column)) for column in columns]
        return Term(sum(term.total for term in terms), sum(term.count for term in terms), gradients)

    return Pass([sum_of(terms) for terms in zip(*(pass_.terms for pass_ in passes), strict=True)])


def are_close(whole: Pass, other: Pass, parts: Sequence[Pass], close: tuple[float, float]) -> bool:
    """Whether losses and gradients are no further apart than rounding explains, relative to those of the parts."""
    if abs(whole.loss - other.loss) > close[0] * (sum(abs(part.loss) for part in parts) / len(parts) or 1.0):
        return False
    scales = [max(column) for column in zip(*(part.norms for part in parts), strict=True)]
    least = _SMALL * math.hypot(*scales) or 1.0
    gaps = [float(np.linalg.norm(a - b)) for a, b in zip(whole.gradients, other.gradients, strict=True)]
    return all(gap <= close[1] * max(scale, least) for gap, scale in zip(gaps, scales, strict=True))


# Samples


def choose(data: Arrays) -> list[list[int]]:
    """Batches of samples of arrays in memory: :func:`unlike`."""
    widths = [math.prod(array.shape[1:]) for array in data.arrays]
    return unlike(widths, data.count, lambda number, samples: data.arrays[number][samples])


def unlike(widths: Sequence[int], count: int, read: Callable[[int, NDArray[np.int64]], Array]) -> list[list[int]]:
    """A batch of samples that differ as much as possible, and further ones with the labels that are not in it.

    ``widths``: how many numbers each part of the data has for a sample; ``read`` gives those of some samples. Of a wide
    part in memory samples from everywhere are looked at, as many as is quick.
    """
    wishes, labels = [], list[tuple[NDArray[np.int64], Array]]()
    for number, width in reversed(list(enumerate(widths))):  # the target, which is the last part of most batches, first
        samples = spread(count, count if width <= 1 else max(4 * FEW, _LOOKED_AT // width))
        numbers = read(number, samples).reshape(len(samples), -1)[:, :WIDTH]
        if numbers.shape[1] and numbers.dtype.kind in "biuf":
            wishes.append(samples[list(_extremes(numbers))].tolist())
            whole = numbers.dtype.kind != "f" or (np.isfinite(numbers) & (numbers == np.round(numbers))).all()
            labels += [(samples, numbers[:, 0])] if width <= 1 and whole else []
    in_turns = [row for turn in itertools.zip_longest(*wishes) for row in turn if row is not None]
    first = sorted(list(dict.fromkeys([*in_turns, *spread(count, FEW).tolist()]))[:FEW])
    others: list[int] = []
    for samples, values in labels:
        kinds, firsts, counts = np.unique(values, return_index=True, return_counts=True)
        rarest = counts.argsort(kind="stable")[:_LABELS]
        others += samples[firsts[rarest][~np.isin(kinds[rarest], values[np.isin(samples, first)])]].tolist()
    others = list(dict.fromkeys(others))[:_LABELS]
    further = [others[start : start + FEW] for start in range(0, len(others), FEW)]
    return [first, *(rows if len(rows) > 1 else [first[0], *rows] for rows in further)]


def _extremes(numbers: Array) -> Iterator[int]:
    """The rows that are the furthest apart: by padding, by kind of label, and by value."""
    if numbers.dtype.kind != "f":
        kinds, firsts, counts = np.unique(numbers, return_index=True, return_counts=True)
        for padding in (kinds[counts.argmax()], kinds[0]):
            amount = (numbers == padding).sum(1)
            yield from (int(amount.argmax()), int(amount.argmin()))
        if numbers.shape[1] == 1:
            yield from firsts[:: max(1, len(kinds) // FEW)].tolist()
    means = numbers.mean(1, dtype=np.float64)
    if np.isfinite(means).all():
        yield from (int(means.argmax()), int(means.argmin()))
