"""Which code of installed packages ran while a function was traced.

What a function reaches is found by the names in its code, so it includes code that never runs: of a large library
thousands of functions, and some of them read what nobody can guard. Such code is a reason to refuse a function only if
it ran: as long as all facts about the code that ran hold, the same code runs again.
"""

from __future__ import annotations

import cProfile
import sys
import types
from collections.abc import Collection


class Executed:
    """Notes, while it is entered, which of some code runs in this thread. Without any code, nothing is noted."""

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        self._codes = frozenset(codes)
        self._profiler: cProfile.Profile | None = None

    def __enter__(self) -> Executed:
        if self._codes and sys.getprofile() is None:
            profiler = cProfile.Profile(subcalls=False, builtins=False)
            try:
                profiler.enable()
                self._profiler = profiler
            except ValueError:  # from Python 3.12 on: another profiler is active
                pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is None:
            return
        active: object = sys.getprofile()
        undisturbed = sys.version_info >= (3, 12) or active is self._profiler
        self._profiler.disable()
        if undisturbed:
            self._codes &= {entry.code for entry in self._profiler.getstats()}

    def ran(self, code: types.CodeType) -> bool:
        """Whether it ran. If another profiler was active, all code counts as run."""
        return code in self._codes
