"""Which calls of JAX make the host wait.

A value that the host asks for is waited for, also where ``jit`` has been called long before. Not the transfer guard:
it forbids copies that nobody waits for, and does not see ``float(x)``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
from jax._src.array import ArrayImpl  # found without making an array, which would start JAX
from jax._src.xla_bridge import backends_are_initialized

from manyhands.audit.kinds import Kind
from manyhands.audit.wrapping import Steps, wrap, wrap_numpy, wrap_values
from manyhands.backends.jax import devices

stands_in = False  # whether the CPU stands in for a GPU
steps = Steps()
_lock = threading.Lock()
_installed = False


def on_device(value: Any) -> bool:
    """Whether it is an array (not a tracer) on a GPU, or on what stands in for one."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    if stands_in or devices.virtual_count():
        return True
    return any(device.platform != "cpu" for device in value.devices())


def stand_in() -> None:
    """Let the CPU stand in for a GPU."""
    global stands_in
    stands_in = True


def used_device() -> bool:
    """Whether the program could use a GPU, or what stands in for one."""
    if not backends_are_initialized():  # asking JAX for its devices would start it
        return False
    return stands_in or any(device.platform != "cpu" for device in jax.devices())


def install() -> None:
    """Wrap everything, once; it stays, and does nothing while nobody listens."""
    global _installed
    with _lock:
        first, _installed = not _installed, True
    if stands_in or devices.virtual_count():
        wrap_numpy(on_device, "jax")
    if not first:
        return
    array = ArrayImpl
    wrap_values(array, "Array", on_device, "jax")
    wrap(array, "__array__", "Array.__array__", Kind.TO_HOST, on_device, "jax")
    wrap(array, "block_until_ready", "Array.block_until_ready", Kind.SYNCHRONIZE, on_device, "jax")
    wrap(jax, "block_until_ready", "jax.block_until_ready", Kind.SYNCHRONIZE, on_device, "jax", whole=True)
    wrap(jax, "device_get", "jax.device_get", Kind.TO_HOST, on_device, "jax", whole=True)
    _wrap_annotations()


def _wrap_annotations() -> None:
    """``jax.profiler.StepTraceAnnotation`` names a step: JAX has no optimizer that one could ask."""
    annotation = jax.profiler.StepTraceAnnotation
    original = annotation.__init__

    @functools.wraps(original)
    def __init__(self: Any, name: str, **kwargs: Any) -> None:
        steps.ended(name)
        original(self, name, **kwargs)

    annotation.__init__ = __init__
