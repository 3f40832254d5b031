"""Files that survive a kill: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from manyhands.errors import NotJson

_LONGEST_INTEGER = 14_000  # bits; Python refuses to read back decimal numbers of more than 4300 digits


def write(path: Path, data: bytes) -> None:
    """Write a new file, and return when it is on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replace the file at `path` with `data`, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        write(temporary, data)
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


def exact_json(value: Any, name: str, *, indent: int | None = None) -> str:
    """JSON that reads back as an equal value of equal types; `NotJson` names the path of any other value."""
    try:
        _check(value, name)
        return json.dumps(value, allow_nan=False, indent=indent)
    except RecursionError:
        raise NotJson(f"{name} is nested too deeply for JSON, or contains itself.") from None


def read_json(text: str | bytes) -> Any:
    """The value in a JSON text; ValueError for anything else, also for NaN and for endless nesting."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check(value: Any, path: str) -> None:
    # Types are compared exactly: a subclass (an enum, a NumPy float) would come back as its base.
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise NotJson(f"{path} has the key {key!r}; JSON has only strings for keys. Write str(key).")
            _check(item, f"{path}[{key!r}]")
    elif kind is list:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif kind is float and not math.isfinite(value):
        raise NotJson(f"{path} is {value}, and JSON has no such number. Leave it out, or write None or a string.")
    elif kind is int and value.bit_length() > _LONGEST_INTEGER:
        raise NotJson(f"{path} is an integer too long to be read back. Write hex(value).")
    elif value is not None and kind not in (bool, int, float, str):
        raise NotJson(f"{path} is a {kind.__name__}, which JSON would change or refuse. {_cure(value)}")


def _cure(value: Any) -> str:
    cures: dict[type, Callable[..., Any]] = {tuple: list, set: list, frozenset: list, bool: bool, int: int}
    cures |= {float: float, str: str, dict: dict}
    for kind, cure in cures.items():
        if isinstance(value, kind):
            return f"Write {cure.__name__}(value)."
    if isinstance(value, bytes):
        return "Write value.hex(), or save it as a blob."
    if hasattr(value, "tolist"):
        return "Write value.tolist() for a few numbers; save a tensor as a blob."
    return "Use None, booleans, numbers, strings, lists and dictionaries."
