"""How the command trains with PyTorch: see :class:`manyhands.training.commands.recipes.Recipes`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data.order import spread
from manyhands.training.options import Step
from manyhands.training.torch.book import datasets
from manyhands.training.torch.book.models import MODELS, initialise
from manyhands.training.torch.data.sources import Arrays, source
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state
from manyhands.training.torch.trainer import Trainer

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def model(name: str, seed: int) -> torch.nn.Module:
    return initialise(MODELS[name](num_classes=10), seed)


def nesterov(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


data = datasets.of
from_first = world.from_first


def arrays(data: Any) -> Arrays:
    arrays = source(data)
    if not isinstance(arrays, Arrays):
        raise BadSettings(f"give the data as (X, y) tensors or arrays, not {type_in_words(data)}")
    return arrays


def trained(model: torch.nn.Module, data: Arrays, way: Way, loss: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    net = copy.deepcopy(model).to(_DTYPES[way.precision])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(nudged(parameter.numpy(force=True), way.nudge)))
    numbers = torch.from_numpy(spread(data.count, way.samples))
    part = Arrays(tuple(t[numbers.to(t.device)] for t in data.tensors), data.prepare, way.batch_size)
    step = Step(shares=way.shares, batch_stats="global")
    # An optimizer with a memory, so that differences of early steps would show.
    momentum = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    how: dict[str, Any] = {"step": step, "precision": way.precision, "loss": loss}
    trainer = Trainer(way.epochs, optimizer=momentum, quiet=True, devices=f"cpu:{way.devices}", **how)
    trainer.fit(net, part)
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}


def layers(model: torch.nn.Module) -> list[Any]:
    return list(model.modules())


def load_model(run: str | Path) -> torch.nn.Module:
    """The model that ``manyhands train`` has trained in a run, on the CPU and in evaluation mode."""
    name, weights = recipes.model_and_weights(run, "torch")
    net = MODELS[name](num_classes=10)
    job_state.restore_model(net, weights)
    return net.eval()


def load_weights(model: torch.nn.Module, run: str | Path) -> torch.nn.Module:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    The model is in evaluation mode then. If the run averaged its weights (``mh.EMA``), these are the average.
    """
    job_state.restore_model(model, recipes.weights_of(run, "torch"))
    return model.eval()
