"""``on_nan="continue"``: a batch whose loss is NaN leaves no trace in weights, statistics or optimizer state.

Only a device knows whether the loss is NaN, and the host must not wait for it. So everything that the step may change
is copied, the step is made in any case, and then each device chooses for each array: the new value, or the copy. The
number of updates of a parameter is counted in Python, and is not restored: optimizers that use it (Adam, in its first
steps) count the skipped batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
from mxnet import gluon

from manyhands.training.mxnet import state
from manyhands.training.mxnet.modes import numpy_like
from manyhands.training.mxnet.step import replicas
from manyhands.training.mxnet.step.average import Average


class StepUndo:
    """Copies of everything that a step changes, to undo the step if its loss is NaN."""

    def __init__(self, model: Any, trainer: gluon.Trainer) -> None:
        self._model, self._trainer = model, trainer
        self._copies: list[Any] = []
        self._average: Average | None = None

    def keep(self, average: Average | None = None) -> None:
        """Call before a step; ``average``: an average of the weights, which the step changes too."""
        self._average = average
        state.make_optimizer_states(self._trainer)  # what did not exist could not be put back
        self._copies = [array.copy() for array in self._arrays()]

    def put_back(self, good: Any) -> None:
        """Call after the step: ``good`` says, on a device, whether to keep it."""
        with numpy_like():
            on_device = {device: good.as_in_ctx(device) for device in self._trainer._contexts}
            for array, before in zip(self._arrays(), self._copies, strict=True):
                chosen = mx.np.where(on_device[array.context], array.as_np_ndarray(), before.as_np_ndarray())
                array.as_np_ndarray()[:] = chosen

    def _arrays(self) -> Iterator[Any]:
        for parameter in [*self._trainer._params, *replicas.statistics(self._model)]:
            yield from parameter.list_data()
        if self._average is not None:
            yield from self._average.arrays()
        for updater in self._trainer._updaters:
            for index, of_parameter in updater.states.items():
                for _, array in state.arrays_of(of_parameter, str(index)):
                    yield array
