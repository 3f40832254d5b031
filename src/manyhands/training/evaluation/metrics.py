"""Metrics over validation data: what a user gives, and how it is computed over every sample exactly once.

The outputs and targets of all devices come together on the host, in the order of the data and in pieces that do not
depend on the number of devices. A metric object (of torchmetrics, Keras or MXNet) is updated with every piece. A plain
function gets everything at once: a mean of means over batches is not the mean, and a median has no parts at all.
"""

from __future__ import annotations

import inspect
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from manyhands import tree
from manyhands.errors import BadSettings, ManyhandsError, MetricFailed, type_in_words
from manyhands.training.evaluation.pieces import Join, Pieces
from manyhands.training.running_sums import Figures, means_of_logged, or_none

if TYPE_CHECKING:
    from manyhands.training.learner import Take

_RESERVED = ("loss", "acc")
_HOW = 'metrics={"mae": function} or a list: functions f(outputs, targets), or metric objects of the framework'


class Meter(Protocol):
    """One metric while it is computed."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any) -> None: ...

    def result(self) -> Any:
        """A number, several (a list or an array), or a dict of such."""


@dataclass(frozen=True)
class MetricCalls:
    """A metric object of a framework, by the three methods that it is computed with."""

    reset: Callable[[], Any]
    update: Callable[[Any, Any], Any]  # of outputs and targets
    result: Callable[[], Any]


class OfFunction:
    """A plain function of all outputs and all targets.

    Called as ``function(outputs, targets)``; one whose first parameter is called ``y_true`` gets the targets first, as
    scikit-learn and Keras have it.
    """

    def __init__(self, function: Callable[[Any, Any], Any], join: Join) -> None:
        self.function, self._join = function, join
        self.targets_first = _first_parameter(function) == "y_true"
        self.reset()

    def reset(self) -> None:
        self._outputs, self._targets = Pieces(self._join), Pieces(self._join)

    def update(self, outputs: Any, targets: Any) -> None:
        self._outputs.add(outputs)
        self._targets.add(targets)

    def result(self) -> Any:
        outputs, targets = self._outputs.whole(), self._targets.whole()
        self.reset()
        return self.function(targets, outputs) if self.targets_first else self.function(outputs, targets)


class Metrics:
    """All metrics of a job, by name. Sent to other processes, it is unpacked only in the one that computes them.

    The values of a meter without a name have names of their own, ``names`` where they are known.
    """

    def __init__(self, meters: dict[str, Meter] | None = None, names: Sequence[str] | None = None) -> None:
        self._meters, self._packed = meters or {}, b""
        self._last_forms = ("", "")  # outputs and targets of the last piece, in words
        self.names = tuple(self._meters if names is None else names)

    @property
    def meters(self) -> dict[str, Meter]:
        if self._packed:
            self._meters, self._packed = pickle.loads(self._packed), b""
        return self._meters

    def __bool__(self) -> bool:
        return bool(self._packed or self._meters)

    def __getstate__(self) -> tuple[bytes, tuple[str, ...]]:
        import cloudpickle

        return bytes(cloudpickle.dumps(self.meters)) if self else b"", self.names

    def __setstate__(self, state: tuple[bytes, tuple[str, ...]]) -> None:
        self._meters, (self._packed, self.names), self._last_forms = {}, state, ("", "")

    def reset(self) -> None:
        for meter in self.meters.values():
            meter.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """The next samples, on the host and in order."""
        self._last_forms = _in_words(outputs), _in_words(targets)
        for name, meter in self.meters.items():
            _run_metric(name or "of compile", meter.update, self._last_forms, outputs, targets)

    def figures(self) -> dict[str, Any]:
        """The value of each metric, as JSON has it. A metric with several named values gives as many figures."""
        values: dict[str, Any] = {}
        for name, meter in self.meters.items():
            value = _run_metric(name or "of compile", meter.result, self._last_forms)
            if isinstance(value, Mapping):
                values |= {f"{name}_{key}" if name else key: _plain(part, name) for key, part in value.items()}
            else:
                values[name] = _plain(value, name)
        return values


def metrics_of(metrics: Any, framework_meter: Callable[[Any], Meter | None], join: Join) -> Metrics:
    """The metrics that are meant by a dict, a list, or a single one.

    ``framework_meter`` makes a meter of the framework's own metric objects; None for anything else.
    """
    if metrics is None:
        return Metrics()
    if isinstance(metrics, Mapping):
        pairs = list(metrics.items())
    else:
        several = list(metrics) if isinstance(metrics, Sequence) and not isinstance(metrics, str) else [metrics]
        pairs = [(name_of(metric), metric) for metric in several]
    meters: dict[str, Meter] = {}
    for name, metric in pairs:
        _check_name(name, meters)
        meters[name] = framework_meter(metric) or _of_function(name, metric, join)
    return Metrics(meters)


def name_of(metric: Any) -> str:
    """What a metric of a list is called: its own name, that of the function, or that of the class.

    >>> class F1Score: ...
    >>> name_of(F1Score())
    'f1_score'
    """
    if isinstance(metric, str):
        return metric.lower()
    name = getattr(metric, "name", None)
    if isinstance(name, str):
        return name
    if hasattr(metric, "func"):  # a functools.partial
        return name_of(metric.func)
    name = getattr(metric, "__name__", type(metric).__name__).strip("<>")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _check_name(name: Any, others: Mapping[str, Meter]) -> None:
    if not isinstance(name, str) or not name:
        raise BadSettings(f"the metric name {name!r} is not text: give {_HOW}")
    if name in _RESERVED:
        raise BadSettings(f"a metric cannot be called {name!r}, which the trainer computes itself: give another name")
    if name in others:
        raise BadSettings(f"two metrics are called {name!r}: give them names, metrics={{'first': ..., 'second': ...}}")


def _of_function(name: str, metric: Any, join: Join) -> Meter:
    if isinstance(metric, type):
        raise BadSettings(f"metric {name!r} is a class: make one, {metric.__name__}(...)")
    if not callable(metric):
        raise BadSettings(f"metric {name!r} is of type {type(metric).__name__}: give {_HOW}")
    return OfFunction(metric, join)


def _first_parameter(function: Any) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return None


def _run_metric(name: str, work: Callable[..., Any], shown: tuple[str, str], *arguments: Any) -> Any:
    """Run a metric's code; an error names the metric. ``shown``: its outputs and targets, in words."""
    try:
        return work(*arguments)
    except ManyhandsError:
        raise
    except Exception as error:
        raise MetricFailed(
            f"metric {name!r} failed with {type(error).__name__}: {error}. It was given outputs ({shown[0]}) and "
            f"targets ({shown[1]}), on the host"
        ) from error


def _in_words(value: Any) -> str:
    """The arguments of a metric in words: shapes, with names if there are any."""
    if value is None:
        return "None"
    leaves, structure = tree.flatten(value)
    shapes = [str(tuple(leaf.shape)) if hasattr(leaf, "shape") else type(leaf).__name__ for leaf in leaves]
    if isinstance(value, Mapping):
        paths = tree.paths(structure, "")
        return f"a dict: {', '.join(f'{path} {shape}' for path, shape in zip(paths, shapes, strict=True))}"
    return shapes[0] if len(shapes) == 1 else f"{type_in_words(value)} of {', '.join(shapes)}"


def _plain(value: Any, name: str) -> Any:
    """A number of any framework, or several, as JSON; NaN and infinity become None."""
    for method in ("asnumpy", "numpy"):
        if hasattr(value, method) and not hasattr(value, "tolist"):
            value = getattr(value, method)()
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        values = [_plain(entry, name) for entry in value]
        return values[0] if len(values) == 1 else values
    if isinstance(value, (bool, int, float)):
        return float(value) if math.isfinite(value) else None
    raise BadSettings(f"metric {name!r} gave {type_in_words(value)}: return a number, or an array of numbers")


# All metrics of a model


class Evaluates(Protocol):
    """The part of a learner that computes figures of data that are not trained on."""

    @property
    def rank(self) -> int: ...

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Figures | None: ...

    def from_first(self, data: bytes) -> bytes: ...


def evaluate_with_metrics(
    learner: Evaluates, metrics: Metrics, alive: Callable[[], None]
) -> tuple[Figures | None, dict[str, Any]]:
    """Loss and accuracy, and the value of each metric, the same in every process.

    The first process computes the metrics: it has the outputs and targets of all devices.
    """
    if not metrics:
        return learner.evaluate(alive), {}
    if learner.rank == 0:
        metrics.reset()
    figures = learner.evaluate(alive, metrics.update)
    values = metrics.figures() if learner.rank == 0 and figures is not None else {}
    return figures, json.loads(learner.from_first(json.dumps(values).encode()))


def evaluate_to_dict(learner: Evaluates, metrics: Metrics) -> dict[str, Any]:
    """The result of ``Trainer.evaluate`` for a model that is on its devices."""
    figures, values = evaluate_with_metrics(learner, metrics, ignore_progress)
    assert figures is not None
    return named_results(figures, values)


def named_results(figures: Figures, values: dict[str, Any]) -> dict[str, Any]:
    """The result of ``Trainer.evaluate``: without an accuracy if there are no classes."""
    accuracy = {"acc": or_none(figures.accuracy)} if figures.counted else {}
    logged = {name: or_none(value) for name, value in means_of_logged(figures).items()}
    return {**logged, "loss": or_none(figures.loss), **accuracy, **values}


def collect_outputs(predict: Callable[[Callable[[], None], Take], Any], join: Join) -> Any:
    """All outputs as one tree; None where this process gets none. ``predict`` is a framework's own."""
    outputs = Pieces(join)
    predict(ignore_progress, lambda piece, _: outputs.add(piece))
    return outputs.whole()


def ignore_progress() -> None:
    """Does nothing: no one watches whether this process is alive."""
