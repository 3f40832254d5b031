"""A model with a replica on each device, its way back to the caller's model, and the values of its parameters.

Gluon keeps a copy of every parameter on each device that it was initialised on. Its own ``reset_ctx`` makes one copy of
several by taking their mean, which rounds (three equal numbers of float32 need not have themselves as their mean): so
here the first replica's values are kept and put back.

MXNet has two kinds of arrays: ``mx.np`` after ``npx.set_np()``, ``mx.nd`` otherwise. manyhands sets neither: a model
needs the mode in which its parameters were created, and arrays of that kind. So training switches to the model's mode,
whatever the program's mode is, and back again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.nn.conv_layers import _Conv
from numpy.typing import NDArray

from manyhands.backends.mxnet.parallel import blocks_of
from manyhands.training.checkpoints import tensors


def parameters(model: Any) -> dict[str, gluon.Parameter]:
    """All parameters by names that depend on nothing but the model's structure."""
    parameters: dict[str, gluon.Parameter] = model._collect_params_with_prefix()
    return parameters


def distinct(model: Any) -> list[gluon.Parameter]:
    """Each parameter once, also one that stands in two layers."""
    return list({id(parameter): parameter for parameter in parameters(model).values()}.values())


def statistics(model: Any) -> list[gluon.Parameter]:
    """Running statistics, as those of BatchNorm: parameters without gradients."""
    return [
        parameter
        for parameter in distinct(model)
        if not parameter._differentiable and not isinstance(parameter, gluon.Constant)
    ]


def normalises(model: Any) -> bool:
    """Whether a layer takes statistics over its shard: of a single sample there are none."""
    kinds = gluon.nn.basic_layers._BatchNorm
    return any(isinstance(layer, kinds) and not layer._kwargs["use_global_stats"] for layer in blocks_of(model))


@contextlib.contextmanager
def on(model: Any, devices: Sequence[mx.Context], dtype: str | None = None) -> Iterator[None]:
    """Within it the model is on these devices, in this dtype; afterwards on its own devices, in its own dtype."""
    homes = [(parameter, list(parameter.list_ctx()), parameter.dtype) for parameter in distinct(model)]
    with numpy_like(of_model(model)):
        try:
            if dtype is not None:
                model.cast(dtype)
            for parameter, _, _ in homes:
                place(parameter, devices)
            yield
        finally:
            if dtype is not None and homes:
                model.cast(homes[0][2])
            for parameter, home, before in homes:
                place(parameter, home)
                if parameter.dtype != before:
                    parameter.cast(before)


def place(parameter: gluon.Parameter, devices: Sequence[mx.Context]) -> None:
    """Copies of the first replica on all of these devices, and nowhere else."""
    if parameter.list_ctx() == list(devices):
        return
    if parameter._data is None:  # its shape is not known yet
        parameter.reset_ctx(list(devices))
        return
    first = parameter.list_data()[0].copy()
    parameter.reset_ctx(list(devices))
    for array in parameter.list_data():
        first.copyto(array)


def spread(values: Sequence[gluon.Parameter], source: int) -> None:
    """Copy the values of one device to all others."""
    for parameter in values:
        arrays = parameter.list_data()
        for number, array in enumerate(arrays):
            if number != source:
                arrays[source].copyto(array)


# The values of the parameters


def model_tensors(model: Any) -> dict[str, NDArray[Any]]:
    """All that a model holds, as the first of its devices has it; waits."""
    return {name: parameter.list_data()[0].asnumpy() for name, parameter in parameters(model).items()}


def restore_model(model: Any, blob: bytes) -> None:
    """Put weights into a model; a checkpoint of another model is refused, with the differences named."""
    by_name = parameters(model)
    arrays = {name: parameter.list_data()[0] for name, parameter in by_name.items()}
    for name, values in tensors.arrays_for(blob, arrays, "weights of another model").items():
        set_values(by_name[name], values)


def initialise(net: Any, seed: int | None = None, *, only: Sequence[gluon.Parameter] | None = None) -> Any:
    """Draw new parameters for all dense and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases uniform by the number of inputs, as in PyTorch. NumPy draws them on the host, so
    that a seed gives the same net on every device, and without touching the random state of the program. Parameters of
    other layers that have no values yet get those that their layer wants. ``only``: of these parameters.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    wanted = None if only is None else set(map(id, only))
    drawn = [layer for layer in blocks_of(net) if isinstance(layer, (nn.Dense, _Conv))]
    here = {id(parameter) for layer in drawn for parameter in (layer.weight, layer.bias)}
    for name, parameter in parameters(net).items():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(mx.init.Zero() if id(parameter) in here else None)
        if parameter._deferred_init:
            raise ValueError(f"parameter {name!r} has no shape yet: call the net once on a batch first")
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


# MXNet's two kinds of arrays


# What MXNet has no arrays of, and what holds the same numbers.
_WIDER = {"int16": "int64", "uint16": "int64", "uint32": "int64", "uint64": "int64"}


@contextlib.contextmanager
def numpy_like(on: bool = True) -> Iterator[None]:
    """Within it MXNet has NumPy's semantics, or its older ones."""
    shape, array = mx.util.np_shape(on), mx.util.np_array(on)
    # MXNet refuses NumPy's arrays without NumPy's shapes, also for a moment.
    first, second = (shape, array) if on else (array, shape)
    with first, second:
        yield


def of_model(model: Any) -> bool:
    """Whether a model is one of NumPy's mode; one that has no values yet is of the program's."""
    for parameter in model.collect_params().values():
        if parameter._data is not None:
            return isinstance(parameter._data[0], mx.np.ndarray)
    return bool(mx.util.is_np_array())


def native(array: NDArray[Any], device: mx.Context | None = None) -> Any:
    """An array of NumPy's as MXNet's, of the kind that the mode asks for, in the same dtype."""
    array = np.asarray(array)
    kind = _WIDER.get(array.dtype.name, array.dtype.name)
    module = mx.np if mx.util.is_np_array() else mx.nd
    return module.array(array, dtype=kind, ctx=device or mx.current_context())
