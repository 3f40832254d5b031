"""The adapter of MXNet 1.9: its contexts, and how arrays and models get to them (:mod:`manyhands.backends.protocol`).

A device is a context. ``mx.cpu(1)`` is a separate place with separate workers, so virtual devices are ``mx.cpu(i)``
and the host is the first of them. Both ``mx.nd`` and ``mx.np`` arrays are tensors.

MXNet's engine is asynchronous and keeps the order: reading an array waits for it, and writing to an array waits for its
readers. So nothing here has to synchronise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import mxnet as mx

from manyhands import machine
from manyhands.backends.protocol import Arrival, Capabilities
from manyhands.device import Device, DeviceRecord, Memory
from manyhands.errors import BadBatch, NotATensor, type_in_words

name = "mxnet"
CAPABILITIES = Capabilities(
    host_beside_virtual=False,
    virtual_can_end=True,
    virtual_as_cuda=False,
    moves_models=True,
    # Without CUDA a pinned context is ordinary memory.
    pins_memory=mx.runtime.Features().is_enabled("CUDA"),
    plans_lanes=False,
)

_CPU = mx.cpu(0)
_virtual_count = 0


# Devices


def cpu() -> mx.Context:
    return _CPU


def gpu(index: int) -> mx.Context:
    return mx.cpu(index) if _virtual_count else mx.gpu(index)


def num_gpus() -> int:
    return _virtual_count or mx.context.num_gpus()


def is_device(value: object) -> TypeGuard[mx.Context]:
    return isinstance(value, mx.Context)


def exists(device: mx.Context) -> bool:
    if device.device_type == "gpu":
        return neutral(device).index < num_gpus()
    return not _virtual_count or neutral(device).index < _virtual_count


def neutral(device: mx.Context) -> Device:
    if device.device_type == "gpu":
        return Device("gpu", device.device_id)
    # The number of a pinned or shared context is not the number of a device.
    index = device.device_id if device.device_type == "cpu" else 0
    return Device("virtual", index) if _virtual_count or index else Device("cpu")


def describe(device: mx.Context) -> DeviceRecord:
    if device.device_type != "gpu":
        return machine.describe_cpu(neutral(device))
    free, total = mx.context.gpu_memory_info(device.device_id)
    uuid = machine.visible_uuid(device.device_id)
    facts = next((gpu for gpu in machine.gpus() if gpu.uuid == uuid), None)
    return DeviceRecord(
        device=neutral(device),
        name=facts.name if facts else str(device),
        uuid=uuid,
        memory=Memory(total=total, free=free),
        capability=facts.capability if facts else None,
    )


def virtual_devices(count: int, as_cuda: bool | None = None) -> None:
    global _virtual_count
    _virtual_count = count


def end_virtual_devices() -> None:
    global _virtual_count
    _virtual_count = 0


def virtual_count() -> int:
    return _virtual_count


def virtual_device(index: int) -> mx.Context | None:
    return mx.cpu(index) if index < _virtual_count else None


# Tensors


def is_tensor(value: object) -> TypeGuard[mx.nd.NDArray]:
    return isinstance(value, mx.nd.NDArray)


def device_of(tensor: mx.nd.NDArray) -> mx.Context:
    return tensor.ctx


def is_on(tensor: mx.nd.NDArray, device: mx.Context) -> bool:
    """Pinned and shared memory is the host's; ordinary memory is not pinned."""
    here = tensor.ctx
    return here == device or (device == _CPU and here.device_type not in ("cpu", "gpu"))


def all_on(values: Sequence[Any], device: mx.Context) -> bool:
    # MXNet's own `ctx` makes two numbers and a Context for every array: most of the cost of a large tree.
    if not all(issubclass(kind, mx.nd.NDArray) for kind in set(map(type, values))):
        return False
    ask, wanted = mx.base._LIB.MXNDArrayGetContext, (device.device_typeid, device.device_id)
    kind, index = ctypes.c_int(), ctypes.c_int()
    to_kind, to_index = ctypes.byref(kind), ctypes.byref(index)
    for value in values:
        failed = ask(value.handle, to_kind, to_index)
        if (failed or (kind.value, index.value) != wanted) and not is_on(value, device):
            return False
    return True


def move(tensor: mx.nd.NDArray, device: mx.Context) -> mx.nd.NDArray:
    moved = copy(tensor, device)
    moved.wait_to_read()
    return moved


def start_move(tensor: mx.nd.NDArray, device: mx.Context) -> Arrival[mx.nd.NDArray]:
    """MXNet can wait for an array but not ask for it, so ``ready()`` is False until ``result()`` was called."""
    arriving = copy(tensor, device)

    def finish() -> mx.nd.NDArray:
        if device.device_type != "gpu":
            arriving.wait_to_read()
        return arriving

    return Arrival(finish, lambda: False)


def copy(tensor: mx.nd.NDArray, device: mx.Context) -> mx.nd.NDArray:
    # Without np_shape MXNet takes a length of 0 for "unknown", and a shape without lengths for "none".
    with mx.util.np_shape(True):
        return tensor.copyto(device)


def rows(tensor: mx.nd.NDArray) -> int | None:
    return tensor.shape[0] if tensor.shape else None


def cut(tensor: mx.nd.NDArray, start: int, stop: int) -> mx.nd.NDArray:
    if tensor.stype == "row_sparse":
        raise BadBatch("MXNet cannot cut a row_sparse array: split x.tostype('default'), or one of stype 'csr'")
    with mx.util.np_shape(True):
        return tensor[start:stop]


def join(tensors: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    with mx.util.np_shape(True):
        if isinstance(tensors[0], mx.np.ndarray):
            return mx.np.concatenate(list(tensors), axis=0)
        return mx.nd.concat(*tensors, dim=0)


def synchronize(device: mx.Context | None) -> None:
    """Waits for all devices: MXNet cannot wait for one."""
    mx.nd.waitall()


# Models


def is_model(value: object) -> TypeGuard[mx.gluon.Block]:
    return isinstance(value, mx.gluon.Block)


def model_tensors(model: mx.gluon.Block) -> Iterator[tuple[str, mx.nd.NDArray]]:
    """The array of each parameter, or its arrays on several contexts. A parameter without values has none."""
    for path, parameter in model.collect_params().items():
        try:
            arrays = parameter.list_data()
        except RuntimeError:  # not initialized, or deferred until the first batch tells its shape
            continue
        for array in arrays:
            yield (path if len(arrays) == 1 else f"{path} ({neutral(array.ctx)})"), array


def move_model(model: mx.gluon.Block, device: mx.Context) -> mx.gluon.Block:
    """Deferred parameters will be created there; replicas become one, their mean, as in MXNet."""
    parameters = model.collect_params()
    try:
        elsewhere = [parameter for parameter in parameters.values() if parameter.list_ctx() != [device]]
    except RuntimeError:
        raise NotATensor(
            f"{type_in_words(model)} whose parameters are not initialized cannot be moved: there is nothing to move "
            f"yet. Write net.initialize(ctx={'mh.cpu()' if device == _CPU else f'mh.gpu({device.device_id})'})"
        ) from None
    for parameter in elsewhere:
        parameter.reset_ctx(device)
    return model


# Measuring


def random(shape: tuple[int, ...], dtype: str, device: mx.Context) -> mx.nd.NDArray:
    return mx.nd.random.normal(shape=shape, ctx=device).astype(dtype)


def matmul(left: mx.nd.NDArray, right: mx.nd.NDArray) -> mx.nd.NDArray:
    return mx.nd.dot(left, right)


def pin(tensor: mx.nd.NDArray) -> mx.nd.NDArray:
    return move(tensor, mx.cpu_pinned(0))
