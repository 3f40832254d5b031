"""How the command trains with TensorFlow: see :class:`manyhands.training.commands.recipes.Recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from manyhands.errors import BadSettings
from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data.sources import Array, Arrays
from manyhands.training.options import Step
from manyhands.training.tensorflow import checks, naming
from manyhands.training.tensorflow.book import datasets
from manyhands.training.tensorflow.book.models import MODELS, initialise
from manyhands.training.tensorflow.optimizers import Nesterov
from manyhands.training.tensorflow.ranks import world
from manyhands.training.tensorflow.step import precision
from manyhands.training.tensorflow.trainer import Trainer

_POLICIES = {"fp64": "float64", "fp32": "float32"}


def model(name: str, seed: int) -> Any:
    return initialise(MODELS[name](num_classes=10), seed)


nesterov, data, arrays, from_first = Nesterov, datasets.of, recipes.arrays, world.from_first


def trained(model: Any, data: Arrays, way: Way, loss: Any = None) -> dict[str, Array]:
    part = data.spread(way.samples)
    net = precision.like(model, _POLICIES[way.precision], checks.few_samples(part, 2))
    net.set_weights([nudged(weight, way.nudge) for weight in net.get_weights()])
    step = Step(shares=way.shares, batch_stats="global")
    options: dict[str, Any] = {"step": step, "loss": loss, "devices": f"cpu:{way.devices}"}
    momentum = keras.optimizers.SGD(0.02, momentum=0.9)  # has a memory, so that differences of early steps show
    Trainer(way.epochs, optimizer=momentum, batch_size=way.batch_size, quiet=True, **options).fit(net, part)
    return dict(zip(naming.names(net), net.get_weights(), strict=True))


def layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def load_model(run: str | Path) -> Any:
    """The model that ``manyhands train`` has trained in a run."""
    name, weights = recipes.model_and_weights(run, "tensorflow")
    net = MODELS[name](num_classes=10)
    _restore(net, weights)
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    If the run averaged its weights (``mh.EMA``), these are the average.
    """
    if not model.built:
        raise BadSettings("the model has no variables yet: call it on a few samples first, or model.build(shape)")
    _restore(model, recipes.weights_of(run, "tensorflow"))
    return model


def _restore(net: Any, weights: bytes) -> None:
    expected = dict(zip(naming.names(net), net.get_weights(), strict=True))
    net.set_weights(list(tensors.fitting(weights, expected, "weights of another model").values()))
