"""``manyhands parity``: is training on N devices the same as on one? Trained and compared."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from manyhands.cli import flags, script
from manyhands.errors import BadSettings

if TYPE_CHECKING:
    from manyhands.training.commands.recipes import Recipes


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "parity",
        help="train a few steps on 1 and on N devices, and print the largest difference",
        description="Compares weights after at least 50 steps in float64 (limit 1e-12) and 5 in float32 (limit 1e-5). "
        "Beyond 1e-5 a net still passes if N devices are no further from float64 than one device is.",
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
    parser.set_defaults(run_command=run, error_text=flags.in_command_words)


def run(options: argparse.Namespace) -> int:
    from manyhands.training.commands import parity
    from manyhands.training.commands import recipes as _recipes

    framework = flags.framework(options)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    mh.Trainer(1, devices=f"cpu:{options.devices}")  # creates the devices before anything is computed
    model, data, loss = _subject(options.model, recipes)
    print(f"{'precision':<10} {'steps':>5} {'devices':>7} {'shares':<12} {'difference':>10} {'limit':>7}")
    comparisons = parity.compare(
        lambda way: recipes.trained(model, data, way, loss), data.count, options.devices, batch_size=options.batch_size
    )
    for comparison in comparisons:
        shares = "even" if comparison.shares is None else ":".join(f"{share:g}" for share in comparison.shares)
        trial = f"{comparison.precision:<10} {comparison.steps:>5} {comparison.devices:>7} {shares:<12}"
        print(f"{trial} {comparison.difference:>10.1e} {comparison.limit:>7.0e} {comparison.words}")
    if all(comparison.equal for comparison in comparisons):
        return 0
    if drawing := parity.drawing_layers(recipes.layers(model)):
        print(
            f"The model draws random numbers in {', '.join(drawing)}. Every device draws its own, by design, so "
            "several devices differ from one. Set the rate to 0 to compare everything else."
        )
    return 1


def _subject(text: str, recipes: Recipes) -> tuple[Any, Any, Any]:
    """Model, data and loss, by name or from the user's script."""
    from manyhands.training.commands.recipes import MODELS
    from manyhands.training.data import fashion_mnist

    if text in MODELS:
        return recipes.model(text, 0), recipes.data(fashion_mnist.load(), None)[0], None
    if ":" not in text:
        raise BadSettings(f"{text!r} is neither one of {', '.join(MODELS)} nor script.py:function")
    model, data, loss = script.made_by(text)
    return model, recipes.arrays(data), loss
