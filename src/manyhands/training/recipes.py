"""How ``manyhands train`` trains, in any framework: the schedule, and how much fits into a minute."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from manyhands import placement
from manyhands.errors import BadRunFolder, WrongCheckpoint
from manyhands.training import checkpoint
from manyhands.training.fashion_mnist import FashionMnist
from manyhands.training.parity import Way
from manyhands.training.run_folder import RunFolder

MODELS = ("resnet18", "lenet", "small-resnet", "mlp")


class Recipes(Protocol):
    """What the command needs of a framework: the functions of ``manyhands.training.<framework>.recipes``."""

    def model(self, name: str, seed: int) -> Any:
        """One of :data:`MODELS` for images of 28 by 28 and ten classes, with weights drawn by the seed."""

    def nesterov(self, rate: float) -> Any:
        """SGD with Nesterov's momentum 0.9 and weight decay 5e-4, as ``Trainer(optimizer=...)`` takes it."""

    def data(self, data: FashionMnist, batch_size: int | None) -> tuple[Any, Any]:
        """The training and the test part, as ``Trainer.fit`` takes them."""

    def on_cpu(self, count: int) -> dict[str, Any]:
        """The trainer's options for so many devices made of the CPU. Comes before anything else is computed."""

    def seconds_per_epoch(self, name: str, batch_size: int, samples: int) -> float:
        """About how long an epoch of that model takes on this machine's CPU, by the time of a few steps."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first process of a launched job makes (JSON), as every process gets it; alone: what is made."""

    def arrays(self, data: Any) -> Any:
        """The arrays (X, y) that a user's script gives, as a source with a ``count``."""

    def trained(self, model: Any, data: Any, way: Way, loss: Any = None) -> Mapping[str, Any]:
        """Train a copy of the model with momentum, in that way; its tensors by name, as NumPy's."""

    def load_model(self, run: str | Path) -> Any:
        """The model that a run has trained, with the weights of its last checkpoint."""


def of(framework: str) -> Recipes:
    """The recipes of a framework, which is imported by that."""
    placement.require(framework)
    module: Any = importlib.import_module(f"manyhands.training.{framework}.recipes")
    return cast(Recipes, module)


def weights_of(run: str | Path, framework: str) -> tuple[str, bytes]:
    """The name of the model that ``manyhands train`` trained in a run, and the weights of its last checkpoint."""
    folder = RunFolder.open(Path(run))
    name = folder.config.get("train", {}).get("model")
    if name not in MODELS:
        raise BadRunFolder(
            f"{run} does not say which model it is of: it is no run of manyhands train. Make your model yourself, and "
            "give Trainer(resume=...) the run"
        )
    found = checkpoint.load(folder.checkpoints)
    made_by = found.state.get("framework", "torch")
    if made_by != framework:
        raise WrongCheckpoint(
            f"the weights in {run} are {made_by}'s: make a run for {framework} of it with "
            f"manyhands convert {run} --to {framework}"
        )
    return name, found.blobs["model"]


def one_cycle(done: float) -> float:
    """Up in a line to 1 during the first fifth, then down to nothing along a cosine."""
    return done / 0.2 + 0.04 if done < 0.19 else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - 0.19) / 0.81))


def for_a_minute(recipes: Recipes, batch_size: int, samples: int) -> tuple[str, int]:
    """A model and a number of epochs (at most four) that a CPU is ready with in about a minute."""
    for name in ("lenet", "mlp"):
        seconds = recipes.seconds_per_epoch(name, batch_size, samples)
        if seconds < 75:
            break
    return name, max(1, min(4, round(60 / seconds)))
