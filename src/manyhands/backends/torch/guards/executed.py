"""Which code of installed packages ran while a function was traced.

What a function reaches is found by the names in its code, so it includes code that never runs: of a large library
thousands of functions, and some of them read what nobody can guard. Such code is a reason to refuse a function only if
it ran: as long as all facts about the code that ran hold, the same code runs again.

From Python 3.12 on the interpreter reports the first start of every code, in all threads, at no cost worth measuring
(``sys.monitoring``). Before that a profiler notes the calls of this thread, which makes tracing take 1.6 times as long.
"""

from __future__ import annotations

import contextlib
import cProfile
import sys
import types
from collections.abc import Callable, Collection

Noted = Collection[types.CodeType]
Stop = Callable[[], Noted | None]

_FREE_TOOLS = (3, 4)  # the other numbers of sys.monitoring belong to debuggers, coverage, profilers and optimizers


class Executed:
    """Notes, while it is entered, which of some code runs. Without any code, nothing is noted."""

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        self._codes = frozenset(codes)
        self._stop: Stop | None = None

    def __enter__(self) -> Executed:
        if self._codes:
            self._stop = _note_starts()
        return self

    def __exit__(self, *_: object) -> None:
        noted = self._stop() if self._stop is not None else None
        if noted is not None:
            self._codes &= frozenset(noted)

    def ran(self, code: types.CodeType) -> bool:
        """Whether it ran. If that could not be noted, because of another profiler, all code counts as run."""
        return code in self._codes


if sys.version_info >= (3, 12):

    def _note_starts() -> Stop | None:
        """Note what starts from now on; None if other tools have taken all numbers."""
        monitoring = sys.monitoring
        tool = _taken_tool()
        if tool is None:
            return None
        noted: set[types.CodeType] = set()

        def note(code: types.CodeType, offset: int) -> object:
            noted.add(code)
            return monitoring.DISABLE

        def stop() -> Noted:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            monitoring.register_callback(tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(tool)
            return noted

        monitoring.register_callback(tool, monitoring.events.PY_START, note)
        monitoring.set_events(tool, monitoring.events.PY_START)
        monitoring.restart_events()  # what an earlier trace has seen starts for the first time again
        return stop

    def _taken_tool() -> int | None:
        """A number that no other tool has, taken for us."""
        for number in _FREE_TOOLS:
            with contextlib.suppress(ValueError):  # somebody has it
                sys.monitoring.use_tool_id(number, "manyhands")
                return number
        return None

else:

    def _note_starts() -> Stop | None:
        """Note what this thread calls from now on; None if another profiler is active."""
        if sys.getprofile() is not None:
            return None
        profiler = cProfile.Profile(subcalls=False, builtins=False)
        profiler.enable()

        def stop() -> Noted | None:
            active: object = sys.getprofile()
            profiler.disable()
            if active is not profiler:
                return None
            return [entry.code for entry in profiler.getstats() if isinstance(entry.code, types.CodeType)]

        return stop
