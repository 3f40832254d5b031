"""Which calls of MXNet make the host wait for its engine."""

from __future__ import annotations

import functools
import threading
from typing import Any

import mxnet as mx

from manyhands.audit.kinds import Kind
from manyhands.audit.wrapping import Steps, wrap, wrap_values
from manyhands.backends.mxnet import devices

stands_in = False  # whether the CPU stands in for a GPU
steps = Steps()
_lock = threading.Lock()
_installed = False


def on_device(value: Any) -> bool:
    """Whether it is an array on a GPU, or on what stands in for one."""
    if not isinstance(value, mx.nd.NDArray):
        return False
    return stands_in or devices.virtual_count() > 0 or value.context.device_type == "gpu"


def stand_in() -> None:
    """Let the CPU stand in for a GPU."""
    global stands_in
    stands_in = True


def used_device() -> bool:
    """Whether the program could use a GPU, or what stands in for one."""
    return stands_in or mx.context.num_gpus() > 0


def install() -> None:
    """Wrap everything, once; it stays, and does nothing while nobody listens."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    for owner, name in ((mx.nd.NDArray, "NDArray"), (mx.np.ndarray, "ndarray")):
        wrap_values(owner, name, on_device, "mxnet")
        if "asnumpy" in vars(owner):
            wrap(owner, "asnumpy", f"{name}.asnumpy", Kind.TO_HOST, on_device, "mxnet")
        if "wait_to_read" in vars(owner):
            wrap(owner, "wait_to_read", f"{name}.wait_to_read", Kind.SYNCHRONIZE, on_device, "mxnet")
    for module in (mx.nd, mx.ndarray.ndarray, mx.npx):
        wrap(module, "waitall", "waitall", Kind.SYNCHRONIZE, on_device, "mxnet", whole=True)
    _wrap_steps()


def _wrap_steps() -> None:
    trainer = mx.gluon.Trainer
    for name in ("step", "update"):
        original = getattr(trainer, name)

        @functools.wraps(original)
        def stepped(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            result = _original(self, *args, **kwargs)
            steps.of(self)
            return result

        setattr(trainer, name, stepped)
