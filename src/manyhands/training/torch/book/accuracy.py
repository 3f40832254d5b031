"""How many predictions are right: see :mod:`manyhands.training.book.accuracy`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.backends.torch import devices as _backend
from manyhands.training.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.training.torch.state.module_state import evaluating


class _Accuracy(Accuracy[torch.device]):
    models = (nn.Module,)
    model_name = "torch.nn.Module"

    def count(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        classes = y_hat.argmax(dim=1) if y_hat.dim() > 1 and y_hat.shape[1] > 1 else y_hat
        check_shapes(y_hat, classes, y)
        return (classes.reshape(y.shape).to(y.dtype) == y).sum()

    def homes(self, net: Any) -> list[torch.device]:
        return list(dict.fromkeys(p.device for p in net.parameters())) if isinstance(net, nn.Module) else []

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[torch.device | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        with torch.no_grad(), evaluating(net):
            yield [self._replica(net, device) if replicate else net for device in devices]

    def _replica(self, net: nn.Module, device: torch.device | None) -> nn.Module:
        """The net itself where it is on the device, else a copy of it there."""
        assert device is not None
        if all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
            return net
        return self.place.to_leaf(copy.deepcopy(net), device)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus
