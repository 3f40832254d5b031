"""Profiles and links as JSON files, validated on reading, because a file from outside may contain anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands.errors import BadProfile, type_in_words

SCHEMA = 1


def read(path: Path, kind: str) -> dict[str, Any]:
    """Read the fields of a file; raises if the file has another version."""
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise BadProfile(f"the {kind} {str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise wrong(str(path), kind, f"no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise wrong(str(path), kind, f"{type_in_words(fields)} instead of an object")
    schema = fields.get("schema")
    if schema != SCHEMA:
        raise BadProfile(
            f"the {kind} {str(path)!r} has version {schema!r}, this manyhands reads version {SCHEMA}: measure again"
        )
    return fields


def write(path: Path, fields: dict[str, Any], kind: str) -> Path:
    try:
        path.write_text(json.dumps(fields, indent=2) + "\n")
    except OSError as error:
        raise BadProfile(f"the {kind} cannot be written to {str(path)!r}: {error.strerror or error}") from error
    return path


def wrong(where: str, kind: str, why: str) -> BadProfile:
    return BadProfile(f"{where!r} is not a {kind} of manyhands: {why}")
