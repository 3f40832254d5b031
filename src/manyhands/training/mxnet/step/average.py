"""An exponential moving average of the weights, on every device: see :class:`manyhands.training.callbacks.weights.EMA`.

All devices have the same weights after each step, and so the same average; none of them waits for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from manyhands.training.callbacks.callback import Averaging
from manyhands.training.checkpoints import tensors
from manyhands.training.mxnet import state
from manyhands.training.mxnet.modes import numpy_like
from manyhands.training.mxnet.step import replicas


class Average:
    """The average of all parameters that have gradients, and on request of running statistics."""

    def __init__(self, model: Any, averaging: Averaging) -> None:
        self._model, self._averaging = model, averaging
        self.restart()

    def restart(self) -> None:
        """Begin with the weights as they are."""
        statistics = {id(statistic) for statistic in replicas.statistics(self._model)}
        self._parameters = [
            parameter
            for parameter in replicas.distinct(self._model)
            if id(parameter) not in statistics or self._averages_statistic(parameter)
        ]
        self._average = [[array.copy() for array in parameter.list_data()] for parameter in self._parameters]

    def _averages_statistic(self, statistic: Any) -> bool:
        return self._averaging.buffers and "float" in np.dtype(statistic.dtype).name

    def share_statistics(self, source: int) -> None:
        """Give every device the averages of statistics that one of them has."""
        statistics = {id(statistic) for statistic in replicas.statistics(self._model)}
        for parameter, arrays in zip(self._parameters, self._average, strict=True):
            for number, array in enumerate(arrays):
                if id(parameter) in statistics and number != source:
                    arrays[source].copyto(array)

    def arrays(self) -> Iterator[Any]:
        for of_parameter in self._average:
            yield from of_parameter

    def update(self) -> None:
        """A step was issued; nothing waits."""
        with numpy_like():
            for average, weight in self._pairs():
                mean = average.as_np_ndarray()
                mean[:] = mean + (weight.as_np_ndarray() - mean) * (1 - self._averaging.decay)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The average and the weights of each parameter on each device."""
        for of_parameter, parameter in zip(self._average, self._parameters, strict=True):
            yield from zip(of_parameter, parameter.list_data(), strict=True)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model's weights are the average."""
        weights = [weight.copy() for _, weight in self._pairs()]
        self.put_into_model()
        try:
            yield
        finally:
            for before, (_, weight) in zip(weights, self._pairs(), strict=True):
                before.copyto(weight)

    def put_into_model(self) -> None:
        for average, weight in self._pairs():
            average.copyto(weight)

    def saved(self) -> bytes:
        """The average under the names of the weights, with the model's other values; waits."""
        with self.in_model():
            return tensors.pack(state.model_tensors(self._model))

    def restore(self, blobs: Mapping[str, bytes]) -> bool:
        """Continue from a checkpoint; False if it has no average: then this one begins with the weights."""
        self.restart()
        if "average" not in blobs:
            return False
        parameters = replicas.parameters(self._model)
        values = tensors.fitting(
            blobs["average"], {n: parameter.list_data()[0] for n, parameter in parameters.items()}, "an average"
        )
        by_parameter: dict[int, NDArray[Any]] = {id(parameters[name]): value for name, value in values.items()}
        for parameter, of_parameter in zip(self._parameters, self._average, strict=True):
            for array in of_parameter:
                module = mx.np if isinstance(array, mx.np.ndarray) else mx.nd
                module.array(by_parameter[id(parameter)], dtype=array.dtype, ctx=array.ctx).copyto(array)
        return True
