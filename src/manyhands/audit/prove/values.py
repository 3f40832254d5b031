"""What a second pass asks of a framework: is it on a device, keep it for later, wait for everything, the weights."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from typing import Any, cast

_NUMBERS = {"item", "asscalar", "float", "int", "complex", "str", "repr", "format"}


class Values(abc.ABC):
    """A framework's values; each framework's module ``values`` has its own kind, named ``VALUES``."""

    copies = False  # whether copies from the host are found, so that they can be cured

    def __init__(self, on_device: Callable[[Any], bool]) -> None:
        """``on_device``: whether a value is on a GPU, or on what stands in for one."""
        self.on_device = on_device

    @abc.abstractmethod
    def snapshot(self, value: Any) -> Any:
        """A copy of the value on the device, made without waiting."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Wait until the device has done everything."""

    @abc.abstractmethod
    def parameters(self, optimizer: Any) -> list[Any]:
        """What an optimizer updates, as NumPy arrays."""

    def read_by(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value on a device that ``owner.name(*args)`` reads; None: it does not wait."""
        if self.on_device(owner):
            return None if name == "to" else owner
        return args[0] if args and self.on_device(args[0]) else None

    def is_number(self, name: str, value: Any) -> bool:
        """Whether a read by this name gives a number or a text, which is immutable."""
        return name in _NUMBERS or (name == "tolist" and value.ndim == 0)

    def copied(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do ``owner.name(*args)`` from pinned memory, without waiting."""
        return getattr(owner, name)(*args, **kwargs)

    def prepare_cured(self) -> None:  # noqa: B027 - optional: most cures change their line alone
        """What a cure changes elsewhere than in its line."""


def of(framework: str) -> Values:
    """The values of a framework, which is imported with them."""
    return cast(Values, importlib.import_module(f"manyhands.audit.{framework}.values").VALUES)
