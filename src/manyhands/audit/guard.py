"""Guards in code: forbid, warn of or count the hidden waits of a block.

A guard sees the waits of its own thread or asyncio task only. Moves by ``mh.to`` and ``mh.copy`` are asked for and
therefore silent; so is a line with the comment ``# manyhands: wait-ok <reason>``.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import SkipTest

from manyhands.amounts import count_of
from manyhands.audit import watch
from manyhands.audit.cure import Stall
from manyhands.audit.sites import name_callers_in_warnings
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings, HiddenWait, NothingWatched

Mode = Literal["forbid", "warn", "count"]


class HiddenWaitWarning(UserWarning):
    """The host waited for a device within ``mh.guard("warn")``."""


class _SkipsTest(NothingWatched, SkipTest):
    """As a guard raises it: a test that ends so is skipped."""


class Seen:
    """The hidden waits of a guarded block: ``len(seen)`` of them, each once in ``for stall in seen``.

    Without a GPU or a virtual device there is nothing to count: asking for the number raises
    :class:`~manyhands.errors.NothingWatched`.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._counts: Counter[Stall] = Counter()
        self.allowed = 0  # waits that a comment allows
        self._watches = False

    def look(self, *, ask: bool = True) -> None:
        """Look whether there is something to wait for, where nothing was seen; ``ask``: raise where there is not."""
        self._watches = self._watches or bool(self._counts or self.allowed)
        self._watches = self._watches or any(hooks.installation.has_device() for hooks in _hooks())
        if ask and not self._watches:
            raise _SkipsTest

    def __len__(self) -> int:
        self.look()
        return self._counts.total()

    def __iter__(self) -> Iterator[Stall]:
        self.look()
        return iter(self._counts)

    def times(self, stall: Stall) -> int:
        """How often it happened."""
        return self._counts[stall]

    def __str__(self) -> str:
        self.look()
        return "\n".join(f"{count} x {stall}" for stall, count in self._counts.most_common())

    # The sink

    def before(self, stall: Stall) -> None:
        if self._mode == "forbid" and stall.site.allowed is None:
            self._counts[stall] += 1
            raise HiddenWait(f"mh.guard('forbid'): {stall}")

    def after(self, event: watch.WaitEvent) -> None:
        stall = event.stall
        if stall.site.allowed is not None:
            self.allowed += 1
            return
        self._counts[stall] += 1
        if self._mode == "warn":
            line = stall.site.user
            warnings.warn_explicit(str(stall), HiddenWaitWarning, line.file, line.number)


@contextmanager
def guard(mode: Mode = "count") -> Iterator[Seen]:
    """Watch a block for hidden waits and copies.

    ``"forbid"`` raises :class:`~manyhands.errors.HiddenWait` before the host waits, ``"warn"`` warns at the line, and
    ``"count"`` only counts: ``with mh.guard("count") as seen: ...; print(len(seen), seen)``. Tensors on a GPU and on
    virtual devices are watched. Without either, ``"forbid"`` raises :class:`~manyhands.errors.NothingWatched`,
    ``"warn"`` warns of it, and a count raises it when it is asked for.
    """
    if mode not in ("forbid", "warn", "count"):
        raise BadSettings(f"guard({mode!r}): give 'forbid', 'warn' or 'count'")
    name_callers_in_warnings()
    for hooks in _hooks():
        hooks.install()
    seen = Seen(mode)
    try:
        seen.look(ask=mode != "count")
    except NothingWatched as nothing:
        if mode == "forbid":
            raise
        warnings.warn(str(nothing), HiddenWaitWarning, stacklevel=3)
    with watch.here(seen):
        yield seen
    seen.look(ask=False)  # its devices may be gone when the count is asked for


@contextmanager
def assert_no_stalls() -> Iterator[Seen]:
    """Raise :class:`~manyhands.errors.HiddenWait` at the end of a block in which the host waited, with all its lines.

    ``with mh.assert_no_stalls(): step(batch)``; also a decorator of a test: ``@mh.assert_no_stalls()``. Without a GPU
    and without virtual devices it raises :class:`~manyhands.errors.NothingWatched`, by which a test is skipped.
    """
    with guard("count") as seen:
        yield seen
    if seen:
        raise HiddenWait(f"the host waited {count_of(len(seen), 'time')}:\n{seen}")


def _hooks() -> list[Any]:
    """The hooks of the frameworks that are imported."""
    return [watch.hooks_of(framework) for framework in FRAMEWORKS if framework in sys.modules]
