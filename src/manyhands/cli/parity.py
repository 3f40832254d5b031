"""``manyhands parity``: is training on N devices the same as on one? Trained and compared.

In float64 the two agree to about 1e-15 after 50 steps; in float32 only the first steps can be compared, because small
rounding differences grow without bound. The steps always include a short last batch and uneven shards. Samples are
taken from all of the data: in sorted data the first ones may all have the same length, and a mean over tokens would
look like a mean over samples. The trainer refuses such a loss on N devices, and the comparison ends with its message.

With ReLUs even the first steps may differ in float32: one value in a million is so close to zero that its last bit
decides on which side of a ReLU it is, and so whether it has a gradient. N devices add in another order, so their last
bits differ. Whether that explains a difference is measured, not assumed: both are compared to the same steps in
float64. One device is trained again, up to sixteen times, from weights that differ only in their last bit
(:func:`manyhands.book.recipes.nudged`), to measure the error of float32. N devices may be about that far from float64,
but never further than half of the norm of a tensor: an error that large would excuse anything.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np

from manyhands.book import recipes as _recipes
from manyhands.book.recipes import MODELS, Recipes, Way
from manyhands.cli import flags, script
from manyhands.errors import BadSettings
from manyhands.training.data import fashion_mnist


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares weights after at least 50 steps in float64 (limit 1e-12) and 5 in float32 (limit 1e-5). "
        "Beyond 1e-5 a net still passes if N devices are no further from float64 than one device is."
    )
    option = parser.add_argument
    option(
        "model",
        metavar="MODEL_OR_SCRIPT",
        help="resnet18, lenet, small-resnet, mlp, or script.py:function, which returns (model, (X, y)) or "
        "(model, (X, y), loss)",
    )
    flags.add_framework(option, "framework of the model")
    option(
        "--devices",
        type=flags.whole_number(2),
        default=2,
        metavar="N",
        help="virtual CPU devices to compare with one device; default: 2",
    )
    option("--batch-size", **flags.COUNT, default=16, help="samples per step, over all devices together; default: 16")


def run(options: argparse.Namespace) -> int:
    framework = flags.framework(options)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    mh.Trainer(1, devices=f"cpu:{options.devices}")  # creates the devices before anything is computed
    model, data, loss = _subject(options.model, recipes)
    print(f"{'precision':<10} {'steps':>5} {'devices':>7} {'shares':<12} {'difference':>10} {'limit':>7}")
    comparisons = compare(
        lambda way: recipes.trained(model, data, way, loss), data.count, options.devices, batch_size=options.batch_size
    )
    for comparison in comparisons:
        shares = "even" if comparison.shares is None else ":".join(f"{share:g}" for share in comparison.shares)
        trial = f"{comparison.precision:<10} {comparison.steps:>5} {comparison.devices:>7} {shares:<12}"
        print(f"{trial} {comparison.difference:>10.1e} {comparison.limit:>7.0e} {comparison.words}")
    if all(comparison.equal for comparison in comparisons):
        return 0
    if drawing := drawing_layers(recipes.layers(model)):
        print(
            f"The model draws random numbers in {', '.join(drawing)}. Every device draws its own, by design, so "
            "several devices differ from one. Set the rate to 0 to compare everything else."
        )
    return 1


def _subject(text: str, recipes: Recipes) -> tuple[Any, Any, Any]:
    """Model, data and loss, by name or from the user's script."""
    if text in MODELS:
        return recipes.model(text, 0), recipes.data(fashion_mnist.load(), None)[0], None
    if ":" not in text:
        raise BadSettings(f"{text!r} is neither one of {', '.join(MODELS)} nor script.py:function")
    model, data, loss = script.made_by(text)
    return model, recipes.arrays(data), loss


# The comparison


@dataclass(frozen=True)
class Comparison:
    """One training on several devices held against the one on one device."""

    precision: str
    steps: int
    devices: int
    shares: Sequence[float] | None
    difference: float
    limit: float
    # Measured where the difference is beyond the limit: how far N devices are from the same steps in float64, and how
    # far one device is, at most.
    error: float = float("inf")
    error_alone: float = 0.0

    @property
    def equal(self) -> bool:
        """Within the limit; or not further from float64 than one device is."""
        return self.difference <= self.limit or self.error <= min(_LIKE_ONE * self.error_alone, _NEVER)

    @property
    def words(self) -> str:
        """The verdict; a difference beyond the limit is never called equal."""
        if self.difference <= self.limit:
            return "equal"
        verdict = "beyond the limit, as near to float64 as one device" if self.equal else "NOT EQUAL"
        far = f" ({self.error:.1e}, one device up to {self.error_alone:.1e})" if self.error_alone else ""
        return verdict + far


@dataclass(frozen=True)
class Trial:
    precision: Literal["fp64", "fp32"]
    steps: int
    limit: float


_NUDGES = 16  # at most; enough when they explain a difference
_LIKE_ONE = 3.0  # the largest of a few errors is not the largest there is
_NEVER = 0.5  # of all that there is: weights of nothing but zeros are off by 1, NaN by more than anything
TRIALS = (Trial("fp64", 50, 1e-12), Trial("fp32", 5, 1e-5))


def compare(
    train: Callable[[Way], Mapping[str, Any]],
    samples: int,
    devices: int,
    *,
    batch_size: int = 32,
    trials: Sequence[Trial] = TRIALS,
) -> list[Comparison]:
    """Train on 1 and on N devices, evenly and unevenly, and compare all that the models hold.

    ``train`` trains a fresh copy of one model in the given way, with an optimizer that has a memory, so that
    differences of early steps would show; it gives the model's tensors by name.
    """
    uneven = [float(devices - rank) for rank in range(devices)]
    comparisons = []
    for trial in trials:
        count, epochs = _extent(samples, batch_size, trial.steps)
        steps = epochs * -(-count // batch_size)
        plain = Way(1, None, trial.precision, count, batch_size, epochs)
        alone = train(plain)
        yardstick = _Float64Reference(train, plain, alone)
        for shares in (None, uneven):
            several = train(replace(plain, devices=devices, shares=shares))
            difference = largest_difference(several, alone)
            comparison = Comparison(trial.precision, steps, devices, shares, difference, trial.limit)
            comparisons.append(yardstick.judged(comparison, several) if trial.precision == "fp32" else comparison)
    return comparisons


def drawing_layers(layers: Iterable[Any]) -> list[str]:
    """Layers that drop values randomly in training, as ``Dropout(0.5)``, of any framework."""
    shown: dict[str, None] = {}
    for layer in layers:
        kind = type(layer).__name__
        named = "drop" in kind.lower()  # Dropout, AlphaDropout, SpatialDropout2D, DropPath
        rates = [getattr(layer, name, None) for name in (("p", "rate", "_rate") if named else ("dropout",))]
        rate = next((rate for rate in rates if isinstance(rate, Real) and not isinstance(rate, bool)), 0)
        if rate:
            shown[f"{kind}({rate:g})" if named else f"{kind}(dropout={rate:g})"] = None
    return list(shown)


class _Float64Reference:
    """How far one device is from float64; made when it is asked for."""

    def __init__(self, train: Callable[[Way], Mapping[str, Any]], plain: Way, alone: Mapping[str, Any]) -> None:
        self._train, self._plain, self._alone = train, plain, alone
        self._exact: Mapping[str, Any] | None = None
        self._error, self._nudges = 0.0, 0

    def judged(self, comparison: Comparison, several: Mapping[str, Any]) -> Comparison:
        if comparison.equal:
            return comparison
        if self._exact is None:
            self._exact = self._train(replace(self._plain, precision="fp64"))
            self._error = largest_difference(self._alone, self._exact)
        comparison = replace(comparison, error=largest_difference(several, self._exact), error_alone=self._error)
        while not comparison.equal and self._nudges < _NUDGES:
            nudged_run = self._train(replace(self._plain, nudge=self._nudges))
            self._nudges += 1
            self._error = max(self._error, largest_difference(nudged_run, self._exact))
            comparison = replace(comparison, error_alone=self._error)
        return comparison


def _extent(count: int, batch_size: int, steps: int) -> tuple[int, int]:
    """How many samples, and how many epochs of them: at least this many steps, and the last of an epoch is short."""
    short = max(1, batch_size // 3)
    count = min(count, batch_size * steps - short)
    if count % batch_size == 0 and count > short:
        count -= short
    return count, -(-steps // -(-count // batch_size))


def largest_difference(tensors: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest relative difference of two sets of tensors, tensor by tensor.

    Relative to the tensor's norm; to a thousandth per element where that is smaller (biases that are zero up to
    noise have no relative difference).
    """
    worst = 0.0
    for name, tensor in other.items():
        a, b = np.asarray(tensors[name]), np.asarray(tensor)
        if np.issubdtype(b.dtype, np.floating):
            a, b = a.astype(np.float64), b.astype(np.float64)
            floor = 1e-3 * b.size**0.5
            distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), floor)
            worst = max(worst, distance if distance == distance else float("inf"))
        elif not np.array_equal(a, b):
            worst = float("inf")
    return worst
