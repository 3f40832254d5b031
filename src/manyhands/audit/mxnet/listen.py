"""Connect MXNet's hooks to the recorder of a whole program."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx

from manyhands.audit.mxnet import hooks
from manyhands.audit.recorder import Recorder


def listen(recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Install the hooks; with a profile the CPU stands in for the GPU."""
    hooks.stands_in = recorder.profile is not None
    hooks.steps.listeners[:] = [lambda who, loop: recorder.step(who, loop=loop)]
    hooks.install()


def finish(recorder: Recorder) -> None:
    """What is known only at the end."""
    hooks.steps.listeners.clear()
    recorder.used_device |= hooks.stands_in or mx.context.num_gpus() > 0
