"""``mh.predict`` in MXNet: see :mod:`manyhands.training.predict_by_fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from manyhands.training.checkpoints import tensors
from manyhands.training.mxnet import checks, command, modes, state
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.predict_by_fit import PredictByFit
from manyhands.training.predict_by_fit import resized as resized


@contextlib.contextmanager
def _trial(model: Any, inputs: Any) -> Iterator[Any]:
    """The model itself: Gluon's cannot be copied. It gets its weights back."""
    with modes.numpy_like(modes.of_model(model)):
        checks.make_parameters(model, command.arrays((inputs, inputs)), 0)
    before = tensors.pack(state.model_tensors(model))
    try:
        yield model
    finally:
        state.restore_model(model, before)


def _gradient_bytes(model: Any) -> int:
    trained = [parameter for parameter in model.collect_params().values() if parameter.grad_req != "null"]
    return sum(parameter.data(parameter.list_ctx()[0]).asnumpy().nbytes for parameter in trained)


predict = PredictByFit("mxnet", Trainer, _trial, _gradient_bytes, command.model, (1, 28, 28))
example, has_gpu = predict.example, predict.has_gpu
