"""Which calls of JAX make the host wait.

A value that the host asks for is waited for, also where ``jit`` has been called long before. Not the transfer guard:
it forbids copies that do not wait, and does not see ``float(x)``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax._src.array import ArrayImpl  # found without making an array, which would start JAX
from jax._src.xla_bridge import backends_are_initialized

from manyhands.audit.kinds import Kind
from manyhands.audit.wrapping import Installation, StepListeners
from manyhands.backends.jax import devices

steps = StepListeners()


def on_device(value: Any) -> bool:
    """Whether it is an array (not a tracer) on a GPU, or on what stands in for one."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    if installation.on_cpu:
        return True
    return any(device.platform != "cpu" for device in value.devices())


def _gpu_count() -> int:
    return sum(device.platform != "cpu" for device in jax.devices())


installation = Installation("jax", on_device, devices.virtual_count, _gpu_count)
stand_in = installation.stand_in


def used_device() -> bool:
    """Whether the program could use a GPU, or what stands in for one."""
    if not backends_are_initialized():  # asking JAX for its devices would start it
        return False
    return installation.used_device()


def install() -> None:
    """Wrap everything, once; the wrappers stay, and do nothing without a sink."""
    installation.wrap_numpy()
    if not installation.begins():
        return
    array = ArrayImpl
    installation.wrap_values(array, "Array")
    installation.wrap(array, "__array__", "Array.__array__", Kind.TO_HOST)
    installation.wrap(array, "block_until_ready", "Array.block_until_ready", Kind.SYNCHRONIZE)
    installation.wrap(jax, "block_until_ready", "jax.block_until_ready", Kind.SYNCHRONIZE, whole=True)
    installation.wrap(jax, "device_get", "jax.device_get", Kind.TO_HOST, whole=True)
    _wrap_annotations()


def _wrap_annotations() -> None:
    """``jax.profiler.StepTraceAnnotation`` names a step: JAX has no optimizer that one could ask."""
    annotation = jax.profiler.StepTraceAnnotation
    original = annotation.__init__

    @functools.wraps(original)
    def __init__(self: Any, name: str, **kwargs: Any) -> None:
        steps.note_end(name)
        original(self, name, **kwargs)

    annotation.__init__ = __init__
