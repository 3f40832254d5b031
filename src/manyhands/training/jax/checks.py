"""What is looked at before a job begins: a few samples through the model say more than an error later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from numpy.typing import NDArray

from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.jax.book.module import cross_entropy
from manyhands.training.jax.objective import Objective, Supervised
from manyhands.training.jax.skeleton import Skeleton, evaluating

_FEW = 2


class Labels:
    """Refuses labels that the model has no output for: JAX would compute something with them. Looked at on the host."""

    def __init__(self, model: nnx.Module, skeleton: Skeleton, prepare: Callable[[Any], Any]) -> None:
        self._model, self._skeleton, self._prepare = model, skeleton, prepare
        self._classes: int | None = None
        self._asked = False

    def check(self, rows: tuple[NDArray[Any], ...]) -> None:
        """Look at the labels of those samples (inputs, labels)."""
        if len(rows) < 2 or not len(rows[-1]):
            return
        if not self._asked:
            self._asked, self._classes = True, self._outputs(tuple(part[:_FEW] for part in rows))
        if self._classes is not None:
            ClassLabels(self._classes)(rows)

    def _outputs(self, few: tuple[NDArray[Any], ...]) -> int | None:
        """How many classes the model tells apart, by the shape of its answer; None if it answers something else."""

        def answer(numbers: Any, batch: Any) -> Any:
            return evaluating(self._skeleton.model(numbers))(*self._prepare(batch)[:-1])

        try:
            shape = jax.eval_shape(answer, self._skeleton.numbers(self._model), few).shape
        except Exception:  # the first step will say it, with all that belongs to it
            return None
        return int(shape[1]) if len(shape) == 2 else None


def labels_of(
    model: nnx.Module, skeleton: Skeleton, objective: Objective, train: Source, test: Source | None
) -> Labels | None:
    """What looks at labels, where the loss is cross-entropy of classes; those of arrays are looked at now."""
    if not isinstance(objective, Supervised) or objective.loss_of(model) is not cross_entropy:
        return None
    look = Labels(model, skeleton, train.prepare if isinstance(train, Arrays) else lambda batch: batch)
    for source in (train, test):
        if isinstance(source, Arrays):
            look.check(source.arrays)
    return look
