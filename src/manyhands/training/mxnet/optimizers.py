"""Makes the optimizer of a job, and says which of the model's parameters it updates."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from manyhands.errors import BadSettings
from manyhands.training.mxnet import replicas
from manyhands.training.optimizers import Optimizers

Optimizer = mx.optimizer.Optimizer
# These keep a number of their own beside the state of each parameter, or draw random ones: replicas would drift apart.
_FOR_ONE_DEVICE = (mx.optimizer.Nadam, mx.optimizer.LBSGD, mx.optimizer.SGLD)


class AdamW(mx.optimizer.Adam):  # type: ignore[misc]
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), which MXNet 1.9 does not have."""

    wd: float

    def __init__(self, learning_rate: float = 0.001, wd: float = 0.01, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, wd=wd, **options)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        weight *= 1 - self._get_lr(index) * self._get_wd(index)
        decay: float = self.wd
        self.wd = 0.0
        try:
            super().update(index, weight, grad, state)
        finally:
            self.wd = decay


def _by_name() -> dict[str, Any]:
    """MXNet's optimizers, those that the user has registered with it, and AdamW."""
    known = {"adamw": AdamW, **Optimizer.opt_registry}
    return {name: kind for name, kind in sorted(known.items()) if name not in ("test", "ccsgd")}


OPTIMIZERS = Optimizers(
    where="mx.optimizer",
    example="mx.optimizer.Adam",
    finished=(Optimizer, gluon.Trainer),
    by_name=_by_name,
    sgd=mx.optimizer.SGD,
    rate="learning_rate",
    of_parameters=False,
)


def trainer_for(model: Any, optimizer: Any, lr: float | None, *, scheduled: bool, devices: Sequence[mx.Context]) -> Any:
    """Gluon's trainer for a model that is on its devices.

    ``optimizer``: an optimizer, its name, a function of the rate that makes one, a ``gluon.Trainer`` of some of the
    model's parameters; None is what the model's ``configure_optimizers`` says, or plain SGD. The job has a copy of it.
    """
    if optimizer is None and OPTIMIZERS.configured_by(model, lr):
        optimizer = model.configure_optimizers()
    trained, scale = replicas.distinct(model), None
    if isinstance(optimizer, gluon.Trainer):
        model_parameters = set(map(id, trained))
        trained = list(optimizer._params)
        if any(id(parameter) not in model_parameters for parameter in trained):
            raise BadSettings("the optimizer has parameters of another model: make it with this model's parameters")
        # Its own steps divide by the number of samples; here the loss has been divided already.
        optimizer, scale = optimizer.optimizer, optimizer._scale
    if not isinstance(optimizer, Optimizer):
        optimizer = OPTIMIZERS.created(model, optimizer, lr)
    _check_fits(optimizer, scheduled=scheduled, devices=devices)
    # Without the statistics: at its first step the trainer sends the first device's of all that it has to the others.
    trained = [parameter for parameter in trained if parameter.grad_req != "null"]
    fresh = _fresh(optimizer)
    fresh.rescale_grad = optimizer.rescale_grad if scale is None else scale
    # On the kvstore an update would be made once and sent to all, but gradients could not be clipped before it.
    return gluon.Trainer(trained, fresh, kvstore="device", update_on_kvstore=False)


def _check_fits(optimizer: Any, *, scheduled: bool, devices: Sequence[mx.Context]) -> None:
    name = type(optimizer).__name__
    if scheduled and optimizer.lr_scheduler is not None:
        raise BadSettings(f"schedule: the optimizer {name} has its own lr_scheduler: give one of the two")
    if len(devices) > 1 and isinstance(optimizer, _FOR_ONE_DEVICE):
        raise BadSettings(
            f"optimizer: MXNet's {name} keeps numbers that all devices share or draws random ones, so replicas would "
            "drift apart: train on one device, or with another optimizer"
        )
    if len({device.device_id for device in devices}) < len(devices):
        raise BadSettings(
            "devices: MXNet's optimizers count their updates by the number of a device, and a CPU and a GPU of one "
            "number would be the same to them: train on GPUs alone, or on CPUs alone"
        )


def _fresh(optimizer: Any) -> Any:
    """A copy without update counts: the caller's optimizer may have been used, or may be used by another job."""
    plain = copy.copy(optimizer)
    plain.param_dict = {}
    fresh = copy.deepcopy(plain)
    fresh._all_index_update_counts = {0: {}}
    fresh._index_update_count = fresh._all_index_update_counts[0]
    fresh.num_update = fresh.begin_num_update
    fresh.allow_np_array = True  # it may have been made while MXNet was in its older mode
    create_state = fresh.create_state
    fresh.create_state = lambda index, weight: _in_dtype(create_state(index, weight), weight.dtype)
    return fresh


def _in_dtype(state: Any, dtype: Any) -> Any:
    """An optimizer's state in the weight's float64: some of MXNet's (RMSProp, AdaGrad) make it in float32 always."""
    if isinstance(state, (tuple, list)):
        return type(state)(_in_dtype(part, dtype) for part in state)
    if isinstance(state, mx.nd.NDArray) and np.dtype(dtype) == np.float64 and state.dtype != dtype:
        return state.astype(dtype)
    return state
