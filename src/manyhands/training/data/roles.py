"""What the user's data are: a model or data, training or validation data, a model's inputs or a target.

The last part of a batch is the target, unless the model needs it as an input. Where it could be either,
because it would fit an optional argument, prediction asks::

    forward(x)             (X, y): y is the target
    forward(x, mask)       (X, mask): both are inputs;  (X, mask, y): y is the target
    forward(x, mask=None)  (X, something): an error; say targets=True or targets=False
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.data import loader_batches

LABELS = ("labels", "label", "targets", "target")
_NO_ARRAYS = (*LABELS, "y", "training", "train", "deterministic", "use_running_average", "rngs", "rng", "key")


# The arguments of fit(model, data, validation)


def check_order(method: str, model: Any, data: Any) -> None:
    """Refuse data in the place of the model. A model can be called, in every framework; data cannot."""
    if callable(data) and not callable(model) and not _makes_batches(data):
        raise BadSettings(
            f"{method} got {type_in_words(model)} as the model and {type_in_words(data)} as the data: the model comes "
            f"first, {method}(model, data)"
        )


def two_parts(data: Any, validation: Any, is_array: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The training and the validation part (or None) of the user's data; ``is_array`` recognises arrays."""
    if validation is not None:
        return _loader_of(_only_train(data, validation, is_array)), _loader_of(validation)
    if hasattr(data, "train_dataloader"):
        train, test = data.train_dataloader(), data.val_dataloader() if hasattr(data, "val_dataloader") else None
    elif isinstance(data, (tuple, list)) and len(data) == 2 and not is_array(data[0]):
        if isinstance(data, list) and all(_is_batch(part, is_array) for part in data):
            raise BadBatch(
                "a list of two (X, y) can be two batches, or data to train on and data to test with: give a tuple, "
                "((X, y), (X_test, y_test)), for the latter; of two batches, give the loader that made them, or "
                "(X, y) with the samples of both"
            )
        train, test = data
    else:
        train, test = data, None
    return _loader_of(train), _loader_of(test)


def _only_train(data: Any, validation: Any, is_array: Callable[[Any], bool]) -> Any:
    """The training data, if validation data are a separate argument."""
    if is_array(data) and is_array(validation):
        raise BadBatch(
            "fit(model, X, y) takes y for validation data: give both as one, fit(model, (X, y)), and validation data "
            "after them, fit(model, (X, y), (X_val, y_val))"
        )
    if hasattr(data, "train_dataloader"):
        return data.train_dataloader()
    if isinstance(data, tuple) and len(data) == 2 and all(_is_batch(part, is_array) for part in data):
        raise BadBatch("the data are a pair with validation data beside them: write fit(model, train, validation)")
    return data


def _is_batch(part: Any, is_array: Callable[[Any], bool]) -> bool:
    parts = part.values() if isinstance(part, Mapping) else part
    return isinstance(part, (tuple, list, Mapping)) and bool(part) and all(map(is_array, parts))


def _loader_of(part: Any) -> Any:
    """The user's data; a function that makes batches becomes a loader that calls it for each epoch."""
    return loader_batches.BatchFactory(part) if _makes_batches(part) else part


def _makes_batches(part: Any) -> bool:
    return inspect.isroutine(part) or isinstance(part, functools.partial)


# Inputs and targets in a batch


@dataclass(frozen=True)
class ModelInputs:
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
                f"the data have {count_of(parts, 'part')}, and {self.name} takes {self.needed} to {self.arrays:g} "
                "inputs: the last part may be an input or a target. Write predict(model, data, targets=True) if it "
                "is a target (it is "
                "not used), or targets=False if it is an input"
            )
        if parts - 1 > self.most:
            takes = f"{self.name} takes {count_of(self.most, 'input')}"
            raise BadBatch(f"the data have {count_of(parts, 'part')}, and {takes}: give (inputs..., target)")
        return parts - 1

    def of(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(batch[: self.count(len(batch))])


def inputs_of(
    call: Callable[..., Any], name: str = "the model", targets: bool | None = None, *, ignored: Sequence[str] = ()
) -> ModelInputs:
    """The inputs of a model that is called in this way; arguments that are ``ignored`` are none."""
    try:
        parameters = [each for each in inspect.signature(call).parameters.values() if each.name not in ignored]
    except (TypeError, ValueError):
        return ModelInputs(name, 1, 1, math.inf, targets)
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
    return ModelInputs(name, needed, math.inf if endless else arrays, math.inf if endless else len(positional), targets)


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
