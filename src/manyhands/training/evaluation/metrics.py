"""Metrics over validation data: what a user gives, and how it is computed over every sample exactly once.

The outputs and targets of all devices come together on the host, in the order of the data and in pieces that do not
depend on the number of devices. A metric object (of torchmetrics, Keras or MXNet) is updated with every piece. A plain
function gets everything at once: a mean of means over batches is not the mean, and a median has no parts at all.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from manyhands import tree
from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings, ManyhandsError, MetricFailed, type_in_words
from manyhands.training.refusals import in_words
from manyhands.training.running_sums import Totals, means_of_logged, or_none

if TYPE_CHECKING:
    from manyhands.training.learner import Take

_AT_ONCE = 512  # samples: evaluation keeps nothing for gradients
_TIMES = 8  # as many samples as a training step, where that takes few
Join = Callable[[list[Any]], Any]  # the framework's concatenation along the first axis
_RESERVED = ("loss", "acc")
_HOW = 'metrics={"mae": function} or a list: functions f(outputs, targets), or metric objects of the framework'


@dataclass(frozen=True)
class MetricCalls:
    """A metric while it is computed: an object of the framework's, or a function, by the three calls that it takes."""

    reset: Callable[[], Any]
    update: Callable[[Any, Any], Any]  # of outputs and targets
    result: Callable[[], Any]  # a number, several (a list or an array), or a dict of such


def _of_function(function: Callable[[Any, Any], Any], join: Join) -> MetricCalls:
    """A plain function of all outputs and all targets.

    Called as ``function(outputs, targets)``; one whose first parameter is called ``y_true`` gets the targets first, as
    scikit-learn and Keras have it.
    """
    outputs, targets = Pieces(join), Pieces(join)
    first, second = (targets, outputs) if _first_parameter(function) == "y_true" else (outputs, targets)

    def reset() -> None:
        outputs.clear()
        targets.clear()

    def update(some_outputs: Any, some_targets: Any) -> None:
        outputs.add(some_outputs)
        targets.add(some_targets)

    def result() -> Any:
        arguments = first.whole(), second.whole()
        reset()
        return function(*arguments)

    return MetricCalls(reset, update, result)


class Metrics:
    """All metrics of a job, by name.

    The values of a meter without a name have names of their own, ``names`` where they are known.
    """

    def __init__(self, meters: dict[str, MetricCalls] | None = None, names: Sequence[str] | None = None) -> None:
        self.meters = meters or {}
        self._last_forms = ("", "")  # outputs and targets of the last piece, in words
        self.names = tuple(self.meters if names is None else names)

    def reset(self) -> None:
        for meter in self.meters.values():
            meter.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """The next samples, on the host and in order."""
        self._last_forms = in_words(outputs), in_words(targets)
        for name, meter in self.meters.items():
            _run_metric(name or "of compile", meter.update, self._last_forms, outputs, targets)

    def values(self) -> dict[str, Any]:
        """The value of each metric, as JSON has it. A metric may have several named values."""
        values: dict[str, Any] = {}
        for name, meter in self.meters.items():
            value = _run_metric(name or "of compile", meter.result, self._last_forms)
            if isinstance(value, Mapping):
                values |= {f"{name}_{key}" if name else key: _plain(part, name) for key, part in value.items()}
            else:
                values[name] = _plain(value, name)
        return values


def metrics_of(metrics: Any, framework_meter: Callable[[Any], MetricCalls | None], join: Join) -> Metrics:
    """The metrics that are meant by a dict, a list, or a single one."""
    if metrics is None:
        return Metrics()
    if isinstance(metrics, Mapping):
        pairs = list(metrics.items())
    else:
        several = list(metrics) if isinstance(metrics, Sequence) and not isinstance(metrics, str) else [metrics]
        pairs = [(name_of(metric), metric) for metric in several]
    meters: dict[str, MetricCalls] = {}
    for name, metric in pairs:
        _check_name(name, meters)
        if (meter := framework_meter(metric)) is None:
            if isinstance(metric, type):
                raise BadSettings(f"metric {name!r} is a class: make one, {metric.__name__}(...)")
            if not callable(metric):
                raise BadSettings(f"metric {name!r} is of type {type(metric).__name__}: give {_HOW}")
            meter = _of_function(metric, join)
        meters[name] = meter
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


def _check_name(name: Any, others: Mapping[str, MetricCalls]) -> None:
    if not isinstance(name, str) or not name:
        raise BadSettings(f"the metric name {name!r} is not text: give {_HOW}")
    if name in _RESERVED:
        raise BadSettings(f"a metric cannot be called {name!r}, which the trainer computes itself: give another name")
    if name in others:
        raise BadSettings(f"two metrics are called {name!r}: give them names, metrics={{'first': ..., 'second': ...}}")


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
    """The part of a learner that computes sums over data that are not trained on."""

    @property
    def rank(self) -> int: ...

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None: ...

    def from_first(self, data: bytes) -> bytes: ...


def evaluate_with_metrics(
    learner: Evaluates, metrics: Metrics, alive: Callable[[], None]
) -> tuple[Totals | None, dict[str, Any]]:
    """Loss and accuracy, and the value of each metric, the same in every process."""
    if not metrics.meters:
        return learner.evaluate(alive), {}
    if learner.rank == 0:
        metrics.reset()
    totals = learner.evaluate(alive, metrics.update)
    values = metrics.values() if learner.rank == 0 and totals is not None else {}
    return totals, json.loads(learner.from_first(json.dumps(values).encode()))


def evaluate_to_dict(learner: Evaluates, metrics: Metrics) -> dict[str, Any]:
    """The result of ``Trainer.evaluate`` for a model that is on its devices."""
    totals, values = evaluate_with_metrics(learner, metrics, ignore_progress)
    assert totals is not None
    return named_results(totals, values)


def named_results(totals: Totals, values: dict[str, Any]) -> dict[str, Any]:
    """The result of ``Trainer.evaluate``: without an accuracy if there are no classes."""
    accuracy = {"acc": or_none(totals.accuracy)} if totals.counted else {}
    logged = {name: or_none(value) for name, value in means_of_logged(totals).items()}
    return {**logged, "loss": or_none(totals.loss), **accuracy, **values}


def collect_outputs(predict: Callable[[Callable[[], None], Take], Any], join: Join) -> Any:
    """All outputs as one tree; None where this process gets none. ``predict`` is a framework's own."""
    outputs = Pieces(join)
    predict(ignore_progress, lambda piece, _: outputs.add(piece))
    return outputs.whole()


def ignore_progress() -> None:
    """Does nothing: no one watches whether this process is alive."""


# Outputs on their way to the host
#
# A model answers batch by batch, with an array or with a tuple, a dict or a dataclass of arrays. Put together, the
# pieces have the same structure, and each array has one row per sample of the data set, in its order:
#
# {"scores": (4, 10), "box": (4, 2)}  +  {"scores": (3, 10), "box": (3, 2)}  =  {"scores": (7, 10), "box": (7, 2)}


def batch_size_for(batch_size: int) -> int:
    """How many samples to evaluate at once, where training processes this many."""
    return max(batch_size, min(_AT_ONCE, _TIMES * batch_size))


def whole_size(data: Any, batch_size: int) -> int:
    """The samples of a batch that a loss is to see as a whole: the data's own size, or that of training."""
    of_data: int | None = data.batch_size
    return batch_size if of_data is None else of_data


class PendingOutputs:
    """What is still on its way to the host, handed on in order; the newest ``ahead`` are not waited for."""

    def __init__(self, deliver: Callable[[Any], None] | None, ahead: int = 1) -> None:
        self._hand_on, self._ahead = deliver, ahead
        self._coming: deque[Any] = deque()

    def add(self, coming: Any) -> None:
        if self._hand_on is not None:
            self._coming.append(coming)
            self._hand_over(self._ahead)

    def finish(self) -> None:
        self._hand_over(0)

    def _hand_over(self, ahead: int) -> None:
        while self._hand_on is not None and len(self._coming) > ahead:
            self._hand_on(self._coming.popleft())


class Pieces:
    """Trees of arrays, kept until all of them are there."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._columns: list[list[Any]] = []
        self._structure: Any = None  # of a piece; None: there is none yet

    def clear(self) -> None:
        self._structure = None

    def add(self, piece: Any) -> None:
        leaves, structure = tree.flatten(piece)
        if self._structure is None:
            self._structure, self._columns = structure, [[] for _ in leaves]
        elif structure != self._structure:
            raise BadBatch(
                f"the model's outputs have another structure for some batches ({structure} after {self._structure}): "
                "they can be put together only if each batch gives the same"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.append(leaf)

    def whole(self) -> Any:
        """All pieces as one tree; None where none has come."""
        if self._structure is None:
            return None
        return self._structure.unflatten(
            column[0] if len(column) == 1 else self._join(column) for column in self._columns
        )


def check_rows(outputs: Any, samples: int) -> None:
    """Refuse outputs that are not one row per sample: they could not be put together in the order of the data."""
    leaves, structure = tree.flatten(outputs)
    for leaf, path in zip(leaves, tree.paths(structure, "output"), strict=True):
        shape = getattr(leaf, "shape", None)
        if shape is None or not len(shape) or int(shape[0]) != samples:
            shown = f"{type_in_words(leaf)}" if shape is None else f"an array of shape {tuple(shape)}"
            raise BadBatch(
                f"the model answers {count_of(samples, 'sample')} with {shown} ({path}): predictions and metrics need "
                "arrays with one row per sample. Let the model return only those in evaluation mode"
            )
