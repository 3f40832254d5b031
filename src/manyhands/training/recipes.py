"""How ``manyhands train`` trains, in any framework: the schedule, and how much fits into a minute."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from manyhands.training.fashion_mnist import FashionMnist

MODELS = ("resnet18", "lenet", "small-resnet", "mlp")
FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")


class Recipes(Protocol):
    """What the command needs of a framework: the module ``manyhands.training.<framework>.recipes``."""

    def model(self, name: str, seed: int) -> Any:
        """One of :data:`MODELS` for images of 28 by 28 and ten classes, with weights drawn by the seed."""

    def nesterov(self, rate: float) -> Any:
        """SGD with Nesterov's momentum 0.9 and weight decay 5e-4, as the framework's ``Trainer(optimizer=)`` takes it."""

    def data(self, data: FashionMnist, batch_size: int) -> Any:
        """The data as the framework's ``Trainer.fit`` takes it."""

    def seconds_per_epoch(self, name: str, batch_size: int, samples: int) -> float:
        """About how long an epoch of that model takes on this machine's CPU, by the time of a few steps."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first process of a launched job makes (JSON), as every process gets it; alone: what is made."""

    def trained(self, model: Any, data: Any, **how: Any) -> dict[str, Any]:
        """For :mod:`.parity`: train a copy of the model in a certain way, and give its tensors as NumPy's by name."""

    def load_model(self, run: str | Path) -> Any:
        """The model of a run, with the weights of its last checkpoint."""


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
