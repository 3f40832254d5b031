"""Whether a call that is like none of those before is worth a plan.

Planning takes as long as hundreds or thousands of calls, and pays where calls come again. A function that is called
with another shape or another number every time, as with a counter of steps, would be planned at every call. So it is
counted how many plans in a row were thrown away unused; from then on a call is planned when it comes a third time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_WASTED = 8  # plans in a row that no second call used
_OFTEN = 3  # times that a call has to come then
_REMEMBERED = 32

REASON = (
    f"it is called with other shapes or other numbers every time: {_WASTED} plans in a row were not used again, so a "
    f"call is planned when it comes for the {_OFTEN}rd time; a number that changes can be given as a tensor"
)


class Newcomers:
    def __init__(self) -> None:
        self._wasted = 0
        self._seen: OrderedDict[Any, int] = OrderedDict()

    def thrown_away(self, *, used: bool) -> None:
        """A plan makes room for another; ``used``: by a second call."""
        self._wasted = 0 if used else self._wasted + 1

    def is_worth_it(self, signature: Any) -> bool:
        if self._wasted < _WASTED:
            return True
        count = self._seen.pop(signature, 0) + 1
        if count >= _OFTEN:
            return True
        self._seen[signature] = count
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False
