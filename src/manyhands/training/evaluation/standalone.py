"""``Trainer.evaluate`` and ``Trainer.predict``: a model on all devices of a trainer, without training it."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from manyhands.errors import BadBatch
from manyhands.training import option_names
from manyhands.training.data import loader_batches
from manyhands.training.settings import Settings


class Evaluating(abc.ABC):
    """The part of a trainer that computes with a model and leaves it as it is."""

    @option_names.explained(too_many="evaluate takes a model and data with targets: evaluate(model, (X, y))")
    def evaluate(self, model: Any, data: Any) -> dict[str, Any]:
        """The figures of a model over data with targets: ``{"loss": 0.31, "acc": 0.89, "f1": 0.88}``.

        ``loss`` is the trainer's (or the model's own), ``acc`` is there where the targets are classes, and every metric
        of ``metrics=`` has its name. Every sample counts once, on all devices of the trainer, and the figures are the
        same on any number of them. The model is in evaluation mode meanwhile; its mode, its weights and its device are
        as they were afterwards. ``precision="auto"`` is that of the weights.

        ``data``: (X, y) arrays, a data set or a loader of the framework, or a function that makes batches. Under a
        launcher (torchrun) every process calls it with the same data and gets the same figures.
        """
        self._check_step(model)
        source = self._in_order(data, "evaluate")
        return self._evaluate(model, source, self._settings_for(source))

    @option_names.explained(too_many="predict takes a model and data, with or without targets: predict(model, X)")
    def predict(self, model: Any, data: Any) -> Any:
        """What a model answers, one row per sample, in the order of the data, in the host's memory.

        Arrays are PyTorch's tensors on the CPU, NumPy's in JAX and TensorFlow, and MXNet's on the CPU. An answer that
        is a tuple, a dict or a dataclass keeps its structure. ``data`` may have targets, which are not looked at, or
        none: ``predict(model, X)``. As in training, the last part of a batch is the target, unless the model takes all
        parts. All devices of the trainer compute, and the model is left as it was, as in :meth:`evaluate`. Under a
        launcher (torchrun) every process calls it with the same data; the first gets the outputs, the others None.
        """
        source = self._in_order(data, "predict")
        return self._predict(model, source, self._settings_for(source))

    def _in_order(self, data: Any, method: str) -> Any:
        """A source of the data that gives them in their own order."""
        if hasattr(data, "train_dataloader") and hasattr(data, "val_dataloader"):
            data = data.val_dataloader()
        source, second = self._sources(data)
        if second is not None:
            raise BadBatch(
                f"{method} takes one data set, and two were given: give the one that is meant, {method}(model, data[1])"
            )
        loader_batches.check(source, 1)
        alone = {"targets": False} if method == "predict" and hasattr(source, "targets") else {}
        return dataclasses.replace(source, shuffle=False, **alone)

    def _settings_for(self, source: Any) -> Settings:
        size = self._option("batch_size")
        return self._settings_with(source.batch_size if size is None else size)

    @abc.abstractmethod
    def _evaluate(self, model: Any, source: Any, settings: Settings) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _predict(self, model: Any, source: Any, settings: Settings) -> Any: ...

    # Of the trainer

    @abc.abstractmethod
    def _check_step(self, model: Any) -> None: ...

    @abc.abstractmethod
    def _option(self, name: str) -> Any: ...

    @abc.abstractmethod
    def _sources(self, data: Any, validation: Any = None) -> tuple[Any, Any]: ...

    @abc.abstractmethod
    def _settings_with(self, size: int | None) -> Settings: ...
