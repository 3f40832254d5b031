"""Dynamo's guards for a function that was traced: whether a later call would still give the same trace.

Our own guards (:mod:`.state`) watch the tensors, modules and settings that a plan was made with. What Python code may
depend on besides has no end: an attribute of a class, ``os.environ``, a ``UserDict``, a layer's ``ceil_mode``. Dynamo
follows the bytecode and guards what it reads. So it captures the function once more, without running it, and its check
runs before every replay.

A whole training step is captured with its backward pass. An optimizer's update would break the graph, so Dynamo takes
it for a call that does nothing: our own guards watch the settings and state of optimizers. They also watch the hooks of
modules, and layers of PyTorch if Dynamo has followed another one of the same kind (:mod:`.known_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.guards.known_layers import KnownLayers
from manyhands.errors import CannotGuard, first_line
from manyhands.python_code.generated import function as generated

Check = Callable[[tuple[Any, ...], dict[str, Any]], bool]

_CALL = "def call(function, arguments, keywords):\n    return detached(function(*arguments, **keywords))"


class _Captured(Exception):
    """Raised instead of running the captured graph."""


def guards(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], trace: Trace | None = None
) -> Check | None:
    """A check whether Dynamo would capture the same for a call's arguments; None if Dynamo is not used.

    What the guards of ``trace`` watch is not watched twice, so its ``holds`` must be checked as well. Raises
    :class:`CannotGuard` if Dynamo cannot follow the function.
    """
    if compat.count_dispatch_modes():  # virtual devices have one, and Dynamo captures nothing then
        return None
    call = generated("call", _CALL, {"detached": _detached})  # a new one: Dynamo stores what it captures with the code

    def instead(*_: Any) -> Any:
        raise _Captured

    tensors: list[torch.Tensor] = []  # that Dynamo guards

    def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        tensors.extend(value for value in inputs if isinstance(value, torch.Tensor))
        return instead

    layers = KnownLayers({} if trace is None else trace.watched())
    try:
        with compat.dynamo_enabled(layers):
            compat.compile_whole(call, backend)(function, arguments, keywords)
    except _Captured:
        check = compat.dynamo_check(call)
    except Exception as error:
        raise CannotGuard(first_line(error)) from error
    else:
        raise CannotGuard("there is nothing to capture")
    if check is None:
        raise CannotGuard("Dynamo kept no guards")

    layers_hold = layers.check()

    def still_the_same(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        return layers_hold() and check({"function": function, "arguments": arguments, "keywords": keywords})

    if not still_the_same(arguments, keywords):
        raise CannotGuard("Dynamo's guards refuse the call that they were made for")
    if trace is not None:
        trace.forms_are_guarded([*tensors, *layers.tensors()])
    return still_the_same


def _detached(result: Any) -> Any:
    """Dynamo refuses a result after its own backward pass: ``loss.backward(); return loss``."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, (list, tuple)):
        return [_detached(part) for part in result]
    return [_detached(part) for part in result.values()] if isinstance(result, dict) else result
