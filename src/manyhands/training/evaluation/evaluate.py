"""The figures of a model over a data set: its loss, its accuracy and the metrics of the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from manyhands.training.evaluation.metrics import Metrics
from manyhands.training.evaluation.pieces import Join, Pieces
from manyhands.training.learner import Take
from manyhands.training.running_sums import Figures, or_none


class Evaluates(Protocol):
    """The part of a learner that computes figures of data that are not trained on."""

    @property
    def rank(self) -> int: ...

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Figures | None: ...

    def from_first(self, data: bytes) -> bytes: ...


def figures_of(
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


def evaluated(learner: Evaluates, metrics: Metrics) -> dict[str, Any]:
    """The result of ``Trainer.evaluate`` for a model that is on its devices."""
    figures, values = figures_of(learner, metrics, nothing)
    assert figures is not None
    return as_dict(figures, values)


def as_dict(figures: Figures, values: dict[str, Any]) -> dict[str, Any]:
    """The result of ``Trainer.evaluate``: without an accuracy if there are no classes."""
    accuracy = {"acc": or_none(figures.accuracy)} if figures.counted else {}
    return {"loss": or_none(figures.loss), **accuracy, **values}


def predicted(predict: Callable[[Callable[[], None], Take], Any], join: Join) -> Any:
    """All outputs as one tree; None where this process gets none. ``predict`` is a framework's own."""
    outputs = Pieces(join)
    predict(nothing, lambda piece, _: outputs.add(piece))
    return outputs.whole()


def nothing() -> None:
    """Does nothing: no one watches whether this process is alive."""
