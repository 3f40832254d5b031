"""How the command trains with JAX: see :class:`manyhands.training.commands.recipes.Recipes`."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data.sources import Arrays
from manyhands.training.jax import linen, world
from manyhands.training.jax.book import datasets
from manyhands.training.jax.book.models import MODELS
from manyhands.training.jax.skeleton import Skeleton, doubled, named, refilled
from manyhands.training.jax.trainer import Trainer
from manyhands.training.options import Step


def model(name: str, seed: int) -> nnx.Module:
    return MODELS[name](num_classes=10, rngs=nnx.Rngs(seed))


def nesterov(rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True))


data, arrays = datasets.of, recipes.arrays


def from_first(make: Callable[[], Any]) -> Any:
    world.check()
    first_value = json.dumps(make()).encode() if jax.process_index() == 0 else b""
    return json.loads(world.from_first(first_value))


def trained(model: nnx.Module, data: Arrays, way: Way, loss: Any = None) -> dict[str, NDArray[Any]]:
    part = replace(data.spread(way.samples), batch_size=way.batch_size)
    options: dict[str, Any] = {"step": Step(shares=way.shares), "precision": way.precision, "loss": loss}
    double = way.precision == "fp64"
    with jax.enable_x64(True) if double else contextlib.nullcontext():
        net = copy.deepcopy(model)
        if double:
            doubled(net)
        skeleton = Skeleton(net)
        skeleton.put_into(net, jax.tree.map(lambda leaf: jnp.asarray(nudged(leaf, way.nudge)), skeleton.numbers(net)))
        # An optimizer with a memory, so that differences of early steps would show.
        trainer = Trainer(
            way.epochs, optimizer=optax.sgd(0.02, momentum=0.9), quiet=True, devices=f"cpu:{way.devices}", **options
        )
        trainer.fit(net, part)
        return {name: np.array(tensor) for name, tensor in _tensors(net).items()}


def layers(model: nnx.Module) -> list[Any]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]


def load_model(run: str | Path) -> nnx.Module:
    """The model that ``manyhands train`` has trained in a run, in evaluation mode."""
    name, weights = recipes.model_and_weights(run, "jax")
    net = model(name, 0)
    _restore(net, weights)
    net.eval()
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    The model is in evaluation mode then. If the run averaged its weights (``mh.EMA``), these are the average. A Linen
    module has to be bound to variables, ``module.bind(module.init(key, X[:1]))``; one that is bound to the weights is
    returned.
    """
    if linen.is_linen(model):
        wrapped = linen.with_weights(model)
        _restore(wrapped, recipes.weights_of(run, "jax"))
        return linen.as_linen(wrapped, model.variables)
    _restore(model, recipes.weights_of(run, "jax"))
    model.eval()
    return model


def _restore(net: nnx.Module, weights: bytes) -> None:
    skeleton = Skeleton(net)
    saved = tensors.fitting(weights, _tensors(net), "weights of another model")
    before = skeleton.numbers(net)
    after = {part: refilled(before[part], saved) for part in ("parameters", "rest")}
    skeleton.put_into(net, {**before, **jax.tree.map(jnp.asarray, after)})


def _tensors(net: nnx.Module) -> dict[str, Any]:
    numbers = Skeleton(net).numbers(net)
    return {**named(numbers["parameters"]), **named(numbers["rest"])}
