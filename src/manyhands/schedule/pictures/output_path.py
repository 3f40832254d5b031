"""Checks that a file can be written, before anything is run for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from manyhands.errors import EngineError, ManyhandsError


def check_writable(path: Path, error: type[ManyhandsError]) -> None:
    """Raise ``error`` if a file cannot be written there."""
    folder = path.absolute().parent
    if path.is_dir():
        raise error(f"{str(path)!r} cannot be written: it is a folder")
    if not folder.is_dir():
        raise error(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise error(f"{str(path)!r} cannot be written: you have no permission to write there")


def to_write(path: str | Path, verb: str, suffixes: Sequence[str]) -> Path:
    """The path, if it has one of these suffixes and its folder exists; ``verb`` is the call that errors name."""
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
