"""How many predictions are right: see :mod:`manyhands.training.book.accuracy`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from manyhands.backends.mxnet import devices as _backend
from manyhands.training.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.training.mxnet import modes
from manyhands.training.mxnet.step import replicas


class _Accuracy(Accuracy[mx.Context]):
    models = (mx.gluon.Block,)
    model_name = "gluon.Block"

    def count(self, y_hat: Any, y: Any) -> Any:
        """Of length 1, for MXNet's older mode has no scalars."""
        with modes.numpy_like(), autograd.pause():
            scores, labels = y_hat.as_np_ndarray(), y.as_np_ndarray()
            classes = scores.argmax(axis=1) if scores.ndim > 1 and scores.shape[1] > 1 else scores
            check_shapes(y_hat, classes, y)
            # Sums of booleans are bytes on some devices: counted in floating point, exact far beyond any data set.
            return (classes.reshape(labels.shape).astype(labels.dtype) == labels).astype("float64").sum().reshape((1,))

    def read(self, count: Any) -> int:
        return int(count.asnumpy()[0])

    def homes(self, net: Any) -> list[mx.Context]:
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if _backend.is_model(net) else []
        return list(dict.fromkeys(tensor.ctx for tensor in tensors))

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[mx.Context | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        """A block answers on the device of its input, wherever it has a replica."""
        mode: contextlib.AbstractContextManager[None]
        if replicate:
            mode = replicas.on(net, devices)
        elif _backend.is_model(net):
            mode = modes.numpy_like(modes.of_model(net))
        else:
            mode = contextlib.nullcontext()
        with mode:
            yield [net] * len(devices)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus


def count_correct(output: Any, target: Any, *, are_classes: bool = False) -> Any | None:
    """How many rows of class scores are largest at the target; None if these are not class scores.

    Floating-point targets are not, unless they are known to be classes (``are_classes``).
    """
    if not (_backend.is_tensor(output) and _backend.is_tensor(target)):
        return None
    if len(output.shape) != 2 or len(target.shape) != 1:
        return None
    return _functions.count(output, target) if are_classes or "int" in str(target.dtype) else None
