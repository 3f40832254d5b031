"""How the command trains with MXNet: see :class:`manyhands.training.commands.recipes.Recipes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data.sources import Arrays
from manyhands.training.mxnet import checks, modes, state
from manyhands.training.mxnet.book import datasets
from manyhands.training.mxnet.book.models import MODELS, initialise
from manyhands.training.mxnet.step import replicas
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.options import Step

_DTYPES = {"fp64": "float64", "fp32": "float32"}


def model(name: str, seed: int) -> Any:
    return initialise(MODELS[name](num_classes=10), seed)


def nesterov(rate: float) -> Any:
    """SGD with Nesterov's momentum and weight decay, as MXNet has it.

    The rate goes into what the momentum remembers, so a rate that changes acts later than in PyTorch; weight decay
    differs slightly, too. At a constant rate and without decay the two are the same.
    """
    return mx.optimizer.NAG(learning_rate=rate, momentum=0.9, wd=5e-4)


data, arrays = datasets.of, recipes.arrays


def from_first(make: Callable[[], Any]) -> Any:
    """There is one process: a launcher's several are refused, before they make folders."""
    checks.refuse_launcher()
    return make()


def trained(model: Any, data: Arrays, way: Way, loss: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """The model itself is trained, and has its own values again afterwards: Gluon's models cannot be copied."""
    with modes.numpy_like(modes.of_model(model)):
        checks.make_parameters(model, data, 0)
    part = Arrays(data.spread(way.samples).arrays, data.prepare, data.native, way.batch_size)
    step = Step(shares=way.shares, batch_stats="global")
    options: dict[str, Any] = {"step": step, "precision": way.precision, "loss": loss, "devices": f"cpu:{way.devices}"}
    momentum = mx.optimizer.SGD(learning_rate=0.02, momentum=0.9)
    with replicas.on(model, [mx.cpu()], _DTYPES[way.precision]):
        before = tensors.pack(state.model_tensors(model))
        first = {name: nudged(tensor, way.nudge) for name, tensor in state.model_tensors(model).items()}
        try:
            state.restore_model(model, tensors.pack(first))
            Trainer(way.epochs, optimizer=momentum, quiet=True, **options).fit(model, part)
            return state.model_tensors(model)
        finally:
            state.restore_model(model, before)


def layers(model: Any) -> list[Any]:
    return [model, *(layer for child in model._children.values() for layer in layers(child))]


def load_model(run: str | Path) -> Any:
    """The model that ``manyhands train`` has trained in a run, on the CPU."""
    name, weights = recipes.model_and_weights(run, "mxnet")
    net = MODELS[name](num_classes=10)
    net.initialize(ctx=mx.cpu())
    state.restore_model(net, weights)
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    If the run averaged its weights (``mh.EMA``), these are the average.
    """
    checks.check_values(model)
    state.restore_model(model, recipes.weights_of(run, "mxnet"))
    return model
