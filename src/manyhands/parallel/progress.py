"""Prints what the planner is doing once planning takes longer than a second, and measures how long each part takes."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

_PATIENCE = 1.0  # seconds before anything is printed


class Progress:
    """``with Progress("step") as progress: progress.enters("capture"); ...`` and ``progress.spent`` afterwards."""

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.spent: dict[str, float] = {}  # the seconds of each part
        self._name, self._part, self._since = name, "", time.perf_counter()
        self._timer = threading.Timer(_PATIENCE, self._say) if shown else None
        self._said = False

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.enters("")
        if self._timer is not None:
            self._timer.cancel()
        if self._said and error is None:
            _print(f"planned {self._name} in {self.summary()}")

    def enters(self, part: str) -> None:
        """Start a part of planning; ends the previous part."""
        now = time.perf_counter()
        if self._part:
            self.spent[self._part] = self.spent.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def summary(self) -> str:
        """The time that planning took, with its parts: ``2.1 s (capture 1.2, trials 0.9)``."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.spent.items() if seconds >= 0.05)
        return f"{sum(self.spent.values()):.1f} s" + (f" ({parts})" if parts else "")

    def _say(self) -> None:
        self._said = True
        _print(f"planning {self._name}: {self._part} ...")


def _print(text: str) -> None:
    if sys.stderr is not None:  # a program without a console
        print(f"manyhands: {text}", file=sys.stderr, flush=True)
