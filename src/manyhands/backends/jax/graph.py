"""A jaxpr as tasks: what each operation reads and writes, where it runs, and about how long it takes.

Calls of other jaxprs (``jit``, ``custom_jvp``, ``checkpoint``) are expanded; a loop is one task. A jaxpr names devices
only in ``device_put``: every other operation runs where the first of its inputs is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from manyhands.backends.jax import devices as adapter
from manyhands.backends.runtime import estimate, task
from manyhands.schedule.task import Task

_HEAVY = ("dot_general", "conv_general_dilated")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


class Graph:
    """The operations of a jaxpr as tasks, and all devices that they and the arguments are on."""

    def __init__(self, tensors: Sequence[Any], closed: ClosedJaxpr) -> None:
        self.tasks: list[Task] = []
        self.forms: list[str] = []
        self._memory: dict[Any, int] = {}
        self._device: dict[int, str] = {}
        self._first = _place(tensors[0]) if tensors else _default()
        values = [*zip(closed.jaxpr.constvars, closed.consts, strict=True)]
        values += [*zip(closed.jaxpr.invars, tensors, strict=True)]
        for variable, value in values:
            self._device[self._of(variable)] = _place(value)
        # NumPy's arrays follow the others to their device.
        placed = [tensor for tensor in tensors if isinstance(tensor, jax.Array)]
        self.devices = {_place(tensor) for tensor in placed or tensors}
        self._add(closed.jaxpr)

    def _of(self, variable: Any) -> int:
        return self._memory.setdefault(variable, len(self._memory))

    def _add(self, jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = _called(equation)
            if inner is None:
                self._task(equation)
                continue
            for variable, value in zip(inner.constvars + inner.invars, equation.invars, strict=True):
                if not isinstance(value, Literal):
                    self._memory[variable] = self._of(value)
            self._add(inner)
            for variable, value in zip(equation.outvars, inner.outvars, strict=True):
                if not isinstance(value, Literal):
                    self._memory[variable] = self._of(value)

    def _task(self, equation: Any) -> None:
        reads = {self._of(invar) for invar in equation.invars if not isinstance(invar, Literal)}
        writes = {self._of(outvar) for outvar in equation.outvars}
        target = _target(equation)
        known = [self._device[read] for read in reads if read in self._device]
        device = target or (known[0] if known else self._first)
        if target:
            self.devices.add(target)
        self._device.update(dict.fromkeys(writes, device))
        copies = target is not None and target != (known[0] if known else self._first)
        heavy = equation.primitive.name in _HEAVY
        self.forms.append(f"{equation.primitive.name} {[invar.aval for invar in equation.invars]}" if heavy else "")
        self.tasks.append(task(equation.primitive.name, reads, writes, device, _seconds(equation), copies=copies))


def _place(array: Any) -> str:
    """The device of an array; the devices, joined by +, of a sharded one."""
    if not isinstance(array, jax.Array):
        return _default()
    return "+".join(sorted(str(adapter.neutral(device)) for device in array.sharding.device_set))


def _default() -> str:
    device = jax.config.jax_default_device
    return str(adapter.neutral(device if isinstance(device, jax.Device) else jax.local_devices()[0]))


def _target(equation: Any) -> str | None:
    """The device that a ``device_put`` names, or None."""
    if equation.primitive.name != "device_put":
        return None
    devices = equation.params.get("devices") or (None,)
    return str(adapter.neutral(devices[0])) if isinstance(devices[0], jax.Device) else None


def _called(equation: Any) -> Any:
    """The jaxpr that an operation calls, or None if it is more than a call."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params), None)
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.constvars) + len(inner.invars) != len(equation.invars):
        return None
    return inner


def _seconds(equation: Any) -> float:
    count = sum(_size(variable) for variable in [*equation.invars, *equation.outvars])
    return estimate(_operations(equation), count)


def _operations(equation: Any) -> float:
    primitive, written = equation.primitive.name, sum(_size(outvar) for outvar in equation.outvars)
    if primitive == "dot_general":
        left = equation.invars[0].aval.shape
        return 2.0 * written * int(math.prod(left[axis] for axis in equation.params["dimension_numbers"][0][0]))
    if primitive == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * written * int(math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]])
    if primitive == "scan":
        return float(equation.params["length"]) * sum(map(_operations, equation.params["jaxpr"].jaxpr.eqns))
    return float(written)


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))
