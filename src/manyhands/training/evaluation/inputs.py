"""Which parts of a batch a model takes: data for prediction may come with their targets or without.

As in training, the last part of a batch is the target, unless the model needs it as an input. Where it could be either,
because it would fit an optional argument, prediction asks::

    forward(x)             (X, y): y is the target
    forward(x, mask)       (X, mask): both are inputs;  (X, mask, y): y is the target
    forward(x, mask=None)  (X, something): an error; say targets=True or targets=False
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.amounts import counted
from manyhands.errors import BadBatch

LABELS = ("labels", "label", "targets", "target")
_NO_ARRAYS = (*LABELS, "y", "training", "train", "deterministic", "use_running_average", "rngs", "rng", "key")


@dataclass(frozen=True)
class Inputs:
    """How many inputs a model takes, and whether the caller says that the last part of the data is a target."""

    name: str  # the model's
    needed: int  # the arguments without a default
    arrays: float  # those that may be arrays, optional ones included
    most: float  # all
    targets: bool | None = None  # whether the last part is a target; None: as the model takes its arguments

    def count(self, parts: int) -> int:
        """How many of the parts of a batch are inputs.

        >>> inputs_of(lambda x: x).count(2), inputs_of(lambda x, mask: x).count(2)
        (1, 2)
        """
        if self.targets is not None:
            return max(1, parts - self.targets)
        if parts < 2 or parts <= self.needed:
            return parts
        if parts <= self.arrays < math.inf:
            raise BadBatch(
                f"the data have {counted(parts, 'part')}, and {self.name} takes {self.needed} to {self.arrays:g} "
                "inputs: the last part may be an input or a target. Write predict(model, data, targets=True) if it "
                "is a target (it is "
                "not used), or targets=False if it is an input"
            )
        if parts - 1 > self.most:
            takes = counted(self.most, "input")
            raise BadBatch(
                f"the data have {counted(parts, 'part')}, and {self.name} takes {takes}: give (inputs..., target)"
            )
        return parts - 1

    def of(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(batch[: self.count(len(batch))])

    def after(self, prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``prepare``, and then remove the target."""
        return lambda batch: self.of(prepare(batch))


def inputs_of(call: Callable[..., Any], name: str = "the model", targets: bool | None = None) -> Inputs:
    """The inputs of a model that is called in this way."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return Inputs(name, 1, 1, math.inf, targets)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = sum(parameter.default is parameter.empty for parameter in positional)
    arrays = needed
    for optional in positional[needed:]:
        if not _may_be_array(optional):
            break
        arrays += 1
    endless = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return Inputs(name, needed, math.inf if endless else arrays, math.inf if endless else len(positional), targets)


def argument_range(function: Callable[..., Any], ignored: Sequence[str] = ()) -> tuple[int, float]:
    """The fewest and the most positional arguments of a function, at least one; without those that are ``ignored``.

    >>> argument_range(lambda x, mask=None: x), argument_range(lambda *inputs: inputs)
    ((1, 2), (1, inf))
    """
    fewest: int = 0
    most: float = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            most = math.inf
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name not in ignored:
            most += 1
            fewest += parameter.default is parameter.empty
    return max(1, fewest), max(1, most)


def _may_be_array(optional: inspect.Parameter) -> bool:
    if optional.name in _NO_ARRAYS or isinstance(optional.default, (bool, int, float, str)):
        return False
    kind = optional.annotation if isinstance(optional.annotation, str) else repr(optional.annotation)
    return not any(word in kind for word in ("bool", "int", "float", "str", "Rngs"))


def input_count(call: Callable[..., Any], parts: int) -> int:
    """How many parts of a batch with a target are inputs; the last is one, too, where the model needs it.

    >>> input_count(lambda x: x, 1), input_count(lambda x: x, 2), input_count(lambda x, mask: x, 2)
    (1, 1, 2)
    """
    return parts if parts < 2 or parts == inputs_of(call).needed else parts - 1
