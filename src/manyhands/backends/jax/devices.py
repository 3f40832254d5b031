"""JAX's adapter: its devices, and how tensors and models get to them (:mod:`manyhands.backends.protocol`).

A GPU is a device of JAX's ``gpu`` platform. Virtual devices are JAX's own numbered CPUs, so virtual device 0
and the host are one place. Models are Flax NNX objects, and whatever else is registered as a pytree with
JAX only; plain trees of arrays (Linen's variables, Optax's states) need nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp

from manyhands import machine
from manyhands.backends.protocol import Arrival, Capabilities
from manyhands.device import Device, DeviceRecord, Memory, no_such_device, too_late_for_virtual_devices
from manyhands.errors import BadDevice, NoSuchDevice, NotATensor, SeveralDevices, VirtualDevicesError

name = "jax"
CAPABILITIES = Capabilities(
    host_beside_virtual=False,
    virtual_can_end=False,
    virtual_as_cuda=False,
    moves_models=True,
    pins_memory=False,
    plans_lanes=False,
)

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_virtual = 0


# Devices


def cpu() -> jax.Device:
    return _cpus()[0]


def gpu(index: int) -> jax.Device:
    gpus = _gpus()
    if index < len(gpus):
        return gpus[index]
    raise no_such_device(name, Device("virtual" if _virtual else "gpu", index), map(neutral, gpus))


def num_gpus() -> int:
    return len(_gpus())


def is_device(value: object) -> TypeGuard[jax.Device]:
    """A sharding is a place too: ``mh.to(x, NamedSharding(mesh, PartitionSpec("rows")))``."""
    return isinstance(value, (jax.Device, jax.sharding.Sharding))


def exists(device: jax.Device) -> bool:
    return True


def neutral(device: jax.Device) -> Device:
    if isinstance(device, jax.sharding.Sharding):
        if len(device.device_set) > 1:
            raise BadDevice(
                f"{device} spreads an array over {len(device.device_set)} devices, and one device is needed here: give "
                "a jax.Device or a name such as 'gpu:1'. mh.to(x, sharding) and mh.copy(x, sharding) take it"
            )
        (device,) = device.device_set
    if device.platform == "cpu":
        cpus = _cpus()
        return Device("virtual", _index(device, cpus)) if _virtual or len(cpus) > 1 else Device("cpu")
    if device.platform in _GPU_PLATFORMS:
        return Device("gpu", _index(device, _devices("gpu")))
    raise BadDevice(f"{device} is neither a CPU nor a GPU: manyhands does not know platform {device.platform!r}")


def describe(device: jax.Device) -> DeviceRecord:
    if device.platform == "cpu":
        return machine.describe_cpu(neutral(device))
    ordinal = device.local_hardware_id
    uuid = None if ordinal is None else machine.visible_uuid(ordinal)
    return DeviceRecord(
        device=neutral(device),
        name=device.device_kind,
        uuid=uuid,
        memory=_gpu_memory(device, uuid),
        capability=getattr(device, "compute_capability", None),
    )


def virtual_devices(count: int, as_cuda: bool | None = None) -> None:
    global _virtual
    try:
        # JAX accepts the number that is set already at any time. So it is set twice: one of the two is a change, which
        # JAX refuses once its runtime has started.
        jax.config.update("jax_num_cpu_devices", -1)
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise too_late_for_virtual_devices("JAX", "the first array or jax.devices()", count) from error
    # A GPU would stay JAX's default device, and every new array would be created there.
    jax.config.update("jax_platforms", "cpu")
    # XLA's pool has one thread per core. In an all-reduce each device holds one, also for steps issued ahead; when
    # they run out, all devices wait for each other for ever.
    threads = os.environ.get("NPROC", "")
    have = int(threads) if threads.isdecimal() else machine.usable_cores()
    os.environ["NPROC"] = str(max(have, 4 * count))
    _virtual = count


def end_virtual_devices() -> None:
    raise VirtualDevicesError("JAX keeps its devices as long as the process lives: start another process")


def virtual_count() -> int:
    return _virtual


def virtual_device(index: int) -> jax.Device | None:
    # Asking JAX for its CPUs starts its runtime, and no virtual devices can be made then: ask only if there may be any.
    asked = _virtual or jax.config.jax_num_cpu_devices > 1 or "platform_device_count" in os.environ.get("XLA_FLAGS", "")
    cpus = _cpus() if asked else []
    return cpus[index] if (_virtual or len(cpus) > 1) and index < len(cpus) else None


# Tensors


def is_tensor(value: object) -> TypeGuard[jax.Array]:
    return isinstance(value, jax.Array)


def device_of(tensor: jax.Array) -> jax.Device:
    _refuse_tracer(tensor)
    devices = tensor.sharding.device_set
    if len(devices) > 1:
        names = ", ".join(str(neutral(device)) for device in sorted(devices, key=lambda device: device.id))
        raise SeveralDevices(
            f"an array of shape {tensor.shape} is not on one device, it is spread over {names} "
            f"({tensor.sharding}). tensor.devices() lists them; mh.to(x, device) puts all of it on one"
        )
    return next(iter(devices))


def is_on(tensor: jax.Array, device: jax.Device) -> bool:
    if isinstance(tensor, jax.core.Tracer):
        return False
    if isinstance(device, jax.sharding.Sharding):
        return bool(tensor.sharding.is_equivalent_to(device, tensor.ndim))
    devices = tensor.sharding.device_set
    return len(devices) == 1 and device in devices


def all_on(values: Sequence[object], device: jax.Device) -> bool:
    # Each type is checked once: isinstance of every value costs as much as all the rest.
    kinds = {type(value): value for value in values}.values()
    if not all(isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) for value in kinds):
        return False
    if isinstance(device, jax.sharding.Sharding):
        return all(is_on(value, device) for value in cast("Sequence[jax.Array]", values))
    alone = {device}
    return all(value.sharding.device_set == alone for value in cast("Sequence[jax.Array]", values))


def move(tensor: jax.Array, device: jax.Device) -> jax.Array:
    _refuse_tracer(tensor)
    # No wait: arrays are asynchronous, and whatever reads or uses one comes after the copy.
    return jax.device_put(tensor, device)


def copy(tensor: jax.Array, device: jax.Device) -> jax.Array:
    _refuse_tracer(tensor)
    return jax.device_put(tensor, device, may_alias=False)


def start_move(tensor: jax.Array, device: jax.Device) -> Arrival[jax.Array]:
    arriving = move(tensor, device)
    return Arrival(lambda: arriving, without_key(arriving).is_ready)


def rows(tensor: jax.Array) -> int | None:
    return tensor.shape[0] if tensor.ndim else None


def cut(tensor: jax.Array, start: int, stop: int) -> jax.Array:
    _refuse_tracer(tensor)
    part = tensor[start:stop]
    # An uncommitted array follows the other operands to their device: device_put commits the shard.
    return jax.device_put(part, device_of(part)) if len(part.sharding.device_set) == 1 else part


def join(tensors: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(list(tensors))


def synchronize(device: jax.Device | None) -> None:
    jax.effects_barrier()
    for target in [*_cpus(), *_devices("gpu")] if device is None else [device]:
        # Arrays without a reference may still be computed: a device works in order, so it is given one more task.
        zero = jax.device_put(0, target)
        _refuse_tracer(zero)
        (zero + zero).block_until_ready()
        for array in jax.live_arrays(target.platform):
            _wait_for(array, target)


# Models


def is_model(value: object) -> TypeGuard[Any]:
    if _nnx_of(value):
        return True
    return not is_tensor(value) and any(is_tensor(leaf) for leaf in jax.tree.leaves(value))


def model_tensors(model: Any) -> Iterable[tuple[str, jax.Array]]:
    nnx = _nnx_of(model)
    tree = nnx.to_pure_dict(nnx.state(model)) if nnx else model
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_tensor(leaf):  # an abstract model (nnx.eval_shape) has shapes in place of arrays
            yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def move_model(model: Any, device: jax.Device) -> Any:
    """Move an NNX object in place; other pytrees are immutable, so the result is a new one."""

    def move_leaf(leaf: Any) -> Any:
        return move(leaf, device) if is_tensor(leaf) and not is_on(leaf, device) else leaf

    if all(is_on(tensor, device) for _, tensor in model_tensors(model)):
        return model
    nnx = _nnx_of(model)
    if nnx is None:
        return jax.tree.map(move_leaf, model)
    nnx.update(model, jax.tree.map(move_leaf, nnx.state(model)))
    return model


# Measuring


def random(shape: tuple[int, ...], dtype: str, device: jax.Device) -> jax.Array:
    with jax.default_device(device):
        numbers = jax.random.normal(jax.random.key(0), shape, getattr(jnp, dtype))
    return jax.device_put(numbers, device)  # committed: it would follow other operands otherwise


def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right)


def pin(tensor: jax.Array) -> jax.Array:
    return tensor


# Below: what the verbs above share.


def _devices(platform: str) -> list[jax.Device]:
    """This process's devices of a platform; JAX raises where there is none."""
    try:
        return cast("list[jax.Device]", jax.local_devices(backend=platform))
    except RuntimeError:
        return []


def _cpus() -> list[jax.Device]:
    cpus = _devices("cpu")
    if not cpus:
        raise NoSuchDevice(
            f"jax has no CPU here: its platforms are limited to {jax.config.jax_platforms!r}. "
            "Set JAX_PLATFORMS=cuda,cpu, or leave it unset"
        )
    return cpus


def _gpus() -> list[jax.Device]:
    """The GPUs, or the virtual devices that stand in for them."""
    return _cpus() if _virtual else _devices("gpu")


def _index(device: jax.Device, local: list[jax.Device]) -> int:
    """Its number among this process's devices: in a job of several processes ``id`` counts all of them."""
    return local.index(device) if device in local else cast(int, device.id)


def _gpu_memory(device: jax.Device, uuid: str | None) -> Memory | None:
    """What JAX may use of the memory, or what the driver reports if JAX's allocator does not."""
    stats = device.memory_stats() or {}
    if stats.get("bytes_limit"):
        return Memory(total=stats["bytes_limit"], free=max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return next((fact.memory for fact in machine.gpus() if fact.uuid == uuid), None)


def _refuse_tracer(tensor: jax.Array) -> None:
    if isinstance(tensor, jax.core.Tracer):
        raise NotATensor(
            f"{tensor} has no device: inside jit, grad or vmap it stands for a value that is computed later, where "
            "the inputs are. Call mh on the arguments before, or on the result after; inside jit, "
            "jax.lax.with_sharding_constraint says where a value should be"
        )


def without_key(tensor: jax.Array) -> jax.Array:
    """The numbers behind an array of random keys: keys have no is_ready() and cannot become a NumPy array."""
    return jax.random.key_data(tensor) if jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key) else tensor


def _wait_for(array: jax.Array, device: jax.Device) -> None:
    if array.is_deleted() or device not in array.sharding.device_set:
        return
    try:
        array.block_until_ready()
    except RuntimeError:
        if not array.is_deleted():  # another thread may donate or delete it meanwhile
            raise


def _nnx_of(value: object) -> Any:
    """Flax's ``nnx`` if the value is one of its objects, else None. Without an import of Flax there are none."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if isinstance(value, getattr(nnx, "Pytree", ())) else None
