"""Why a job failed: found by experiment, and reported only where it is proved.

PyTorch says what an operation refused, not what was wrong with the user's data. When a job has failed, its first
samples go through the model and the loss again. If that fails too, the usual mistakes are corrected, one at a time and
then several; the first correction that works is reported. For example samples of float64 (NumPy's default) and labels
of int32 for a model of float32::

    as they are                       fails
    samples as float32                fails
    labels as int64                   fails
    samples as float32, labels as int64   works: both are reported
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from manyhands.amounts import counted
from manyhands.backends.torch import compat
from manyhands.errors import type_in_words
from manyhands.training import refusals
from manyhands.training.evaluation.inputs import LABELS
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, map_tensors, tensors_in
from manyhands.training.torch.data.samples import can_be_read, few_samples
from manyhands.training.torch.data.sources import Samples
from manyhands.training.torch.evaluation import predicted
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Supervised, inputs_and_target, placed
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.eager import NumberFormat

_FEW = 4
_CHANNELS = 4  # of an image, at most
_AT_ONCE = 3  # changes that are tried together
_Lesson = Callable[[Job], str | None]
_Change = Callable[[Batch], Batch]
_Call = Callable[[torch.nn.Module, Any], Any]


def of(job: Job, error: Exception) -> str | None:
    """What to change so that the model can be trained with these data; None if no change is known to help."""
    if not can_be_read(job.train):
        return None
    if (words := _of_training(job, error)) is not None:
        return words
    if job.test is None or not can_be_read(job.test) or not _works(job, few_samples(job.train, _FEW)):
        return None
    words = _of_training(dataclasses.replace(job, train=job.test, test=None), error)
    return None if words is None else f"the test data are the cause: {words}"


def of_prediction(job: Job) -> str | None:
    """What to change for a prediction: samples of a dtype or a shape that the model does not take."""
    if not can_be_read(job.train):
        return None
    with contextlib.suppress(Exception):
        samples = few_samples(job.train, _FEW)
        if isinstance(samples, Mapping):
            return _of_prediction_by_name(job, samples)
        batch = tuple(samples) if isinstance(samples, (tuple, list)) else (samples,)
        inputs = batch if job.inputs is None else job.inputs.of(batch)
        reason = _refusal(job, inputs)
        if reason is not None:
            for words, change in _changes(job, (*inputs, None)):
                if _refusal(job, change((*inputs, None))[:-1]) is None:
                    return words
        return reason
    return None


def _of_prediction_by_name(job: Job, batch: Mapping[str, Any]) -> str | None:
    """A model that takes its inputs by name; an encoder-decoder may make the decoder's inputs of the labels."""
    reason = _refusal(job, batch, lambda model, batch: predicted(model, batch, job.inputs))
    labels = next((name for name in LABELS if name in batch), None)
    if reason is None or labels is None or _refusal(job, batch, dict_batches.output_of) is not None:
        return reason
    return (
        f"{type(job.model).__name__} needs {labels!r}, which predict(model, data) leaves out: write predict(model, "
        "data, targets=False) to give them to the model, too"
    )


def _refusal(job: Job, inputs: Any, call: _Call = lambda model, inputs: model(*inputs)) -> str | None:
    """Why a copy of the model does not take these inputs, from its own error; None if it does."""
    model, inputs = _copy(job, inputs)
    try:
        with torch.no_grad(), randomness.preserved(next(model.parameters()).device):
            call(model.eval(), inputs)
    except Exception as error:
        shapes = [tensor.shape[1:] for tensor in tensors_in(inputs) if tensor.dim()]
        return str(refusals.not_taken(model, shapes, error))
    return None


def _of_training(job: Job, error: Exception) -> str | None:
    of_data: list[_Lesson] = [_of_batches, _of_parts, _of_text, _of_pairs, _of_kinds, _of_output]
    of_model: list[_Lesson] = [functools.partial(_of_layer, error=error), _of_gradient]
    for lesson in (of_data if isinstance(job.objective, Supervised) else []) + of_model:
        with contextlib.suppress(Exception):  # nothing is to be learnt from that: the first error counts
            if (words := lesson(job)) is not None:
                return words
    return None


def _of_batches(job: Job) -> str | None:
    """A list is a dataset: each of its entries is one sample. That of a loader's batches is not."""
    entries: Any = job.train.dataset if isinstance(job.train, Samples) else None
    if not isinstance(entries, (list, tuple)) or not isinstance(entries[0], (list, tuple)):
        return None
    if not _works(job, tuple(entries[0])) or _works(job, few_samples(job.train, 1)):
        return None
    return (
        f"the data are a list of {counted(len(entries), 'batch', 'batches')}, and each entry of a list is taken for "
        "one sample: give the loader itself, or the arrays (X, y)"
    )


def _of_parts(job: Job) -> str | None:
    """More inputs than the model takes: a weight for each sample, say."""
    inputs, _ = inputs_and_target(few_samples(job.train, _FEW))
    forward = inspect.signature(job.model.forward)
    try:
        forward.bind(*inputs)
    except TypeError:
        takes = sum(
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            for parameter in forward.parameters.values()
        )
    else:
        return None
    return (
        f"a batch has {len(inputs) + 1} parts, and the model's forward takes "
        f"{counted(takes, 'input')}: the last part is the target, all others are inputs. To weigh samples, give "
        "the model a training_step(batch) that returns mh.LossSum((weight * losses).sum(), weight.sum())"
    )


_BINARY = {
    torch.nn.BCELoss: "BCELoss",
    torch.nn.BCEWithLogitsLoss: "BCEWithLogitsLoss",
    torch.nn.functional.binary_cross_entropy: "binary_cross_entropy",
    torch.nn.functional.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits",
}


def _of_pairs(job: Job) -> str | None:
    """Labels of classes for a loss that wants a target for each number of the output."""
    loss: Any = job.objective.loss  # type: ignore[attr-defined]
    name = _BINARY.get(loss if inspect.isfunction(loss) else type(loss))
    model, batch = _copy(job, few_samples(job.train, _FEW))
    inputs, target = inputs_and_target(batch)
    output = model(*inputs) if name is not None else None
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or output.shape == target.shape:
        return None
    unlike = str(refusals.unlike_target(output.shape, target.shape))
    if output.numel() == target.numel():
        return unlike if target.is_floating_point() else f"{unlike}, as floating-point numbers (.float())"
    if target.is_floating_point() or target.dim() != 1:
        return unlike
    return (
        f"{unlike}. If the targets are numbers of classes, give loss='cross_entropy', and a model without sigmoid at "
        "its end"
    )


def _of_text(job: Job) -> str | None:
    labels = few_samples(job.train, _FEW)[-1]
    if not isinstance(labels, (list, tuple)) or not labels or not isinstance(labels[0], (str, bytes)):
        return None
    return (
        f"the labels are text, as {labels[0]!r}, and a loss takes numbers: names, y = np.unique(labels, "
        "return_inverse=True) makes numbers of them"
    )


def _of_kinds(job: Job) -> str | None:
    """Samples or labels of a dtype or a shape that the model or the loss does not take."""
    batch = few_samples(job.train, _FEW)
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or _works(job, batch):
        return None
    changes = list(_changes(job, tuple(batch)))
    for count in range(1, min(len(changes), _AT_ONCE) + 1):
        for chosen in itertools.combinations(changes, count):
            changed = tuple(batch)
            for _, change in chosen:
                changed = change(changed)
            if _works(job, changed):
                return "; ".join(words for words, _ in chosen)
    return None


def _changes(job: Job, batch: tuple[Any, ...]) -> Iterator[tuple[str, _Change]]:
    """Corrections of these samples to try, each with its description."""
    kind = next((p.dtype for p in job.model.parameters() if p.is_floating_point()), torch.float32)
    others = {tensor.dtype for tensor in tensors_in(batch[:-1])} - {kind}
    if others:
        shown = ", ".join(sorted(map(_named, others)))
        yield (
            f"the samples are {shown}, the model's weights {_named(kind)}: give X.to(torch.{_named(kind)})",
            lambda batch: (*map_tensors(lambda tensor: tensor.to(kind), batch[:-1]), batch[-1]),
        )
    yield from _changes_of_axes(batch[0])
    labels = batch[-1]
    if not isinstance(labels, torch.Tensor):
        return
    if labels.dtype != torch.int64:
        yield (
            f"the labels are {_named(labels.dtype)}, and numbers of classes must be int64: give y.long()",
            lambda batch: (*batch[:-1], batch[-1].long()),
        )
    if labels.dtype != kind:
        yield (
            f"the targets are {_named(labels.dtype)}, what the model answers is {_named(kind)}: give "
            f"y.to(torch.{_named(kind)})",
            lambda batch: (*batch[:-1], batch[-1].to(kind)),
        )
    if labels.dim() == 2 and labels.shape[1] == 1:
        yield (
            "the labels have a second axis of length 1: give y.squeeze(1)",
            lambda batch: (*batch[:-1], batch[-1].squeeze(1)),
        )


def _changes_of_axes(X: Any) -> Iterator[tuple[str, _Change]]:
    if not isinstance(X, torch.Tensor):
        return
    if X.dim() == 3:
        yield (
            f"the samples have the shape {tuple(X.shape[1:])}, without the axis of channels that a convolution takes: "
            "give X.unsqueeze(1)",
            lambda batch: (batch[0].unsqueeze(1), *batch[1:]),
        )
    if X.dim() == 4 and X.shape[-1] <= _CHANNELS < X.shape[1]:
        yield (
            f"the samples have the shape {tuple(X.shape[1:])}, with the channels last, and PyTorch takes them first: "
            "give X.permute(0, 3, 1, 2)",
            lambda batch: (batch[0].permute(0, 3, 1, 2), *batch[1:]),
        )
    if X.is_floating_point():
        yield (
            f"the samples are {_named(X.dtype)}, and an embedding takes whole numbers: give X.long()",
            lambda batch: (batch[0].long(), *batch[1:]),
        )


def _named(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


# The model


def _of_output(job: Job) -> str | None:
    """A model that returns several things, or a label for each token, and a loss that takes one tensor of classes."""
    model, batch = _copy(job, few_samples(job.train, _FEW))
    inputs, target = inputs_and_target(batch)
    output = model(*inputs)
    loss: Any = job.objective.loss  # type: ignore[attr-defined]
    module = getattr(loss, "__module__", "") if callable(loss) else ""
    if not str(module).startswith("torch."):
        return None
    name = getattr(loss, "__name__", f"{type(loss).__name__}()")
    call = f"torch.nn.{name}" if isinstance(loss, torch.nn.Module) else f"torch.nn.functional.{name}"
    if isinstance(output, torch.Tensor):
        if not _for_tokens(output, target):
            return None
        loss(output.flatten(0, -2), target.flatten())  # it has to work to be advised
        shape, labels = tuple(output.shape[1:]), tuple(target.shape[1:])
        return (
            f"the model gives the shape {shape} for a sample with {labels} labels, and {name} takes classes first: "
            f"give loss=lambda output, y: {call}(output.flatten(0, -2), y.flatten())"
        )
    kind, part, scores = _part(output)
    arguments = f"output{part}.flatten(0, -2), y.flatten()" if _for_tokens(scores, target) else f"output{part}, y"
    return f"the model gives {kind}, and {name} takes one tensor: give loss=lambda output, y: {call}({arguments})"


def _part(output: Any) -> tuple[str, str, Any]:
    """What a model gives that is no tensor, in words; the code that takes the part for a loss, and this part."""
    if isinstance(output, Mapping):
        key = next(iter(output))
        return f"{type_in_words(output)} with {', '.join(map(repr, output))}", f"[{key!r}]", output[key]
    if isinstance(output, (tuple, list)):
        shapes = ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else "?" for part in output)
        return f"{type_in_words(output)} of {counted(len(output), 'part')} ({shapes})", "[0]", output[0]
    return type_in_words(output), ".logits", getattr(output, "logits", None)


def _for_tokens(scores: Any, target: Any) -> bool:
    """Whether each sample has several labels, and the scores of their classes are last, as in language models."""
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return False
    return target.dim() > 1 and scores.shape[:-1] == target.shape


def _of_layer(job: Job, error: Exception) -> str | None:
    """Which layer fails as the job did, what it takes, and what it gets."""
    model, batch = _copy(job, few_samples(job.train, _FEW))
    running: list[tuple[str, torch.nn.Module, Any]] = []
    for name, layer in model.named_modules():
        if not any(True for _ in layer.children()):
            layer.register_forward_pre_hook(lambda layer, input_, name=name: running.append((name, layer, input_)))
            layer.register_forward_hook(lambda *_: running.pop() and None)
    try:
        _loss(job, model, batch)
    except Exception as again:
        if not running or not running[-1][2] or not isinstance(running[-1][2][0], torch.Tensor):
            return None
        if _without_numbers(str(again).splitlines()[0]) not in _without_numbers(str(error)):
            return None
        name, layer, (input_, *_) = running[-1]
        samples = batch[0] if isinstance(batch, (tuple, list)) else None
        return _misfit(f"the layer {name!r}, {layer}," if name else f"{layer}", layer, input_, input_ is samples, again)
    return None


def _without_numbers(text: str) -> str:
    """The text with its numbers masked: batch sizes differ between the job and a few samples."""
    return re.sub(r"\d+", "#", text)


def _misfit(layer_name: str, layer: Any, input_: torch.Tensor, direct: bool, error: Exception) -> str:
    shape, gets = tuple(input_.shape), "the samples have" if direct else "it gets"
    kind = type(layer).__name__
    if isinstance(layer, torch.nn.Linear) and shape[-1] != layer.in_features:
        says = f"{layer_name} takes {counted(layer.in_features, 'number')} per sample, and {gets} {shape[-1]:,}"
        if input_[0].numel() == layer.in_features:
            return f"{says} on their last axis (shape {shape}): put torch.nn.Flatten() before it, or give X.flatten(1)"
        return f"{says} (shape {shape}): make it {kind}({shape[-1]}, {layer.out_features}), or give it other samples"
    if isinstance(layer, compat.Convolution) and input_.dim() == layer.weight.dim() and shape[1] != layer.in_channels:
        says = f"{layer_name} takes {counted(layer.in_channels, 'channel')}, and {gets} {shape[1]} (shape {shape})"
        return f"{says}: make it {kind}({shape[1]}, {layer.out_channels}, ...), or give it other samples"
    if isinstance(layer, torch.nn.Embedding) and not input_.is_floating_point():
        entries = layer.num_embeddings
        low, high = int(input_.min()), int(input_.max())
        if low < 0 or high >= entries:
            return f"{layer_name} has entries 0 to {entries - 1}, and {gets} numbers from {low} to {high}"
    return f"{layer_name} does not take an input of the shape {shape}: {str(error).splitlines()[0]}"


def _of_gradient(job: Job) -> str | None:
    model, batch = _copy(job, few_samples(job.train, _FEW))
    if _loss(job, model, batch).requires_grad:
        return None
    return (
        "the loss does not depend on the model's weights, so there are no gradients: compute it without "
        "torch.no_grad(), .detach(), .item() and NumPy"
    )


def _copy(job: Job, batch: Batch) -> tuple[torch.nn.Module, Batch]:
    """A copy of the model, and the samples on its device; both in float64 if the job is."""
    model = checks.copied(job.model)
    device = next(model.parameters()).device
    number_format = NumberFormat(dtype=torch.float64 if job.settings.precision == "fp64" else None)
    model = model.to(number_format.dtype) if number_format.dtype is not None else model
    return model, number_format.cast(map_tensors(lambda tensor: tensor.to(device), batch))


def _loss(job: Job, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    first = next(model.parameters())
    dtype = first.dtype if job.settings.precision == "fp64" else None
    with randomness.preserved(first.device):
        return placed(job.objective, first.device, dtype)(model, batch)[0]


def _works(job: Job, batch: Batch) -> bool:
    """Whether a copy of the model makes a forward and a backward pass with these samples."""
    model, batch = _copy(job, batch)
    try:
        _loss(job, model, batch).backward()
    except Exception:
        return False
    return True
