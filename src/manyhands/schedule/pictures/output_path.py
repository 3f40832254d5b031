"""Whether a picture or a trace can be written to a path: checked before anything is run for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyhands.errors import EngineError


def to_write(path: str | Path, verb: str, suffixes: Sequence[str]) -> Path:
    """The path, if a file of one of these suffixes can be there; ``verb`` is what was called with it."""
    path = Path(path)
    called = f"{verb}({str(path)!r})"
    if path.is_dir():
        raise EngineError(f"{called}: that is a folder; write the name of a file in it, {verb + suffixes[0]!r} say")
    if path.suffix.lower() not in suffixes:
        names = " or ".join(repr(path.with_suffix(suffix).name) for suffix in suffixes)
        raise EngineError(f"{called}: the suffix says what is written; write {names}")
    if not path.parent.is_dir():
        raise EngineError(f"{called}: there is no folder {str(path.parent)!r}; make it first, or write elsewhere")
    return path
