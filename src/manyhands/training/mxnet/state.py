"""A job's state as bytes and JSON. Arrays become safetensors, everything else JSON; nothing is pickled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.nn.conv_layers import _Conv
from numpy.typing import NDArray

from manyhands.amounts import counted
from manyhands.errors import WrongCheckpoint
from manyhands.training.checkpoints import tensors
from manyhands.training.mxnet import replicas

# How an optimizer runs, not what it has learnt: the job's values count.
_COUNTED = ("rescale_grad", "aggregate_num", "begin_num_update", "num_update")
_NOT_SAVED = ("lr", *_COUNTED)


def model_tensors(model: Any) -> dict[str, NDArray[Any]]:
    """All that a model holds, as the first of its devices has it; waits."""
    return {name: parameter.list_data()[0].asnumpy() for name, parameter in replicas.parameters(model).items()}


def restore_model(model: Any, blob: bytes) -> None:
    """Put weights into a model; a checkpoint of another model is refused, with the differences named."""
    parameters = replicas.parameters(model)
    arrays = {name: parameter.list_data()[0] for name, parameter in parameters.items()}
    for name, values in tensors.fitting(blob, arrays, "weights of another model").items():
        set_values(parameters[name], values)


# The optimizer. Gluon's trainer has one updater per device; all of them hold the same.


def optimizer_tensors(trainer: gluon.Trainer) -> dict[str, NDArray[Any]]:
    """The arrays of an optimizer's state by the parameter's number and their place in it; waits."""
    states = trainer._updaters[0].states
    return {name: array.asnumpy() for index, state in states.items() for name, array in arrays_of(state, str(index))}


def optimizer_numbers(trainer: gluon.Trainer) -> dict[str, Any]:
    """How often each parameter was updated, and the optimizer's own numbers, as JSON."""
    optimizer = trainer.optimizer
    counts = optimizer._all_index_update_counts.get(trainer._contexts[0].device_id, {})
    options = {name: value for name, value in vars(optimizer).items() if name not in _NOT_SAVED and _is_plain(value)}
    return {
        "updates": optimizer.num_update,
        "counts": {str(index): count for index, count in counts.items()},
        "numbers": options,
    }


def optimizer_options(trainer: gluon.Trainer) -> dict[str, Any]:
    """The options of the optimizer."""
    attributes = vars(trainer.optimizer)
    return {name: value for name, value in attributes.items() if name not in _COUNTED and _is_plain(value)}


def restore_optimizer(
    trainer: gluon.Trainer, blob: bytes, numbers: Mapping[str, Any], is_kept: Callable[[str], bool]
) -> None:
    """Restore the saved state on the devices of this trainer; ``is_kept`` says which options keep the job's value."""
    optimizer, saved = trainer.optimizer, tensors.unpack(blob)
    counts = {int(index): count for index, count in numbers["counts"].items()}
    if counts and max(counts) >= len(trainer._params):
        raise WrongCheckpoint(
            f"the optimizer's state is of {counted(max(counts) + 1, 'parameter')}, the model has "
            f"{len(trainer._params)}. "
            "Give the model and the optimizer that the run had, or start a new run"
        )
    for name, value in numbers["numbers"].items():
        if name in vars(optimizer) and not is_kept(name):
            setattr(optimizer, name, value)
    optimizer.num_update = numbers["updates"]
    for number, (device, updater) in enumerate(zip(trainer._contexts, trainer._updaters, strict=True)):
        optimizer._all_index_update_counts[device.device_id] = dict(counts)
        for index in counts:
            _make_state(trainer, updater, index, number)
            _fill(updater.states[index], str(index), saved)


def _make_state(trainer: gluon.Trainer, updater: Any, index: int, number: int) -> None:
    # Optimizers work with MXNet's older arrays unless they say otherwise.
    weight = trainer._params[index].list_data()[number].as_nd_ndarray()
    updater.states[index] = trainer.optimizer.create_state_multi_precision(index, weight)
    updater.states_synced[index] = True


def _fill(state: Any, name: str, saved: Mapping[str, NDArray[Any]]) -> None:
    for path, array in arrays_of(state, name):
        if path not in saved or saved[path].shape != tuple(array.shape):
            raise WrongCheckpoint(
                f"the optimizer's state {path} is not in the checkpoint, or has another shape. "
                "Give the model and the optimizer that the run had, or start a new run"
            )
        array[:] = saved[path].astype(array.dtype)


def arrays_of(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays in one parameter's state, which is nothing, an array, or a tuple of such."""
    if isinstance(state, mx.nd.NDArray):
        yield name, state
    elif isinstance(state, Sequence):
        for place, part in enumerate(state):
            yield from arrays_of(part, f"{name}.{place}")


def _is_plain(value: object) -> bool:
    return type(value) in (int, bool) or (type(value) is float and math.isfinite(value))


# First values


def initialise(net: Any, seed: int | None = None, *, only: Sequence[gluon.Parameter] | None = None) -> Any:
    """Draw new parameters for all dense and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases uniform by the number of inputs, as in PyTorch. NumPy draws them on the host, so
    that a seed gives the same net on every device, and without touching the random state of the program. Parameters of
    other layers that have no values yet get those that their layer wants. ``only``: of these parameters.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    wanted = None if only is None else set(map(id, only))
    drawn = [layer for layer in replicas.layers(net) if isinstance(layer, (nn.Dense, _Conv))]
    here = {id(parameter) for layer in drawn for parameter in (layer.weight, layer.bias)}
    for name, parameter in replicas.parameters(net).items():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(mx.init.Zero() if id(parameter) in here else None)
        if parameter._deferred_init:
            raise ValueError(
                f"parameter {name!r} has no shape yet, so nothing can be drawn for it: "
                "call the net once on a batch first, or use a layer that is given its input size"
            )
    for layer in drawn:
        shape = layer.weight.shape
        fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
        bounds = [(layer.weight, math.sqrt(6 / (fan_in + fan_out)))]
        if layer.bias is not None:
            bounds.append((layer.bias, 1 / math.sqrt(max(fan_in, 1))))
        for parameter, bound in bounds:
            values = generator.uniform(-bound, bound, parameter.shape)
            if wanted is None or id(parameter) in wanted:
                set_values(parameter, values)
    return net


def set_values(parameter: gluon.Parameter, values: np.ndarray[Any, Any]) -> None:
    """The same values on every device where the parameter is."""
    for array in parameter.list_data():
        module = mx.np if isinstance(array, mx.np.ndarray) else mx.nd
        # From array to array: MXNet refuses to write NumPy's into weights that a forward pass has laid out for oneDNN.
        module.array(np.asarray(values), dtype=array.dtype, ctx=array.ctx).copyto(array)
