"""The plans of one function: which plan is valid for a call, and whether a call is worth planning.

Plans are found by the signature of a call. One signature may have several plans, for different states of what the
function reads from outside its arguments. The least recently used signatures are dropped.

Planning takes as long as hundreds or thousands of calls, and pays only where calls repeat. Two cases end it:

- a signature was planned many times, because the values read from outside differed every time: it runs as written;
- the function is called with another shape or another number every time, as with a step counter, and plan after plan is
  dropped unused. From then on a call is planned when it occurs for the third time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

_SIGNATURES = 8
_VARIANTS = 4  # plans of one signature
_PLANNINGS = 8  # of one signature
_WASTED = 8  # plans in a row that no second call used
_OFTEN = 3  # occurrences after which a call is planned then
_REMEMBERED = 32  # unplanned calls that are counted

NEVER_AGAIN = (
    f"arguments change on every call: the last {_WASTED} plans were never reused, so a call is now planned only when "
    f"it comes for the {_OFTEN}rd time. Pass a number that changes as a tensor; pad a shape that changes"
)


@dataclass(kw_only=True)
class Guarded:
    """A plan with its guards: what it depends on outside the function's arguments."""

    holds: Callable[[], bool] = lambda: True  # whether that is unchanged
    changed: Callable[[], str | None] = lambda: None  # a description of what has changed
    # Dynamo's guards: whether a call's arguments, and all that the code reads, are unchanged; None: no guards.
    guards: Callable[[tuple[object, ...], dict[str, object]], bool] | None = None
    used: bool = False  # by a call other than the one that it was made for

    def is_valid_for(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> bool:
        return self.holds() and (self.guards is None or self.guards(arguments, keywords))


Plan = TypeVar("Plan", bound=Guarded)


class Plans(Generic[Plan]):
    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, list[Plan]] = OrderedDict()
        self._times: dict[Hashable, int] = {}  # how often a signature was planned
        self._wasted = 0
        self._unplanned_calls: OrderedDict[Hashable, int] = OrderedDict()  # how often, without having been planned

    def of(self, signature: Hashable, arguments: tuple[object, ...], keywords: dict[str, object]) -> Plan | None:
        """The plan that is valid for a call."""
        plans = self._plans.get(signature, ())
        valid = next((plan for plan in plans if plan.is_valid_for(arguments, keywords)), None)
        if valid is not None:
            valid.used = True
            with suppress(KeyError):  # another thread may just have dropped it
                self._plans.move_to_end(signature)
        return valid

    def is_worth_one(self, signature: Hashable) -> bool:
        """Whether the call is likely to be repeated; ask once for each call without a plan."""
        if signature in self._plans or self._wasted < _WASTED:
            return True
        count = self._unplanned_calls.pop(signature, 0) + 1
        if count >= _OFTEN:
            return True
        self._unplanned_calls[signature] = count
        if len(self._unplanned_calls) > _REMEMBERED:
            self._unplanned_calls.popitem(last=False)
        return False

    def count(self, signature: Hashable) -> int:
        """How often the signature was planned, including this time."""
        self._times[signature] = self._times.get(signature, 0) + 1
        return self._times[signature]

    def why_no_more(self, signature: Hashable) -> str | None:
        """Why the signature is not planned again, after ``count``; None if it may be."""
        if self._times.get(signature, 0) <= _PLANNINGS:
            return None
        last: Sequence[Plan] = self._plans.get(signature, ())
        changed = next((name for plan in reversed(last) if (name := plan.changed())), None)
        return (
            f"planned {_PLANNINGS} times already: what it reads from outside its arguments changes on every call"
            f"{f' (now: {changed})' if changed else ''}. Pass that as an argument, or keep it the same object"
        )

    def replace(self, plan: Plan, other: Plan) -> None:
        """Use another plan for the calls of this one."""
        for variants in self._plans.values():
            variants[:] = [other if variant is plan else variant for variant in variants]

    def keep(self, signature: Hashable, plan: Plan) -> None:
        variants = self._plans.setdefault(signature, [])
        variants.append(plan)
        del variants[:-_VARIANTS]
        if len(self._plans) > _SIGNATURES:
            gone, plans = self._plans.popitem(last=False)
            self._times.pop(gone, None)
            self._wasted = 0 if any(plan.used for plan in plans) else self._wasted + 1
