"""Replaces attributes of other people's modules and classes for a while, and restores them exactly."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Replacements:
    """Remembers what stood there: the very object, or that there was nothing of this name."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class. What it had in itself comes back, not what it inherits."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
