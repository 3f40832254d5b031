"""Batches that are dicts: ``model(**batch)``, and an output that has the loss, as Hugging Face's models do it.

The loss is ``output.loss``, or ``output["loss"]``. With ``loss=`` it is ``loss(output, batch)``. Parts of a batch that
``forward`` has no argument for (names of files, say) are not passed to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from manyhands.errors import BadBatch, type_in_words
from manyhands.training.data.roles import LABELS


def output_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """The model's output for a batch, each part of which is passed by name."""
    taken = _arguments_for(model, batch)
    try:
        return model(**taken)
    except TypeError as error:
        signature = inspect.signature(model.forward)
        try:
            signature.bind(**taken)
        except TypeError:
            raise BadBatch(
                f"a batch is a dict with {_list(batch)}, and each part is given to the model by name: forward of "
                f"{type(model).__name__} takes {signature}. Name the parts as its arguments; or give fit a "
                "model with training_step(batch), and predict the inputs alone"
            ) from error
        raise


def loss_of(output: Any, model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """The loss in a model's output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    name, left = type(model).__name__, [key for key in batch if key not in _arguments_for(model, batch)]
    unused = f" ({_list(left)} of the batch: forward has no argument of that name)" if left else ""
    raise BadBatch(
        f"a batch is a dict with {_list(batch)}, it was given to {name} as {name}(**batch), and there is no loss in "
        f"the output, {type_in_words(output)}{unused}. Let forward return an object with .loss or a dict with "
        "'loss'; or give the trainer loss=function of (output, batch), or the model a training_step(batch)"
    )


def logits_of(output: Any, otherwise: Any = None) -> Any:
    """The scores in an output with several parts, as Hugging Face's models name them."""
    return output.get("logits", otherwise) if isinstance(output, Mapping) else getattr(output, "logits", otherwise)


def target_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """The targets for metrics: the labels, by their usual names, or the part that the model does not take."""
    for name in LABELS:
        if name in batch:
            return batch[name]
    left = [name for name in batch if name not in _arguments_for(model, batch)]
    if len(left) == 1:
        return batch[left[0]]
    raise BadBatch(
        f"metrics compare outputs with targets, and a batch is a dict with {_list(batch)}: call the targets 'labels' "
        f"(or {_list(LABELS[1:])}), or give one part that forward of {type(model).__name__} has no argument for"
    )


class Named:
    """Makes a dict of the rows of several arrays; can be sent to a worker."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, rows: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, rows, strict=True))


def _arguments_for(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in parameters}


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
