"""``manyhands parity``: is training on N devices the same as on one? Trained in float64 and compared.

The steps always include a short last batch, and uneven shards where the framework has them. Samples are taken from all
of the data: in sorted data the first ones may all have the same length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from manyhands.book import recipes as _recipes
from manyhands.book.recipes import MODELS, Recipes
from manyhands.cli import flags, script
from manyhands.cli.flags import Count, Framework, Reads
from manyhands.errors import BadSettings
from manyhands.training.checkpoints import tensors
from manyhands.training.data import fashion_mnist
from manyhands.training.options import Step

LIMIT = 1e-12


def run(
    model: str,
    *,
    framework: Framework | None = None,
    devices: Annotated[int, Reads(type=flags.whole_number(2), metavar="N")] = 2,
    batch_size: Count = 16,
) -> int:
    """Compares weights after at least 50 steps in float64; they may differ by 1e-12.

    A script's function is called for every training; the first weights of all are those of its first model.

    Args:
        model: One of resnet18, lenet, small-resnet, mlp; or script.py:function, which returns (model, (X, y)) or
            (model, (X, y), loss).
        framework: Framework of the model. Default: the first that is installed.
        devices: Virtual CPU devices to compare with one device. Default: 2.
        batch_size: Samples per step, over all devices together. Default: 16.
    """
    framework = flags.framework_or_first(framework)
    recipes = _recipes.of(framework)
    recipes.trainer(1, devices=f"cpu:{devices}")  # creates the devices before anything is computed
    make, data, loss = _subject(model, recipes)
    print(f"{'steps':>5} {'devices':>7} {'shares':<12} {'difference':>10} {'limit':>7}")
    worst = 0.0
    for shares, steps, difference in compare(recipes, make, data, devices, loss=loss, batch_size=batch_size):
        shown = "even" if shares is None else ":".join(f"{share:g}" for share in shares)
        verdict = "equal" if difference <= LIMIT else "NOT EQUAL"
        print(f"{steps:>5} {devices:>7} {shown:<12} {difference:>10.1e} {LIMIT:>7.0e} {verdict}", flush=True)
        worst = max(worst, difference)
    if worst <= LIMIT:
        return 0
    print(
        "Layers that draw random numbers, as Dropout, draw others on every device, by design: set their rates to 0 to "
        "compare everything else. MXNet's BatchNorm takes its statistics on each device by itself."
    )
    return 1


def _subject(text: str, recipes: Recipes) -> tuple[Callable[[], Any], Any, Any]:
    """A function that makes the model, the data and the loss, by the model's name or from the user's script."""
    if text in MODELS:
        return lambda: recipes.model(text, 0), recipes.data(fashion_mnist.load(), None)[0], None
    if ":" not in text:
        raise BadSettings(f"{text!r} is neither one of {', '.join(MODELS)} nor script.py:function")
    make = script.maker(text)
    _, given, loss = make()
    trainer = recipes.trainer(1)
    trainer.prepare_data(given)
    if not hasattr(trainer.train_source, "spread"):
        raise BadSettings("parity needs the data as arrays, (X, y), not as a loader or a data set")
    return lambda: make()[0], trainer.train_source, loss


def compare(
    recipes: Recipes,
    make: Callable[[], Any],
    data: Any,
    devices: int,
    *,
    loss: Any = None,
    batch_size: int = 16,
    steps: int = 50,
) -> Iterator[tuple[Sequence[float] | None, int, float]]:
    """Train on 1 and on N devices, and compare all that the models hold: shares, steps, the largest difference.

    All models begin with the weights of the first. Uneven shares follow the even ones, where the framework has them.
    """
    count, epochs = extent(data.count, batch_size, steps)
    part = dataclasses.replace(data.spread(count), batch_size=batch_size)
    with recipes.in_float64(make, data) as model:
        first_weights = tensors.pack(recipes.tensors(model))

    def train(devices: int, shares: Sequence[float] | None) -> Mapping[str, Any]:
        # With momentum, so that differences of early steps show.
        how = {"loss": loss, "optimizer": recipes.nesterov(0.02), "precision": "fp64", "quiet": True}
        step = Step(shares=shares, batch_stats=recipes.batch_stats)
        with recipes.in_float64(make, data) as model:
            recipes.restore(model, first_weights)
            recipes.trainer(epochs, devices=f"cpu:{devices}", step=step, **how).fit(model, part)
            return recipes.tensors(model)

    alone = train(1, None)
    uneven = [] if "shares" in recipes.trainer.refused else [[float(devices - rank) for rank in range(devices)]]
    for shares in (None, *uneven):
        yield shares, epochs * -(-count // batch_size), largest_difference(train(devices, shares), alone)


def extent(count: int, batch_size: int, steps: int) -> tuple[int, int]:
    """How many of the samples, and epochs: at least this many steps, and the last of an epoch is short."""
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
        a, b = np.asarray(tensors[name], dtype=np.float64), np.asarray(tensor, dtype=np.float64)
        distance = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3 * b.size**0.5))
        exact = not np.issubdtype(np.asarray(tensor).dtype, np.floating)
        worst = max(worst, math.inf if math.isnan(distance) or (exact and distance) else distance)
    return worst
