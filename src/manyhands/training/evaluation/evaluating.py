"""``Trainer.evaluate`` and ``Trainer.predict``: a model on all devices of a trainer, without training it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands.errors import BadBatch, BadSettings
from manyhands.training import options, refusals
from manyhands.training.data import fit_arguments, loader_batches
from manyhands.training.data.loader_batches import first_batches
from manyhands.training.data.sources import as_numpy
from manyhands.training.evaluation.inputs import Inputs
from manyhands.training.settings import Settings


class Evaluating(abc.ABC):
    """The part of a trainer that computes with a model and does not change it."""

    @refusals.explained(too_many="evaluate takes a model and data with targets: evaluate(model, (X, y))")
    def evaluate(self, model: Any, data: Any, *, limit_batches: int | float | None = None) -> dict[str, Any]:
        """The figures of a model over data with targets: ``{"loss": 0.31, "acc": 0.89, "f1": 0.88}``.

        ``loss`` is the trainer's (or the model's own), ``acc`` is there where the targets are classes, and every metric
        of ``metrics=`` has its name. Every sample counts once, on all devices of the trainer, and the figures are the
        same on any number of them. The model is evaluated in evaluation mode; its own mode, weights and device do not
        change. ``precision="auto"`` is that of the weights.

        ``limit_batches``: only the first batches, or a part of them, as ``Limits(limit_val_batches=...)`` in a training
        (which does not count here).

        ``data``: (X, y) arrays, a data set or a loader of the framework, or a function that makes batches. Under a
        launcher (torchrun) every process calls it with the same data and gets the same figures.
        """
        fit_arguments.check_order("evaluate", model, data)
        self._check_step(model)
        source, settings = self._in_order(data, "evaluate", limit_batches)
        return self._evaluate(model, source, settings)

    @refusals.explained(too_many="predict takes a model and data, with or without targets: predict(model, X)")
    def predict(
        self, model: Any, data: Any, *, targets: bool | None = None, limit_batches: int | float | None = None
    ) -> Any:
        """The outputs of a model, one row per sample, in the order of the data, in the host's memory.

        They are PyTorch's tensors on the CPU, NumPy's arrays in JAX and TensorFlow, and MXNet's on the CPU. An output
        that is a tuple, a dict or a dataclass keeps its structure. All devices of the trainer compute, and the model
        does not change, as in :meth:`evaluate`. Under a launcher (torchrun) every process calls it with the same data;
        the first gets the outputs, the others None.

        Args:
            model: As for ``fit``.
            data: One of these; samples come in the order of the data set, also from a loader that shuffles.

                * ``X``, an array with one row per sample
                * a tuple of arrays of the same length: ``(X, y)`` (y is not used), ``(A, B)`` for a model that takes
                  two inputs, ``(A, B, y)``
                * a list of arrays: batches, one after the other. For a model that needs several inputs, these
                * a list of tuples: batches (in PyTorch give a loader, or a function that makes batches: there a list is
                  a data set, and each entry a sample)
                * a dict of arrays by name (PyTorch, JAX, Keras)
                * a data set or a loader of the framework, or a function that makes batches; each batch is an array, a
                  tuple or a dict as above
            targets: Whether the last part of a tuple is a target. Default: None, it is one unless the model needs it
                as an input. If it could be an optional input of the model, that is an error that asks for this
                argument.
            limit_batches: Only the first batches, or a part of them, as in :meth:`evaluate`. Default: None, all.
        """
        if targets not in (None, True, False):
            raise BadSettings(f"predict(targets={targets!r}): give True, False or None")
        fit_arguments.check_order("predict", model, data)
        inputs = self._inputs_of(model, targets)
        source, settings = self._in_order(self._one_data_set(data, inputs), "predict", limit_batches)
        return self._predict(model, source, settings, inputs)

    def _one_data_set(self, data: Any, inputs: Inputs) -> Any:
        """Data for prediction: of a list of arrays its samples as one array, or the inputs of a model with several."""
        if not isinstance(data, list) or not data:
            return data
        if all(map(self._is_array, data)):
            return tuple(data) if inputs.needed > 1 else self._batches_as_one(data)
        if all(isinstance(batch, (tuple, list)) and batch and all(map(self._is_array, batch)) for batch in data):
            return self._list_of_batches(data)
        return data

    def _list_of_batches(self, batches: list[Any]) -> Any:
        """A list of tuples of arrays: one data set with the samples of all."""
        counts = {len(batch) for batch in batches}
        if len(counts) > 1:
            raise BadBatch(f"the batches of the list have {', '.join(map(str, sorted(counts)))} parts: give equal ones")
        return tuple(self._batches_as_one(list(part)) for part in zip(*batches, strict=True))

    def _batches_as_one(self, batches: list[Any]) -> Any:
        shapes = {tuple(batch.shape[1:]) for batch in batches}
        if len(shapes) > 1 or not all(batch.shape for batch in batches):
            shown = ", ".join(str(tuple(batch.shape)) for batch in batches[:4])
            raise BadBatch(
                f"a list of arrays is a list of batches, and the samples of these have unequal shapes ({shown}"
                f"{', ...' if len(batches) > 4 else ''}): for one data set with targets give a tuple, (X, y); for "
                "batches of unequal shapes a loader, or a function that makes them"
            )
        return self._concatenated(batches)

    def _concatenated(self, arrays: list[Any]) -> Any:
        return np.concatenate(list(map(as_numpy, arrays)))

    @abc.abstractmethod
    def _inputs_of(self, model: Any, targets: bool | None) -> Inputs:
        """How many inputs the model takes."""

    def _in_order(self, data: Any, method: str, limit: float | None) -> tuple[Any, Settings]:
        """A source of the data that gives them in their own order, and the settings for it."""
        option = f"{method}(limit_batches)"
        options.check_part(limit, f"{method}(limit_batches={limit!r})")
        if hasattr(data, "train_dataloader") and hasattr(data, "val_dataloader"):
            data = data.val_dataloader()
        source, second = self._sources(data)
        if second is not None:
            raise BadBatch(
                f"{method} takes one data set, and two were given: give the one that is meant, {method}(model, data[1])"
            )
        loader_batches.check(source, 1, may_be_endless=isinstance(limit, int))
        alone = {"targets": False} if method == "predict" and hasattr(source, "targets") else {}
        source = dataclasses.replace(source, shuffle=False, **alone)
        settings = self._settings_for(source)
        return first_batches(source, limit, settings.batch_size, option), settings

    def _settings_for(self, source: Any) -> Settings:
        size = self.options.batch_size
        return self._settings_with(source.batch_size if size is None else size)

    @abc.abstractmethod
    def _evaluate(self, model: Any, source: Any, settings: Settings) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _predict(self, model: Any, source: Any, settings: Settings, inputs: Inputs) -> Any: ...

    # Of the trainer

    @abc.abstractmethod
    def _check_step(self, model: Any) -> None: ...

    @property
    @abc.abstractmethod
    def options(self) -> Any: ...

    _is_array: Callable[[Any], bool]

    @abc.abstractmethod
    def _sources(self, data: Any, validation: Any = None) -> tuple[Any, Any]: ...

    @abc.abstractmethod
    def _settings_with(self, size: int | None) -> Settings: ...
