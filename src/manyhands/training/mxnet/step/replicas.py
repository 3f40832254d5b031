"""A model with a replica on each device, and its way back to the caller's model.

Gluon keeps a copy of every parameter on each device that it was initialised on. Its own ``reset_ctx`` makes one copy of
several by taking their mean, which rounds (three equal numbers of float32 need not have themselves as their mean): so
here the first replica's values are kept and put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import gluon

from manyhands.training.mxnet import modes


def parameters(model: Any) -> dict[str, gluon.Parameter]:
    """All parameters by names that depend on nothing but the model's structure."""
    parameters: dict[str, gluon.Parameter] = model._collect_params_with_prefix()
    return parameters


def distinct(model: Any) -> list[gluon.Parameter]:
    """Each parameter once, also one that stands in two layers."""
    return list({id(parameter): parameter for parameter in parameters(model).values()}.values())


def layers(block: Any) -> Iterator[Any]:
    """The block and all blocks in it."""
    yield block
    for child in block._children.values():
        yield from layers(child)


def _own_blocks(block: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Blocks of the user's own classes, each by its path."""
    if not type(block).__module__.startswith(("mxnet.", "manyhands.")):
        yield path, block
    for name, child in block._children.items():
        yield from _own_blocks(child, f"{path}.{name}")


def plain_arrays(model: Any) -> dict[str, Any]:
    """Arrays that are plain attributes of the user's blocks: they are not parameters, so all replicas share them."""
    return {
        f"{path}.{name}": value
        for path, block in _own_blocks(model, type(model).__name__)
        for name, value in vars(block).items()
        if isinstance(value, mx.nd.NDArray)
    }


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
    return any(isinstance(layer, kinds) and not layer._kwargs["use_global_stats"] for layer in layers(model))


@contextlib.contextmanager
def on(model: Any, devices: Sequence[mx.Context], dtype: str | None = None) -> Iterator[None]:
    """Within it the model is on these devices, in this dtype; afterwards on its own devices, in its own dtype.

    It keeps the values of the first device.
    """
    homes = [(parameter, list(parameter.list_ctx()), parameter.dtype) for parameter in distinct(model)]
    with modes.numpy_like(modes.of_model(model)):
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
