"""How ``manyhands train`` and ``parity`` train, in any framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from manyhands.errors import BadRunFolder, BadSettings, WrongCheckpoint, type_in_words
from manyhands.placement import moves
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.fashion_mnist import FashionMnist
from manyhands.training.data.sources import Arrays, source

MODELS = ("resnet18", "lenet", "small-resnet", "mlp")


@dataclass(frozen=True)
class Way:
    """One training of a comparison: on how many devices, with how much of the data, for how long."""

    devices: int
    shares: Sequence[float] | None
    precision: Literal["fp64", "fp32"]
    samples: int
    batch_size: int
    epochs: int
    # A seed for :func:`nudged`: the first weights differ in their last bit.
    nudge: int | None = None


class Recipes(Protocol):
    """What the command calls of a framework: ``manyhands.book.<framework>.BOOK``."""

    def model(self, name: str, seed: int) -> Any:
        """One of :data:`MODELS` for images of 28 by 28 and ten classes, with weights drawn by the seed."""

    def nesterov(self, rate: float) -> Any:
        """SGD with Nesterov's momentum 0.9 and weight decay 5e-4, as ``Trainer(optimizer=...)`` takes it."""

    def data(self, data: FashionMnist, batch_size: int | None) -> tuple[Any, Any]:
        """The training and the test part, as ``Trainer.fit`` takes them."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """The value (JSON) that ``make`` returns in the first process of a launched job; every process gets it."""

    def arrays(self, data: Any) -> Any:
        """The arrays (X, y) of a user's script, as a source with a ``count``."""

    def trained(self, model: Any, data: Any, way: Way, loss: Any = None) -> Mapping[str, Any]:
        """Train a copy of the model with momentum, in that way; its tensors by name, as NumPy's."""

    def layers(self, model: Any) -> Iterable[Any]:
        """All layers of a model, also those within others."""

    def load_model(self, run: str | Path) -> Any:
        """The model that ``manyhands train`` has trained in a run, for evaluation."""

    def load_weights(self, model: Any, run: str | Path) -> Any:
        """Load the weights of a run's last checkpoint, or of one checkpoint, into a model, and return it."""


def of(framework: str) -> Recipes:
    """The recipes of a framework. Importing them imports the framework."""
    moves.require(framework)
    module: Any = importlib.import_module(f"manyhands.book.{framework}")
    return cast(Recipes, module.BOOK)


def arrays(data: Any) -> Arrays:
    """:meth:`Recipes.arrays` of the frameworks whose sources are NumPy's arrays."""
    arrays_or_loader = source(data)
    if not isinstance(arrays_or_loader, Arrays):
        raise BadSettings(f"give the data as (X, y) arrays, not {type_in_words(data)}")
    return arrays_or_loader


def model_and_weights(run: str | Path, framework: str) -> tuple[str, bytes]:
    """The name of the model that ``manyhands train`` trained in a run, and the weights of its last checkpoint."""
    name = RunFolder.open(Path(run).expanduser()).config.get("train", {}).get("model")
    if name not in MODELS:
        raise BadRunFolder(
            f"{run} holds the weights of a model of your own, and not the model itself: make it, and write "
            f"mh.load_weights(model, {str(run)!r})"
        )
    return name, weights_of(run, framework)


def weights_of(run: str | Path, framework: str) -> bytes:
    """The weights in a run's last checkpoint, or in the one checkpoint that is named; their average if it is kept."""
    path = Path(run).expanduser()
    if not path.is_dir():
        raise BadRunFolder(f"there is no run in {run}: no such folder")
    checkpoint = store.load(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    made_by = checkpoint.state.get("framework", "torch")
    if made_by != framework:
        raise WrongCheckpoint(
            f"the weights in {run} are {made_by}'s: make a run for {framework} of it with "
            f"manyhands convert {run} --to {framework}"
        )
    return checkpoint.blobs.get("average", checkpoint.blobs["model"])


def nudged(values: Any, seed: int | None) -> Any:
    """Every number moved to one of its two neighbours at random; unchanged without a seed, or if not floats."""
    numbers = np.asarray(values)
    if seed is None or not np.issubdtype(numbers.dtype, np.floating):
        return numbers
    up = np.random.default_rng([seed, numbers.size]).integers(0, 2, numbers.shape).astype(bool)
    towards = np.where(up, np.inf, -np.inf).astype(numbers.dtype)
    return np.asarray(np.nextafter(numbers, towards), numbers.dtype)
