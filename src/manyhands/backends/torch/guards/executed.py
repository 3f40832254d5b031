"""Which code of installed packages ran while a function was traced.

What a function reaches is found by the names in its code, so it includes code that never runs: of a large library
thousands of functions, and some of them read what nobody can guard. What did not run does not matter: if all facts
about the code that ran still hold, the same code runs again.
"""

from __future__ import annotations

import cProfile
import sys
import types
from collections.abc import Collection


class Executed:
    """Notes, while it is entered, which of some code runs in this thread."""

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        """Without ``codes`` nothing is noted, and nothing is slower."""
        self._codes = frozenset(codes)
        self._profiler = cProfile.Profile(subcalls=False, builtins=False) if codes and not sys.getprofile() else None

    def __enter__(self) -> Executed:
        if self._profiler is not None:
            try:
                self._profiler.enable()
            except ValueError:  # from Python 3.12 on: another profiler is active
                self._profiler = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            self._profiler.disable()
            self._codes &= {entry.code for entry in self._profiler.getstats()}

    def ran(self, code: types.CodeType) -> bool:
        """Whether it ran. If a profiler of the user's was active, all code counts as run."""
        return code in self._codes
