"""Errors of the trainers, in the same words in every framework."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from manyhands.errors import BadBatch, BadSettings, NotATensor, type_in_words


def not_a_model(model: Any, kind: str) -> BadSettings:
    """The error for an object that is not a model; ``kind``: what the framework trains, as ``a torch.nn.Module``."""
    if isinstance(model, type):
        name = model.__name__
        return BadSettings(f"the class {name} cannot be trained: give {kind} made of it, {name}(...) and not {name}")
    return BadSettings(f"a model of type {type(model).__name__} cannot be trained: give {kind}")


def no_target(batch: Any) -> BadBatch:
    """The error for a batch without a target where the loss needs one."""
    problem = "this one has only one part" if isinstance(batch, (tuple, list)) else f"this is {type_in_words(batch)}"
    return BadBatch(
        f"a batch (inputs, target) is needed, and {problem}: give both, or a model with its own training_step(batch)"
    )


def not_data(data: object, kinds: str) -> NotATensor:
    """The error for an object that is not data; ``kinds``: what the framework reads."""
    return NotATensor(f"a value of type {type(data).__name__} cannot be read as data: give {kinds}")


def not_a_column(name: object, part: object) -> NotATensor:
    """The error for an entry of a dict of arrays that is none."""
    return NotATensor(
        f"{name!r} of the dict is {type_in_words(part)}, which cannot be read as data: give a dict of arrays with one "
        "row per sample, or a DataLoader, whose batches may hold other values, too"
    )


def lists_of_numbers() -> NotATensor:
    return NotATensor("lists of numbers cannot be read as data: make arrays of them, (np.array(X), np.array(y))")


def not_taken(model: object, shapes: Sequence[Sequence[int]], error: Exception) -> BadBatch:
    """The error for samples that the model fails on; ``shapes``: those of a sample's inputs."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    shown = ", ".join(str(tuple(shape)) for shape in shapes)
    return BadBatch(f"a sample of the data has shape {shown}, and {type(model).__name__} does not take it ({reason})")


def other_step(model: object, name: str) -> BadSettings | None:
    """The error for a ``training_step`` that takes other arguments than a batch; None: it takes that."""
    method = getattr(model, name)
    # A Linen module in NNX: a call of the wrapper with the module's function.
    of_module = getattr(method, "keywords", {}).get("method")
    given = ("batch",) if of_module is None else ("self", "batch")
    signature = inspect.signature(of_module or method)
    try:
        signature.bind(*given)
    except TypeError:
        names = [word for word in signature.parameters if word != "self"]
        kind = type(getattr(model, "to_nnx__module", model)).__name__
        hint = ". The model holds its parameters: call self(X)" if "params" in names else ""
        return BadSettings(
            f"{name} of {kind} takes ({', '.join(names)}), and the trainer calls {name}(batch): write "
            f"def {name}(self, batch), and return the mean loss or mh.LossSum(total, count){hint}"
        )
    return None


def unlike_target(output: Sequence[int], target: Sequence[int]) -> BadBatch:
    """The error for a loss that compares number with number, of a batch's outputs and targets of these shapes."""
    output_shape, target_shape = tuple(output[1:]), tuple(target[1:])
    cure = "give targets of the output's shape"
    if output_shape == (1,) and target_shape == ():
        cure = "give y.reshape(-1, 1)"
    elif output_shape == () and target_shape == (1,):
        cure = "give y.reshape(-1)"
    return BadBatch(
        f"the model's output for a sample has shape {output_shape}, and its target {target_shape}: the loss compares "
        f"each number of the output with one target; {cure}"
    )


def not_a_loss(name: str, value: object) -> BadSettings:
    """The error for a loss, or a model's own step, that did not return a loss."""
    if value is None:
        cure = "is a `return` missing? Return"
    elif isinstance(value, Real):
        cure = "a plain number has no gradient. Without .item() or float(), return"
    else:
        cure = "return"
    return BadSettings(
        f"{name} returned {in_words(value)}: {cure} the mean loss over the samples, one number per sample, or "
        "mh.LossSum(total, count)"
    )


def in_words(value: object) -> str:
    """A value that a user's code gave, for an error."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    if (shape := getattr(value, "shape", None)) is not None:
        return f"an array of shape {tuple(shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"
