"""Checks the results of a plan: bitwise equal, equal up to the order of sums, or as exact as plain execution.

A plan of unchanged operations must give plain execution's bits, except for kernels that sum in another order. A plan
with compiled regions rounds in other places: its results must be no further from the exact ones than plain execution's.
The exact results are computed once for all plans of a trace, when the first plan is not equal to the bit, and the
:class:`Judge` keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, Self

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, Replay, Run, TraceT, Value
from manyhands.errors import CannotBeExact, first_line
from manyhands.parallel.way import TO_THE_BIT, Exactness, close


class Judge(Generic[TraceT, CallT, DevicesT, PlanT]):
    """Compares the results of ways to run a trace with ``expected``, those of plain execution."""

    def __init__(
        self,
        backend: Planning[TraceT, CallT, DevicesT, PlanT],
        trace: TraceT,
        call: CallT,
        expected: Sequence[Value],
        notes: list[str],
    ) -> None:
        """``notes`` receives the reason if results cannot be compared with exact ones."""
        self._backend, self._trace, self._call = backend, trace, call
        self._expected, self._notes = expected, notes

    @classmethod
    def of(
        cls,
        backend: Planning[TraceT, CallT, DevicesT, PlanT],
        trace: TraceT,
        call: CallT,
        plainly: Run,
        notes: list[str],
    ) -> Self:
        """A judge with plain execution's results, for numbers that reveal differences if the function accepts them."""
        varied = backend.with_varied_numbers(call)
        if varied is not call:
            try:
                return cls(backend, trace, varied, backend.expected(trace, varied, plainly), notes)
            except Exception as error:
                notes.append(
                    "all numbers of an argument are equal, so comparing results proves little; "
                    f"the function does not take others ({first_line(error)})"
                )
        return cls(backend, trace, call, backend.expected(trace, call, plainly), notes)

    def results_of(self, run: Replay) -> list[Value]:
        """The results of a run for the same numbers."""
        return self._backend.observed(self._trace, self._call, run)

    def results_of_function(self, function: Run) -> list[Value]:
        """The results of another way of plain execution for the same numbers."""
        return self._backend.expected(self._trace, self._call, function)

    def refused(self, results: Sequence[Value]) -> tuple[str | None, Exactness]:
        """Why results are not right, or None; and how close they are."""
        if self._backend.overlapping(results) - self._backend.overlapping(self._expected):
            return "two of its results share memory", Exactness(False, "not comparable")
        same, difference = self._backend.equal(results, self._expected)
        if same:
            return None, TO_THE_BIT
        if self._exact is not None:
            try:
                verdict = self._backend.verdict(self._trace, self._call, results, self._expected, self._exact)
            except CannotBeExact as error:
                self._note(error)
            else:
                return None if verdict.accepted else f"it is {verdict.words}", Exactness(False, verdict.words)
        refused = difference > self._trace.close
        return f"its results differ by {difference:.1e}" if refused else None, close(difference)

    @functools.cached_property
    def _exact(self) -> list[Value] | None:
        """Exact results; None for uncompiled operations, and if they cannot be computed."""
        if self._trace.as_written is None:
            return None
        try:
            return self._backend.exact(self._trace, self._call)
        except CannotBeExact as error:
            self._note(error)
            return None

    def _note(self, error: CannotBeExact) -> None:
        note = f"compiled regions are compared with plain execution, not with exact results: {error}"
        if note not in self._notes:
            self._notes.append(note)
