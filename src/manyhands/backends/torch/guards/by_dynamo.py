"""Dynamo's guards for a function that was traced: whether a later call would still give the same trace.

Our own guards (:mod:`.state`) watch the tensors, modules and settings that a plan was made with. What Python code may
depend on besides has no end: an attribute of a class, ``os.environ``, a ``UserDict``, a layer's ``ceil_mode``. Dynamo
follows the code byte by byte and writes down what it looked at. So it captures the function once more, without running
it, and its check is asked before every replay.

At a backward pass or an optimizer's step Dynamo breaks the graph, so a function that leaves gradients behind, as whole
training steps do, is guarded by our own rules alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.errors import CannotGuard, first_line
from manyhands.generated import function as generated

Check = Callable[[tuple[Any, ...], dict[str, Any]], bool]

_CALL = "def call(function, arguments, keywords):\n    return function(*arguments, **keywords)"


class _Captured(Exception):
    """Raised in place of the captured graph: the function is not to be run."""


def guards(
    trace: Trace, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Check | None:
    """Tells of a call's arguments whether Dynamo would capture the same; None where it is not asked.

    Raises :class:`CannotGuard` where Dynamo cannot follow the function.
    """
    if trace.gradients or compat.count_dispatch_modes():
        return None
    call = generated("call", _CALL, {})  # of its own: Dynamo keeps what it captures with the code

    def instead(*_: Any) -> Any:
        raise _Captured

    try:
        with compat.dynamo_enabled():
            compat.compile_whole(call, lambda graph, inputs: instead)(function, arguments, keywords)
    except _Captured:
        check = compat.dynamo_check(call)
    except Exception as error:
        raise CannotGuard(first_line(error)) from error
    else:
        raise CannotGuard("there is nothing to capture")
    if check is None:
        raise CannotGuard("Dynamo kept no guards")

    def still_the_same(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        return check({"function": function, "arguments": arguments, "keywords": keywords})

    if not still_the_same(arguments, keywords):
        raise CannotGuard("Dynamo's guards refuse the call that they were made for")
    return still_the_same
