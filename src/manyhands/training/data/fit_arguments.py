"""Tells the arguments of ``fit(model, data, validation)`` apart: the model, training data and validation data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.data import loader_batches


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
        raise BadBatch(
            "the training data are a pair, (train, validation), and validation data were given beside them: write "
            "fit(model, train, validation)"
        )
    return data


def _is_batch(part: Any, is_array: Callable[[Any], bool]) -> bool:
    parts = part.values() if isinstance(part, Mapping) else part
    return isinstance(part, (tuple, list, Mapping)) and bool(part) and all(map(is_array, parts))


def _loader_of(part: Any) -> Any:
    """The user's data; a function that makes batches becomes a loader that calls it for each epoch."""
    return loader_batches.BatchFactory(part) if _makes_batches(part) else part


def _makes_batches(part: Any) -> bool:
    return inspect.isroutine(part) or isinstance(part, functools.partial)
