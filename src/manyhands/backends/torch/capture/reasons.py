"""Why tracing failed, as a lesson: what the function does, on which of its lines, and what to write instead.

PyTorch says ``GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq(u0, 1)``. What is meant is
that the function wants to know a tensor's value while none is computed yet, as ``if x.sum() > 0`` does; and where it
stands is known from the traceback: the innermost frame that belongs neither to PyTorch, nor to Python, nor to us.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path

from manyhands.backends.torch.compat import DataDependentOutputException, DynamicOutputShapeException

_NOT_THE_USERS = frozenset(sys.stdlib_module_names) | {"torch", "manyhands"}
_LONGEST = 60  # characters of a line that is shown
FROM_SHAPE = "what comes after it cannot be planned; where a mask is meant, torch.where(mask, x, 0) keeps the shape"


def why(error: BaseException) -> str:
    """The reason in one line."""
    # Brings SymPy along, which takes a second to import.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error).partition("\n")[0]
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of a result depends on values{_where(error)}: {FROM_SHAPE}"
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return (
            f"it needs a tensor's value in Python{_where(error)}: it is run as it is; torch.where(condition, a, b) "
            "decides on the device, and a number that is only computed with can stay a tensor"
        )
    if text.startswith(".numpy()"):
        return f"it takes a tensor to NumPy{_where(error)}: it is run as it is; PyTorch's own functions can be planned"
    return f"{type(error).__name__}: {text}{_where(error)}"


def _where(error: BaseException) -> str:
    """The innermost line of the user's that was reached, or nothing."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
            continue
        code = frame.f_code
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        shown = f": {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}" if text else ""
        return f" (in {code.co_name}, line {line} of {Path(code.co_filename).name}{shown})"
    return ""
