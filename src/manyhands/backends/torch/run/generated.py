"""Python functions that are generated at run time.

Straight-line code for one plan, one guard or one call signature is faster than code that interprets a description. All
of it is generated here, so that tracebacks show its lines and debuggers find its source:

    double = function("doubles", "def double(x):\\n    return x * two", {"two": 2})
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


def function(label: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The one function that ``source`` defines; ``names`` are its globals."""
    return functions(label, source, names)[0]


def functions(label: str, source: str, names: dict[str, Any]) -> list[Callable[..., Any]]:
    """The functions that ``source`` defines, in its order; ``label`` is the file's name in tracebacks."""
    filename = f"<manyhands {label} {next(_numbers)}>"
    before = set(names)
    exec(compile(source, filename, "exec"), names)
    defined = [value for name, value in names.items() if name not in before and name != "__builtins__"]
    # Without a modification time, linecache does not look for the file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(defined[0], linecache.cache.pop, filename, None)
    return defined
