"""TensorFlow's adapter: its devices, and how tensors get to them (:mod:`manyhands.backends.protocol`).

A device is a :class:`TensorFlowDevice`: the name that ``tf.device`` takes, which is also a scope. Virtual devices are
TensorFlow's logical CPUs, so the host and the first of them are one place.

TensorFlow runs an operation where the scope says, not where its inputs are, and copies them there silently. So
everything here that computes does so in the scope of its input's device.

A variable (``tf.Variable``, ``keras.Variable``) counts as a tensor: it has a device, and stays there for life. To move
or to copy it gives a tensor with its value. A composite (ragged, sparse, slices, an extension type) counts as a tensor,
too: it is moved and copied part by part; only ragged ones can be split.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeGuard

import tensorflow as tf

from manyhands import machine
from manyhands.backends.protocol import Arrival, Capabilities
from manyhands.device import Device, DeviceRecord, too_late_for_virtual_devices
from manyhands.errors import (
    BadBatch,
    BadDevice,
    DeviceError,
    NoSuchDevice,
    NotATensor,
    SeveralDevices,
    VirtualDevicesError,
    type_in_words,
)

name = "tensorflow"
CAPABILITIES = Capabilities(
    host_beside_virtual=False,
    virtual_can_end=False,
    virtual_as_cuda=False,
    moves_models=False,
    pins_memory=False,
    plans_lanes=False,
)

_NAME = re.compile(r"/device:(CPU|GPU):(\d+)\Z")
_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.experimental.ExtensionType)
_TENSORS = (tf.Tensor, tf.Variable, *_COMPOSITES)
_EAGER = tf.__internal__.EagerTensor  # a tensor with values; checked first, because most are
_virtual_count = 0

# tf.identity shares memory on one device; DeepCopy never does, but lacks a gradient.
_duplicate = tf.custom_gradient(lambda tensor: (tf.raw_ops.DeepCopy(x=tensor), lambda upstream: upstream))
_open_scopes = threading.local()  # those that a thread has entered and not left, by device


class TensorFlowDevice(str):
    """A device's name, ``/device:GPU:1``, for ``tf.device`` and strategies; and a scope: ``with mh.gpu(1):``.

    Unlike ``tf.device`` the scope refuses a device that is not there, where TensorFlow would use another one.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        kind, index = _kind_and_index(self)
        there = len(_logical(kind))
        if index >= there:
            raise NoSuchDevice(
                f"there is no {neutral(self)}: TensorFlow has {there} of that kind and would silently compute "
                f"elsewhere. Write: with mh.try_gpu({index}):"
            )
        scope = tf.device(self)
        scope.__enter__()
        vars(_open_scopes).setdefault(self, []).append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        vars(_open_scopes)[self].pop().__exit__(*exception)


# Devices


def cpu() -> TensorFlowDevice:
    return TensorFlowDevice("/device:CPU:0")


def gpu(index: int) -> TensorFlowDevice:
    return TensorFlowDevice(f"/device:{'CPU' if _virtual_count else 'GPU'}:{index}")


def num_gpus() -> int:
    return _virtual_count or len(_logical("GPU"))


def is_device(value: object) -> TypeGuard[TensorFlowDevice]:
    """Ours, and TensorFlow's own names: ``/device:GPU:1``, or what ``x.device`` says."""
    return isinstance(value, TensorFlowDevice) or (isinstance(value, str) and _NAME.search(value) is not None)


def exists(device: TensorFlowDevice) -> bool:
    kind, index = _kind_and_index(device)
    return index < (_virtual_count if kind == "CPU" and _virtual_count else len(_logical(kind)))


def neutral(device: TensorFlowDevice) -> Device:
    kind, index = _kind_and_index(device)
    if kind == "GPU":
        return Device("gpu", index)
    return Device("virtual", index) if _virtual_count or index or len(_logical("CPU")) > 1 else Device("cpu")


def describe(device: TensorFlowDevice) -> DeviceRecord:
    kind, index = _kind_and_index(device)
    if kind == "CPU":
        return machine.describe_cpu(neutral(device))
    physical = _logical("GPU")[index]
    details = tf.config.experimental.get_device_details(physical)
    uuid = machine.visible_uuid(int(physical.name.rpartition(":")[2]))
    facts = next((gpu for gpu in machine.gpus() if gpu.uuid == uuid), None)
    return DeviceRecord(
        device=neutral(device),
        name=details.get("device_name") or (facts.name if facts else str(device)),
        uuid=uuid,
        # TensorFlow itself reports only what its own tensors use.
        memory=facts.memory if facts else None,
        capability="{}.{}".format(*details["compute_capability"]) if "compute_capability" in details else None,
    )


def virtual_devices(count: int, as_cuda: bool | None = None) -> None:
    """Logical CPUs. GPUs are hidden from TensorFlow, which would put new tensors there by default."""
    global _virtual_count
    host = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(host) or ()) != count:
        try:
            tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * count)
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError:
            raise too_late_for_virtual_devices("TensorFlow", "the first tensor", count) from None
    _virtual_count = count


def end_virtual_devices() -> None:
    raise VirtualDevicesError("TensorFlow keeps its devices as long as the process lives: start another process")


def virtual_count() -> int:
    return _virtual_count


def virtual_device(index: int) -> TensorFlowDevice | None:
    have = _virtual_count or len(_logical("CPU"))
    return TensorFlowDevice(f"/device:CPU:{index}") if index < have and (_virtual_count or have > 1) else None


# Tensors


def is_tensor(value: object) -> TypeGuard[Any]:
    return isinstance(value, _TENSORS) or _is_keras(value, "Variable")


def device_of(tensor: Any) -> TensorFlowDevice:
    """Where TensorFlow says it is; of int32 on a GPU it keeps the memory on the host, and says GPU."""
    if isinstance(tensor, tf.Tensor):
        _refuse_symbolic(tensor)
        return _known_device(tensor.device)
    if _is_composite(tensor):
        return _device_of_parts(tensor)
    return _known_device(tensor.device if isinstance(tensor, tf.Variable) else tensor.value.device)


def is_on(tensor: Any, device: TensorFlowDevice) -> bool:
    if isinstance(tensor, _EAGER):
        return _known_device(tensor.device) == _known_device(device)
    if _is_composite(tensor):
        return all(is_on(part, device) for part in _parts(tensor))
    return device_of(tensor) == _known_device(device)


def all_on(values: Sequence[Any], device: TensorFlowDevice) -> bool:
    # One check for each type, and one for each device name.
    if all(issubclass(kind, _EAGER) for kind in set(map(type, values))):
        return all(
            _known_device(full_name) == _known_device(device) for full_name in {value.device for value in values}
        )
    return all(is_tensor(value) and is_on(value, device) for value in values)


def move(tensor: Any, device: TensorFlowDevice) -> Any:
    with tf.device(device):
        if _is_composite(tensor):
            return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)
        return tf.identity(tensor)


def start_move(tensor: Any, device: TensorFlowDevice) -> Arrival[Any]:
    # TensorFlow itself orders every use of a tensor after the copy that makes it.
    moved = move(tensor, device)
    return Arrival(lambda: moved, lambda: True)


def copy(tensor: Any, device: TensorFlowDevice) -> Any:
    if _is_composite(tensor):
        return tf.nest.map_structure(lambda part: copy(part, device), tensor, expand_composites=True)
    with tf.device(device):
        duplicate = _duplicate(tf.identity(tensor))
    # A type without a kernel for this on the device was duplicated on the host: the way back is a copy too.
    return duplicate if is_on(duplicate, device) else move(duplicate, device)


def rows(tensor: Any) -> int | None:
    _refuse_symbolic(tensor)
    if _is_composite(tensor) and not isinstance(tensor, tf.RaggedTensor):
        cure = "make it dense first (tf.sparse.to_dense(x), tf.convert_to_tensor(x))"
        raise BadBatch(f"{type_in_words(tensor)} cannot be split into shards or joined from them: {cure}")
    return int(tensor.shape[0]) if len(tensor.shape) else None


def cut(tensor: Any, start: int, stop: int) -> Any:
    with tf.device(device_of(tensor)):
        return tensor[start:stop]


def join(tensors: Sequence[Any]) -> Any:
    with tf.device(device_of(tensors[0])):
        return tf.concat(list(tensors), axis=0)


def synchronize(device: TensorFlowDevice | None) -> None:
    """Waits for all devices: TensorFlow's queue of asynchronous work, where errors surface, is one for all."""
    tf.test.experimental.sync_devices()


# Models


def is_model(value: object) -> TypeGuard[Any]:
    return isinstance(value, tf.Module) or _is_keras(value, "Layer")


def model_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The weights, trainable or not; of a mirrored one each replica's."""
    seen: Counter[str] = Counter()
    for path, variable in _variables(model):
        seen[path] += 1
        # Keras gives two layers of one name the same path.
        unique = path if seen[path] == 1 else f"{path} ({seen[path]})"
        if isinstance(variable, tf.distribute.DistributedValues):
            yield from ((f"{unique} (replica {i})", replica) for i, replica in enumerate(variable.values))
        else:
            yield unique, variable


def move_model(model: Any, device: TensorFlowDevice) -> Any:
    # A model that Keras has not built yet has no misplaced variables, but will have.
    if getattr(model, "built", True) and all(is_on(variable, device) for _, variable in model_tensors(model)):
        return model
    place = "mh.cpu()" if device == cpu() else f"mh.gpu({neutral(device).index})"
    raise NotATensor(
        f"{type_in_words(model)} cannot be moved to {neutral(device)}: TensorFlow's variables stay where they are "
        f"made. Make and build it there:\n    with {place}:\n        net = ...; net.build(...)\n"
        "and carry weights over with net.set_weights(other.get_weights())"
    )


# Measuring


def random(shape: tuple[int, ...], dtype: str, device: TensorFlowDevice) -> Any:
    with tf.device(device):
        return tf.random.normal(shape, dtype=tf.dtypes.as_dtype(dtype))


def matmul(left: Any, right: Any) -> Any:
    with tf.device(device_of(left)):
        return tf.linalg.matmul(left, right)


def pin(tensor: Any) -> Any:
    raise DeviceError("TensorFlow manages page-locked memory itself: there is none to ask for")


# How names, variables and models are read


def _logical(kind: str) -> list[Any]:
    """For each logical device the physical one behind it. Unlike TensorFlow's list this starts no runtime."""
    return [
        physical
        for physical in tf.config.get_visible_devices(kind)
        for _ in tf.config.get_logical_device_configuration(physical) or (None,)
    ]


def _kind_and_index(device: str) -> tuple[str, int]:
    match = _NAME.search(device)
    if match is None:
        raise BadDevice(f"{str(device)!r} is neither a CPU nor a GPU of TensorFlow: manyhands knows no other devices")
    return match[1], int(match[2])


@functools.cache
def _known_device(full_name: str) -> TensorFlowDevice:
    """The device in ``/job:localhost/replica:0/task:0/device:CPU:1``."""
    return TensorFlowDevice("/device:{}:{}".format(*_kind_and_index(full_name)))


def _is_composite(value: object) -> bool:
    return isinstance(value, _COMPOSITES)


def _parts(composite: Any) -> list[Any]:
    """The tensors that a ragged, sparse or other composite one is made of."""
    return list(tf.nest.flatten(composite, expand_composites=True))


def _device_of_parts(composite: Any) -> TensorFlowDevice:
    devices = list(dict.fromkeys(device_of(part) for part in _parts(composite)))
    if len(devices) != 1:
        names = ", ".join(str(neutral(device)) for device in devices)
        where = f"{type_in_words(composite)} is not on one device, its parts are on {names or 'none'}"
        raise SeveralDevices(f"{where}: mh.to(x, device) puts all of it on one")
    return devices[0]


def _refuse_symbolic(tensor: Any) -> None:
    if isinstance(tensor, tf.Tensor) and tf.is_symbolic_tensor(tensor):
        raise NotATensor(
            "inside tf.function a value has no device yet: it stands for a value that is computed later. Place the "
            "whole function (with mh.gpu(0): step(x)), and move its arguments and its results"
        )


def _is_keras(value: object, kind: str) -> bool:
    """Whether it is Keras's ``Layer`` or ``Variable``. Asks Keras only where the program has imported it."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, getattr(keras, kind, ())) and keras.config.backend() == "tensorflow"


def _variables(model: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(model, tf.Module):
        yield from ((weight.path, weight.value) for weight in model.weights)
        return
    # A plain tf.Module may hold Keras layers, which TensorFlow does not count as modules.
    pairs = model._flatten(predicate=lambda x: isinstance(x, tf.Variable) or _is_keras(x, "Layer"), with_path=True)
    for steps, leaf in pairs:
        path = ".".join(map(str, steps))
        if isinstance(leaf, tf.Variable):
            yield path, leaf
        else:
            yield from ((f"{path}.{inner}", variable) for inner, variable in _variables(leaf))
