"""Which calls of TensorFlow make the host wait: reads of eager tensors, and Python functions inside of graphs."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import tensorflow as tf

from manyhands.audit import sites
from manyhands.audit.kinds import Kind
from manyhands.audit.wrapping import Counted, Installation, StepListeners
from manyhands.backends.tensorflow import devices

steps = StepListeners()
_calls = threading.local()
_step_functions: set[int] = set()


def on_device(value: Any) -> bool:
    """Whether it is an eager tensor on a GPU, or on what stands in for one."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return False
    if installation.on_cpu:
        return bool(value.dtype != tf.int32)  # TensorFlow keeps those in the memory of the host
    return "GPU" in value.device


def _gpu_count() -> int:
    return len(tf.config.list_physical_devices("GPU"))


installation = Installation("tensorflow", on_device, devices.virtual_count, _gpu_count)
stand_in, used_device = installation.stand_in, installation.used_device


def install() -> None:
    """Wrap everything, once; the wrappers stay, and do nothing without a sink."""
    installation.wrap_numpy()
    if not installation.begins():
        return
    tensor = _eager_tensor()
    installation.wrap_values(tensor, "Tensor")
    for name in ("numpy", "__array__"):
        installation.wrap(tensor, name, f"Tensor.{name}", Kind.TO_HOST)
    _wrap_python_functions()
    if hasattr(sys.modules.get("keras"), "optimizers"):
        wrap_steps()


def _eager_tensor() -> Any:
    """The class that has the methods of eager tensors: found without making one, which would start the devices."""
    from tensorflow.python.framework import ops

    return next(owner for owner in ops.EagerTensor.__mro__ if "__float__" in vars(owner))


def _wrap_python_functions() -> None:
    """``tf.py_function``: a step of a graph that waits for the host, and makes the host wait."""
    for name in ("py_function", "numpy_function"):
        original = getattr(tf, name)

        @functools.wraps(original)
        def python_function(func: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            timed = Counted(func, f"tf.{_name}", Kind.HOST_OPERATION, sites.current(2), "tensorflow")
            result = _original(timed, *args, **kwargs)
            first_result = result[0] if isinstance(result, (list, tuple)) and result else result
            if hasattr(first_result, "op") and tf.inside_function():  # its traceback has the lines before AutoGraph
                timed.site = sites.of_lines((frame.filename, frame.lineno) for frame in first_result.op.traceback)
            return result

        setattr(tf, name, python_function)


def wrap_steps() -> None:
    """A step ends where an optimizer was applied: eagerly, or by a call of the ``tf.function`` that applies it."""
    import keras

    optimizer: Any = keras.optimizers.Optimizer
    if hasattr(optimizer.apply, "__wrapped__"):
        return
    apply, function = optimizer.apply, type(tf.function(lambda: None))
    call = function.__call__

    @functools.wraps(apply)
    def note_and_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply(self, *args, **kwargs)
        stack = getattr(_calls, "stack", [])
        if tf.inside_function():
            _step_functions.update(stack[:1])
        else:
            steps.note_end(id(self))
        return result

    @functools.wraps(call)
    def note_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not steps.listeners or tf.inside_function():
            return call(self, *args, **kwargs)
        stack = _calls.__dict__.setdefault("stack", [])
        stack.append(id(self))
        try:
            result = call(self, *args, **kwargs)
        finally:
            stack.pop()
        if not stack and id(self) in _step_functions:
            steps.note_end(id(self))
        return result

    optimizer.apply = note_and_apply
    function.__call__ = note_and_call
