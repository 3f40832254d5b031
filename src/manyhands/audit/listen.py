"""Connect a framework's hooks to the recorder of a whole program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from manyhands.audit.recorder import Recorder
from manyhands.audit.wrapping import Steps

_MORE = {"torch": "manyhands.audit.torch.listen"}  # what one framework has beyond its hooks


class Hooks(Protocol):
    """The module ``hooks`` of a framework."""

    steps: Steps

    def install(self) -> None:
        """Wrap every call that waits, once."""

    def stand_in(self) -> None:
        """Let the CPU stand in for a GPU from now on."""

    def used_device(self) -> bool:
        """Whether the program used a GPU, or what stands in for one."""


def hooks(framework: str) -> Hooks:
    """The hooks of a framework, which is imported with them."""
    return cast(Hooks, importlib.import_module(f"manyhands.audit.{framework}.hooks"))


def connect(framework: str, on_step: Callable[[object, bool], None], *, stand_in: bool) -> None:
    """Install a framework's hooks, with one listener for its steps."""
    module = hooks(framework)
    if stand_in:
        module.stand_in()
    module.install()
    module.steps.listen(on_step)


def begin(framework: str, recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Record what a program does with a framework from now on."""
    connect(framework, lambda who, loop: recorder.step(who, loop=loop), stand_in=recorder.speeds is not None)
    if framework in _MORE:
        _more(framework).begin(recorder, warmup, at_step)


def end(framework: str, recorder: Recorder) -> None:
    """Stop, and record what is known only at the end."""
    module = hooks(framework)
    module.steps.stop()
    recorder.used_device |= module.used_device()
    if framework in _MORE:
        _more(framework).end(recorder)


def _more(framework: str) -> Any:
    return importlib.import_module(_MORE[framework])
