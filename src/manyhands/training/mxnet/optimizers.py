"""Makes the optimizer of a job, says which of the model's parameters it updates, and saves what it remembers.

Arrays become safetensors, everything else JSON; nothing is pickled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
from mxnet import gluon

from manyhands.errors import BadSettings
from manyhands.training.checkpoints import tensors
from manyhands.training.mxnet import replicas
from manyhands.training.optimizers import Optimizers

Optimizer = mx.optimizer.Optimizer
# How an optimizer runs, not what it has learnt: the job's values count.
_COUNTED = ("rescale_grad", "aggregate_num", "begin_num_update", "num_update")
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
    if OPTIMIZERS.configured_by(model, optimizer, lr):
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
        optimizer = OPTIMIZERS.create(model, optimizer, lr)
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
        raise BadSettings(f"optimizer: replicas would drift apart with MXNet's {name}: train on one device")
    if len({device.device_id for device in devices}) < len(devices):
        raise BadSettings("devices: MXNet's optimizers know a device by its number: train on GPUs, or on CPUs alone")


def _fresh(optimizer: Any) -> Any:
    """A copy without update counts: the caller's optimizer may have been used, or may be used by another job."""
    plain = copy.copy(optimizer)
    plain.param_dict = {}
    fresh = copy.deepcopy(plain)
    fresh._all_index_update_counts = {0: {}}
    fresh._index_update_count = fresh._all_index_update_counts[0]
    fresh.num_update = fresh.begin_num_update
    fresh.allow_np_array = True  # it may have been made while MXNet was in its older mode
    return fresh


# What the optimizer remembers. Gluon's trainer has one updater per device; all of them hold the same.


def optimizer_arrays(updater: Any) -> dict[str, Any]:
    """The arrays of an updater's state, by the parameter's number and their place in its state."""
    return {name: array for index, state in updater.states.items() for name, array in _arrays_of(state, str(index))}


def _arrays_of(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays in one parameter's state, which is nothing, an array, or a tuple of such."""
    if isinstance(state, mx.nd.NDArray):
        yield name, state
    elif isinstance(state, Sequence):
        for place, part in enumerate(state):
            yield from _arrays_of(part, f"{name}.{place}")


def optimizer_numbers(trainer: gluon.Trainer) -> dict[str, Any]:
    """How often each parameter was updated, and the optimizer's own numbers, as JSON."""
    optimizer = trainer.optimizer
    counts = optimizer._all_index_update_counts.get(trainer._contexts[0].device_id, {})
    return {
        "updates": optimizer.num_update,
        "counts": {str(index): count for index, count in counts.items()},
        "numbers": {name: value for name, value in optimizer_options(trainer).items() if name != "lr"},
    }


def optimizer_options(trainer: gluon.Trainer) -> dict[str, Any]:
    """The options of the optimizer."""
    attributes = vars(trainer.optimizer)
    return {name: value for name, value in attributes.items() if name not in _COUNTED and _is_plain(value)}


def _is_plain(value: object) -> bool:
    return type(value) in (int, bool) or (type(value) is float and math.isfinite(value))


def restore_optimizer(
    trainer: gluon.Trainer, blob: bytes, numbers: Mapping[str, Any], is_kept: Callable[[str], bool]
) -> None:
    """Restore the saved state on the devices of this trainer; ``is_kept`` says which options keep the job's value."""
    optimizer, saved = trainer.optimizer, tensors.unpack(blob)
    counts = {int(index): count for index, count in numbers["counts"].items() if int(index) < len(trainer._params)}
    for name, value in numbers["numbers"].items():
        if name in vars(optimizer) and not is_kept(name):
            setattr(optimizer, name, value)
    optimizer.num_update = numbers["updates"]
    for number, (device, updater) in enumerate(zip(trainer._contexts, trainer._updaters, strict=True)):
        optimizer._all_index_update_counts[device.device_id] = dict(counts)
        for index in counts:
            # Optimizers work with MXNet's older arrays unless they say otherwise.
            weight = trainer._params[index].list_data()[number].as_nd_ndarray()
            updater.states[index] = optimizer.create_state_multi_precision(index, weight)
            updater.states_synced[index] = True
        arrays = optimizer_arrays(updater)
        tensors.refuse_others(saved, arrays, "numbers of another optimizer")
        for name, array in arrays.items():
            array[:] = saved[name].astype(array.dtype)
