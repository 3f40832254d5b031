"""Small JSON files in the user's cache folder, so that nothing is measured twice on the same hardware.

A file that is broken, foreign or of another format is ignored, and so is an error while writing: a cache is never worth
an exception. Several processes may write at once: each reads the file again, adds its entries, and renames a new file
over the old one. If two do so at the same moment, one loses its additions, and measures them again later.

The folder is ``$MANYHANDS_CACHE``, or ``$XDG_CACHE_HOME/manyhands``, or ``~/.cache/manyhands``; ``MANYHANDS_CACHE=off``
turns the cache off.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_MOST = 20_000  # entries of a file; the oldest are dropped first
_LARGEST = 8 << 20  # bytes; larger files are not read
Entries = dict[str, object]


class CacheFile:
    """The cached entries for one kind of hardware and one version of a framework.

    Args:
        topic: What the entries are, and the name of their folder.
        hardware: What they are valid for, in words.
        version: The version of the entries' format; files of another version are not read.
    """

    def __init__(self, topic: str, hardware: str, version: int) -> None:
        self._topic, self._hardware, self._version = topic, hardware, version
        folder = cache_folder()
        name = hashlib.sha256(hardware.encode()).hexdigest()[:24]
        self.path = None if folder is None else folder / topic / f"{name}.json"

    def read(self) -> Entries:
        """The entries of the file; none if the file is missing or invalid."""
        if self.path is None:
            return {}
        try:
            if self.path.stat().st_size > _LARGEST:
                return {}
            whole = json.loads(self.path.read_bytes())
            if whole["format"] != self._version or whole["hardware"] != self._hardware:
                return {}
            return {str(key): value for key, value in whole[self._topic].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def add(self, entries: Mapping[str, object]) -> bool:
        """Add these entries to the file; returns False if it cannot be written."""
        if self.path is None:
            return False
        remaining = list((self.read() | dict(entries)).items())[-_MOST:]
        text = json.dumps({"format": self._version, "hardware": self._hardware, self._topic: dict(remaining)})
        fresh = self.path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text)
            fresh.replace(self.path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            return False
        return True


def cache_folder() -> Path | None:
    """The folder of the cache; None if the cache is off."""
    folder = os.environ.get("MANYHANDS_CACHE")
    if folder is not None:
        return None if folder.strip().lower() in ("", "off", "0", "no") else Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "manyhands"
    try:
        return Path.home() / ".cache" / "manyhands"
    except RuntimeError:  # a user without a home
        return None
