"""Which findings ``--prove`` can cure automatically, how, and why it leaves the others alone."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from enum import Enum

from manyhands.audit.kinds import Kind
from manyhands.audit.reports.report import Finding


class Way(Enum):
    """What becomes of a finding in the cured run. The value is the name in ``--json``, and never changes."""

    LATE = "read-late"
    COPY = "pinned-copy"
    REMOVED = "removed"
    REWRITTEN = "rewritten"
    KEPT = "kept"


# Kinds that no rewriting of the line itself can cure, and why; the table of docs/audit.md, held by a test.
KEPT = {
    Kind.CONTROL_FLOW: "a decision in Python needs the value at once",
    Kind.SHAPE: "the size of the result is needed at once",
    Kind.IMPLICIT: "this line does not show where the operand comes from",
    Kind.COLLECTIVE: "other processes take part in it",
    Kind.LOADER: "this line does not show how many workers this machine can feed",
    Kind.LAUNCHES: "the loop has to be rewritten",
    Kind.HOST_OPERATION: "the function has to be rewritten",
}
CURED = {
    Way.LATE: "read when the steps are over",
    Way.COPY: "copied from pinned memory, without waiting",
    Way.REMOVED: "left out",
    Way.REWRITTEN: "replaced by its cure",
}
_LATE = {Kind.READ, Kind.PRINT, Kind.TO_HOST}
_COPIES = {Kind.TO_DEVICE, Kind.BLOCKING}
_DECISION = re.compile(r"^(if|elif|while|assert)\b")
_COPY_METHODS = {"Tensor.to", "Tensor.cuda", "Tensor.copy_"}


@dataclass(frozen=True)
class Choice:
    """What is done with a finding, and why."""

    way: Way
    why: str


def choose(finding: Finding) -> Choice:
    """How a finding is cured, or why it is kept."""
    kind = Kind(finding.kind)
    if finding.library is not None:
        return Choice(Way.KEPT, "the wait is inside a library")
    if finding.gained is None:
        return Choice(Way.KEPT, "it is on another thread than the steps")
    if not os.path.isfile(finding.file):
        return Choice(Way.KEPT, "its source file was not found")
    if _DECISION.match(finding.source):
        return Choice(Way.KEPT, KEPT[Kind.CONTROL_FLOW])
    if kind in _LATE:
        if finding.call.endswith(("__index__", "__getitem__", "__setitem__", ".copy_")):
            return Choice(Way.KEPT, "the value is needed at once")
        return Choice(Way.LATE, CURED[Way.LATE])
    if kind in _COPIES:
        if finding.call not in _COPY_METHODS:
            return Choice(Way.KEPT, "the tensor is made and copied in one call")
        return Choice(Way.COPY, CURED[Way.COPY])
    if kind is Kind.SYNCHRONIZE:
        return Choice(Way.REMOVED, CURED[Way.REMOVED])
    if is_statement(finding.cure):
        return Choice(Way.REWRITTEN, CURED[Way.REWRITTEN])
    return Choice(Way.KEPT, KEPT.get(kind, "the cure is not a rewriting of this line"))


def is_statement(cure: str) -> bool:
    """Whether a cure is a line of code that can stand for the user's own.

    >>> is_statement("x[0].fill_(1.0)"), is_statement("add non_blocking=True")
    (True, False)
    """
    try:
        body = ast.parse(cure).body
    except SyntaxError:
        return False
    return len(body) == 1 and isinstance(body[0], (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return))
