"""``Trainer.evaluate`` and ``Trainer.predict``: a model on all devices of a trainer, without training it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings
from manyhands.training import options, refusals
from manyhands.training.data import loader_batches, roles
from manyhands.training.data.loader_batches import first_batches
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import is_array
from manyhands.training.evaluation.metrics import MetricCalls, Metrics, collect_outputs, evaluate_to_dict, metrics_of
from manyhands.training.options import Settings


class Evaluating(abc.ABC):
    """The part of a trainer that computes with a model and does not change it."""

    @refusals.explain_mistakes(too_many="evaluate takes a model and data with targets: evaluate(model, (X, y))")
    def evaluate(self, model: Any, data: Any, *, limit_batches: int | float | None = None) -> dict[str, Any]:
        """The metrics of a model over data with targets: ``{"loss": 0.31, "acc": 0.89, "f1": 0.88}``.

        ``loss`` is the trainer's (or the model's own), ``acc`` is there where the targets are classes, and every metric
        of ``metrics=`` has its name. Every sample counts once, on all devices of the trainer, and the metrics are the
        same on any number of them. The model is evaluated in evaluation mode; its own mode, weights and device do not
        change. ``precision="auto"`` is that of the weights.

        ``limit_batches``: only the first batches, or a part of them, as ``Limits(limit_val_batches=...)`` in a training
        (which does not count here).

        ``data``: (X, y) arrays, a data set or a loader of the framework, or a function that makes batches. Under a
        launcher (torchrun) every process calls it with the same data and gets the same metrics.
        """
        roles.check_order("evaluate", model, data)
        self._check_step(model)
        source, settings = self._in_order(data, "evaluate", limit_batches)
        return self._evaluate(model, source, settings)

    @refusals.explain_mistakes(too_many="predict takes a model and data, with or without targets: predict(model, X)")
    def predict(
        self, model: Any, data: Any, *, targets: bool | None = None, limit_batches: int | float | None = None
    ) -> Any:
        """The outputs of a model, one row per sample, in the order of the data, in the host's memory.

        They are PyTorch's tensors on the CPU, NumPy's arrays in JAX and TensorFlow, and MXNet's on the CPU. An output
        that is a tuple, a dict or a dataclass keeps its structure. All devices of the trainer compute, and the model
        does not change, as in :meth:`evaluate`. Under a launcher (torchrun) every process calls it with the same data;
        the first gets the outputs, the others None.

        In PyTorch a model's own ``predict_step(batch)``, or ``predict_step(batch, batch_idx)``, is called instead of
        ``forward`` if it has one. It gets whole batches, labels included, and returns one row per sample.

        Args:
            model: As for ``fit``.
            data: One of these; samples come in the order of the data set, also from a loader that shuffles.

                * ``X``, an array with one row per sample
                * a tuple of arrays of the same length: ``(X, y)`` (y is not used), ``(A, B)`` for a model that takes
                  two inputs, ``(A, B, y)``
                * a list of arrays: the inputs of a model that needs several
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
        roles.check_order("predict", model, data)
        inputs = self._inputs_of(model, targets)
        if self._may_be_batches(data, inputs):
            raise BadBatch(
                f"a list of {count_of(len(data), 'entry', 'entries')} may be batches, or one data set: for one "
                "data set give a tuple, (X, y), for batches a function that makes them, lambda: iter(batches)"
            )
        data = tuple(data) if isinstance(data, list) and all(map(self._is_array, data)) else data
        source, settings = self._in_order(data, "predict", limit_batches)
        return self._predict(model, source, settings, inputs)

    def _may_be_batches(self, data: Any, inputs: ModelInputs) -> bool:
        """Whether it is a list of arrays, and the model needs one input; or a list of tuples of arrays with rows."""
        if not isinstance(data, list) or not data:
            return False
        if all(map(self._is_array, data)):
            return inputs.needed < 2
        if not all(isinstance(entry, tuple) and entry and all(map(self._is_array, entry)) for entry in data):
            return False
        return all(part.ndim and len(part) == len(entry[0]) for entry in data for part in entry if entry[0].ndim)

    @abc.abstractmethod
    def _inputs_of(self, model: Any, targets: bool | None) -> ModelInputs:
        """How many inputs the model takes."""

    def _in_order(self, data: Any, method: str, limit: float | None) -> tuple[Any, Settings]:
        """A source of the data that gives them in their own order, and the settings for it."""
        option = f"{method}(limit_batches)"
        options.check_part(limit, f"{method}(limit_batches={limit!r})")
        if hasattr(data, "train_dataloader") and hasattr(data, "val_dataloader"):
            data = data.val_dataloader()
        source, second = self._sources(data)
        if second is not None:
            raise BadBatch(f"{method} takes one data set, and two were given: write {method}(model, data[1])")
        loader_batches.check(source, 1, may_be_endless=isinstance(limit, int))
        alone = {"targets": False} if method == "predict" and hasattr(source, "targets") else {}
        source = dataclasses.replace(source, shuffle=False, **alone)
        size = self.options.batch_size
        settings = self._settings_with(source.batch_size if size is None else size)
        return first_batches(source, limit, settings.batch_size, option), settings

    def _evaluate(self, model: Any, source: Any, settings: Settings) -> dict[str, Any]:
        with self._evaluation_of(model, source, settings, tests=True) as evaluation:
            return evaluate_to_dict(evaluation, self._metrics(model))

    def _predict(self, model: Any, source: Any, settings: Settings, inputs: ModelInputs) -> Any:
        with self._evaluation_of(model, source, settings, tests=False) as evaluation:
            return collect_outputs(functools.partial(evaluation.predict, inputs), self._join_arrays)

    def _evaluation_of(
        self, model: Any, source: Any, settings: Settings, *, tests: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """The model on all devices; ``tests``: the loss is computed, and not only the model's outputs."""
        raise NotImplementedError  # PyTorch's may be in other processes

    # Metrics

    def _metrics(self, model: Any = None) -> Metrics:
        """The metrics of a job, those of a compiled model included."""
        return metrics_of(self.options.metrics, self._own_meter, self._join_arrays)

    def _own_meter(self, metric: Any) -> MetricCalls | None:
        """A meter of a metric of the framework's own kind; None for any other."""
        return None

    @staticmethod
    def _join_arrays(arrays: list[Any]) -> Any:
        """Arrays on the host as one, along the first axis."""
        return np.concatenate(arrays)

    # The user's model and data

    def _check_step(self, model: Any) -> None:
        """Refuse ``loss=`` for a model with its own training_step, which computes its loss itself."""
        step = getattr(type(model), "training_step", None)
        if self.options.loss is None or step is None or step.__module__.startswith("manyhands."):
            return
        name = type(model).__name__
        raise BadSettings(f"loss= and training_step of {name}, which computes its loss itself: leave out one of them")

    def _sources(self, data: Any, validation: Any = None) -> tuple[Any, Any]:
        """The training data and the validation data (or None), as the framework's sources."""
        data = self._source(data, shuffle=True) if self._is_one_data_set(data) else data
        validation = self._source(validation, shuffle=False) if self._is_one_data_set(validation) else validation
        train, test = roles.two_parts(data, validation, self._is_array)
        return self._source(train, shuffle=True), None if test is None else self._source(test, shuffle=False)

    def _is_one_data_set(self, data: Any) -> bool:
        """Whether nested data, ``({"a": A, "b": B}, y)`` or ``((A, B), y)``, are one data set and no pair of two."""
        return False

    @abc.abstractmethod
    def _source(self, data: Any, *, shuffle: bool) -> Any:
        """The framework's source for the user's data."""

    @staticmethod
    def _is_array(part: Any) -> bool:
        """Whether it is an array that the framework takes."""
        return is_array(part)

    # Of the trainer

    @property
    @abc.abstractmethod
    def options(self) -> Any: ...

    @abc.abstractmethod
    def _settings_with(self, size: int | None) -> Settings: ...
