"""Files: checked before anything is run for them, replaced so that a kill leaves one of the two; figures; and JSON."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from manyhands.errors import EngineError, ManyhandsError, NotJson, PackageMissing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_INTEGER = 14_000  # bits; Python refuses to read back decimal numbers of more than 4300 digits


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


def new_figure(what: str, size: tuple[float, float], instead: str = "") -> Figure:
    """A figure of matplotlib. Not pyplot's: its current figure and its backend belong to the user's program."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(
            f"{what} cannot be drawn: matplotlib is not installed. Run: pip install matplotlib{instead}"
        ) from error
    return Figure(figsize=size, layout="constrained")


# Files that survive a kill: a reader sees the old file or the new one, never a part of it.


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, and return when it is on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replace the file at ``path`` with ``data``, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# JSON that reads back as an equal value of equal types


def exact_json(value: Any, name: str, *, indent: int | None = None) -> str:
    """The value as JSON; ``NotJson`` names the path of a value that JSON would change or refuse."""
    try:
        _check_json(value, name)
        return json.dumps(value, allow_nan=False, indent=indent)
    except RecursionError:
        raise NotJson(f"{name} is nested too deeply for JSON, or contains itself.") from None


def read_json(text: str | bytes) -> Any:
    """The value in a JSON text; ValueError for anything else, also for NaN and for endless nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_json(value: Any, path: str) -> None:
    # Types are compared exactly: a subclass (an enum, a NumPy float) would come back as its base.
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise NotJson(f"{path} has the key {key!r}; JSON has only strings for keys. Write str(key).")
            _check_json(item, f"{path}[{key!r}]")
    elif kind is list:
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif kind is float and not math.isfinite(value):
        raise NotJson(f"{path} is {value}, and JSON has no such number. Leave it out, or write None or a string.")
    elif kind is int and value.bit_length() > _LONGEST_INTEGER:
        raise NotJson(f"{path} is an integer too long to be read back. Write hex(value).")
    elif value is not None and kind not in (bool, int, float, str):
        raise NotJson(
            f"{path} is a {kind.__name__}, which JSON would change or refuse. Use None, booleans, numbers, strings, "
            "lists and dictionaries: float(value), list(value), or value.tolist() of an array."
        )
