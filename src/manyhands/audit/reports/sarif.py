"""The report as SARIF 2.1.0: code-scanning annotations.

Files of the working folder are given relative to it (``%SRCROOT%``), as code hosts want them; all others absolute.
"""

from __future__ import annotations

import hashlib
import linecache
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from manyhands import __version__
from manyhands.amounts import seconds
from manyhands.audit.kinds import Kind
from manyhands.audit.reports.report import Finding, Report

_ROOT = "%SRCROOT%"
_KINDS = list(Kind)


def log(report: Report) -> dict[str, Any]:
    """One run with one result per finding."""
    driver = {
        "name": "manyhands audit",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_rule(kind, report.frameworks[0] if report.frameworks else "torch") for kind in _KINDS],
    }
    notes = [{"level": "note", "message": _message(note)} for note in (report.verdict, *report.notes) if note]
    invocation = {
        "executionSuccessful": report.ended in ("normally", "enough"),
        "toolExecutionNotifications": notes,
    }
    seen: Counter[str] = Counter()
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_ROOT: {"uri": f"{Path.cwd().as_uri().rstrip('/')}/"}},
        "results": [_result(finding, report, seen) for finding in report.findings],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _rule(kind: Kind, framework: str) -> dict[str, Any]:
    words = "".join(word.capitalize() for word in kind.value.split("-"))
    return {
        "id": kind.value,
        "name": words,
        "shortDescription": {"text": _sentence(kind.title)},
        "fullDescription": {"text": f"{_sentence(kind.title)} Meanwhile it launches no work, and the device idles."},
        "help": {"text": _sentence(kind.cure_in(framework))},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance"]},
    }


def _result(finding: Finding, report: Report, seen: Counter[str]) -> dict[str, Any]:
    steps = report.counted_steps or 1
    waited = f"{seconds(finding.waited / steps)} {'a step' if report.counted_steps else 'in all'}"
    predicted = " (predicted)" if report.predicted else ""
    gain = ""
    if finding.moves:
        gain = " Removing it alone gains nothing: the next wait takes as much longer."
    elif finding.gained is not None:
        gain = f" Removing it gains {seconds(finding.gained / steps)}."
    inside = f" It happens in {finding.library}." if finding.library else ""
    digest = hashlib.sha256("\0".join((finding.file, finding.source, finding.kind)).encode()).hexdigest()[:16]
    seen[digest] += 1
    return {
        "ruleId": finding.kind,
        "ruleIndex": [kind.value for kind in _KINDS].index(finding.kind),
        "level": "note" if finding.moves else "warning",
        "message": _message(f"{_sentence(finding.what)[:-1]}: {waited}{predicted}.{inside}{gain} Cure: {finding.cure}"),
        "locations": [{"physicalLocation": _location(finding)}],
        "partialFingerprints": {"primaryLocationLineHash": f"{digest}:{seen[digest]}"},
    }


def _location(finding: Finding) -> dict[str, Any]:
    path = Path(finding.file)
    if path.is_absolute():
        place = {"uri": path.as_uri()}
    else:
        place = {"uri": quote(finding.file.replace("\\", "/"))}
        if path.is_file():
            place["uriBaseId"] = _ROOT
    region: dict[str, Any] = {"startLine": finding.line}
    column = linecache.getline(finding.file, finding.line).find(finding.source) if finding.source else -1
    if column >= 0:  # the file may have been changed or be gone
        region |= {"startColumn": column + 1, "endColumn": column + 1 + len(finding.source)}
    if finding.source:
        region["snippet"] = {"text": finding.source}
    return {"artifactLocation": place, "region": region}


def _message(text: str) -> dict[str, str]:
    """Braces are doubled: a single one would begin a placeholder."""
    return {"text": text.replace("{", "{{").replace("}", "}}")}


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
