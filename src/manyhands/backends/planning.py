"""What a call is run with, for :mod:`manyhands.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# What a user's function takes and gives can be anything.
Value = object
# A tensor of a framework: no protocol could say more of it.
Tensor = Any
# How a call is run: its tensors, and the arguments as they were given.
Run = Callable[[Sequence[Tensor], tuple[Value, ...], dict[str, Value]], Value]
