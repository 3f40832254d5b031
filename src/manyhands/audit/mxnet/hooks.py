"""Which calls of MXNet make the host wait for its engine."""

from __future__ import annotations

import functools
from typing import Any

import mxnet as mx

from manyhands.audit.kinds import Kind
from manyhands.audit.wrapping import Installation, StepListeners
from manyhands.backends.mxnet import devices

steps = StepListeners()


def on_device(value: Any) -> bool:
    """Whether it is an array on a GPU, or on what stands in for one."""
    if not isinstance(value, mx.nd.NDArray):
        return False
    return installation.on_cpu or value.context.device_type == "gpu"


installation = Installation("mxnet", on_device, devices.virtual_count, mx.context.num_gpus)
stand_in, used_device = installation.stand_in, installation.used_device


def install() -> None:
    """Wrap everything, once; the wrappers stay, and do nothing without a sink."""
    if not installation.begins():
        return
    for owner, name in ((mx.nd.NDArray, "NDArray"), (mx.np.ndarray, "ndarray")):
        installation.wrap_values(owner, name)
        if "asnumpy" in vars(owner):
            installation.wrap(owner, "asnumpy", f"{name}.asnumpy", Kind.TO_HOST)
        if "wait_to_read" in vars(owner):
            installation.wrap(owner, "wait_to_read", f"{name}.wait_to_read", Kind.SYNCHRONIZE)
    for module in (mx.nd, mx.ndarray.ndarray, mx.npx):
        installation.wrap(module, "waitall", "waitall", Kind.SYNCHRONIZE, whole=True)
    _wrap_steps()


def _wrap_steps() -> None:
    trainer = mx.gluon.Trainer
    for name in ("step", "update"):
        original = getattr(trainer, name)

        @functools.wraps(original)
        def step(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            result = _original(self, *args, **kwargs)
            steps.note_end(id(self))
            return result

        setattr(trainer, name, step)
