"""Connect JAX's hooks to the recorder of a whole program."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax._src.xla_bridge import backends_are_initialized

from manyhands.audit.jax import hooks
from manyhands.audit.recorder import Recorder


def listen(recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Install the hooks; with a profile the CPU stands in for the GPU."""
    hooks.stands_in = recorder.profile is not None
    hooks.steps.listeners[:] = [lambda who, loop: recorder.step(who, loop=loop)]
    hooks.install()


def finish(recorder: Recorder) -> None:
    """What is known only at the end."""
    hooks.steps.listeners.clear()
    if backends_are_initialized():
        recorder.used_device |= hooks.stands_in or any(device.platform != "cpu" for device in jax.devices())
