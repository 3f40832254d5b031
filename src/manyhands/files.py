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
    """The path, if a file with one of these suffixes can be written there; ``verb`` is the call that errors name."""
    path = Path(path)
    if path.suffix.lower() not in suffixes and not path.is_dir():
        names = " or ".join(repr(path.with_suffix(suffix).name) for suffix in suffixes)
        raise EngineError(f"{verb}({str(path)!r}): the suffix says what is written; write {names}")
    check_writable(path, EngineError)
    return path
