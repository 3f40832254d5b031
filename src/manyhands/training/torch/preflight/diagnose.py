"""Why a job failed: found by experiment, and reported only where it is proved.

PyTorch says what an operation refused, not what was wrong with the user's data. When a job has failed, its first
samples go through a copy of the model and the loss again. If that fails too, the usual mistakes are corrected, one at a
time and then several; the first correction that works is reported. For example samples of float64 (NumPy's default) and
labels of int32 for a model of float32::

    as they are                           fails
    samples as float32                    fails
    labels as int64                       fails
    samples as float32, labels as int64   works: both are reported
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from manyhands.training.torch.step.number_format import NumberFormat

_FEW = 4
_CHANNELS = 4  # of an image, at most
_AT_ONCE = 3  # corrections that are tried together


def of(job: Job, error: Exception) -> str | None:
    """What to change so that the model can be trained with these data; None if no change is known to help."""
    for data, words in ((job.train, "{}"), (job.test, "the test data are the cause: {}")):
        if data is None or not can_be_read(data):
            return None
        case = _Case(dataclasses.replace(job, train=data))
        of_data = _OF_SUPERVISED if isinstance(job.objective, Supervised) else ()
        for lesson in (_one_sample, *of_data, _layer, _gradient):
            with contextlib.suppress(Exception):  # nothing is to be learnt from that: the first error counts
                if (lesson_learnt := lesson(case, error)) is not None:
                    return words.format(lesson_learnt)
        if not case.works(case.samples()):
            return None
    return None


@dataclasses.dataclass
class _Case:
    """A job, whose samples are tried on copies of its model."""

    job: Job

    def samples(self, count: int = _FEW) -> Batch:
        return few_samples(self.job.train, count)

    def copies(self, batch: Batch) -> tuple[Any, Batch]:
        """A copy of the model, and the batch on its device; both in float64 if the job is."""
        model = checks.copied(self.job.model)
        number_format = NumberFormat(dtype=torch.float64 if self.job.settings.precision == "fp64" else None)
        model = model.to(number_format.dtype) if number_format.dtype is not None else model
        device = next(model.parameters()).device
        return model, number_format.cast(map_tensors(lambda tensor: tensor.to(device), batch))

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        first = next(model.parameters())
        dtype = first.dtype if self.job.settings.precision == "fp64" else None
        with randomness.preserved(first.device):
            return placed(self.job.objective, first.device, dtype)(model, batch)[0]

    def works(self, batch: Batch) -> bool:
        """Whether a forward and a backward pass can be made with these samples."""
        try:
            self.loss(*self.copies(batch)).backward()
        except Exception:
            return False
        return True

    def answer(self) -> tuple[Any, Any]:
        """The model's output for the samples, and their target."""
        model, batch = self.copies(self.samples())
        inputs, target = inputs_and_target(batch)
        return model(*inputs), target


def _one_sample(_: _Case, error: Exception) -> str | None:
    if "more than 1 value per channel" not in str(error):
        return None
    return (
        "BatchNorm takes two samples or more, and the last batch, or one of its micro-batches, has only one: give "
        "another batch_size or accumulate, or a DataLoader with drop_last=True"
    )


def _list_of_batches(case: _Case, _: Exception) -> str | None:
    entries: Any = case.job.train.dataset if isinstance(case.job.train, Samples) else None
    if not isinstance(entries, (list, tuple)) or not isinstance(entries[0], (list, tuple)):
        return None
    if not case.works(tuple(entries[0])) or case.works(case.samples(1)):
        return None
    return (
        f"the data are a list of {counted(len(entries), 'batch', 'batches')}, and each entry of a list is taken for "
        "one sample: give the loader itself, or the arrays (X, y)"
    )


def _too_many_parts(case: _Case, _: Exception) -> str | None:
    inputs, _target = inputs_and_target(case.samples())
    forward = inspect.signature(case.job.model.forward)
    with contextlib.suppress(TypeError):
        forward.bind(*inputs)
        return None
    needed = [each for each in forward.parameters.values() if each.default is each.empty]
    takes = sum(each.kind is not each.VAR_KEYWORD for each in needed)
    return (
        f"a batch has {len(inputs) + 1} parts, and the model's forward takes "
        f"{counted(takes, 'input')}: the last part is the target, all others are inputs. To weigh samples, give "
        "the model a training_step(batch) that returns mh.LossSum((weight * losses).sum(), weight.sum())"
    )


def _text(case: _Case, _: Exception) -> str | None:
    labels = case.samples()[-1]
    if not isinstance(labels, (list, tuple)) or not labels or not isinstance(labels[0], (str, bytes)):
        return None
    return (
        f"the labels are text, as {labels[0]!r}, and a loss takes numbers: names, y = np.unique(labels, "
        "return_inverse=True) makes numbers of them"
    )


def _pairs(case: _Case, _: Exception) -> str | None:
    """Labels of classes for binary cross-entropy, which wants a target for each number of the output."""
    if not _name_of(case.job.objective).startswith(("BCE", "binary_cross_entropy")):
        return None
    output, target = case.answer()
    if output.shape == target.shape:
        return None
    unlike = str(refusals.unlike_target(output.shape, target.shape))
    if target.is_floating_point():
        return unlike
    if output.numel() == target.numel():
        return f"{unlike}, as floating-point numbers (.float())"
    return (
        f"{unlike}. If the targets are numbers of classes, give loss='cross_entropy', and a model without sigmoid at "
        "its end"
    )


def _kinds(case: _Case, _: Exception) -> str | None:
    """Samples or labels of a dtype or a shape that the model or the loss does not take."""
    batch = tuple(case.samples())
    if len(batch) < 2 or case.works(batch):
        return None
    corrections = list(_corrections(case.job.model, batch))
    for count in range(1, _AT_ONCE + 1):
        for chosen in itertools.combinations(corrections, count):
            if case.works(functools.reduce(lambda batch, correction: correction[1](*batch), chosen, batch)):
                return "; ".join(words for words, _ in chosen)
    return None


def _corrections(model: torch.nn.Module, batch: Sequence[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What may be wrong with these samples, and what to write instead; with a function that does it."""
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kind, y = _named(weights), batch[-1]
    if found := ", ".join(sorted({_named(tensor.dtype) for tensor in tensors_in(batch[:-1])} - {kind})):
        words = f"the samples are {found}, the model's weights {kind}: give X.to(torch.{kind})"
        yield words, lambda *batch: (*map_tensors(lambda tensor: tensor.to(weights), batch[:-1]), batch[-1])
    if isinstance(X := batch[0], torch.Tensor):
        shape = tuple(X.shape[1:])
        if len(shape) == 2:
            words = f"the samples have the shape {shape}, without the axis of channels that a convolution takes"
            yield f"{words}: give X.unsqueeze(1)", lambda X, *rest: (X.unsqueeze(1), *rest)
        if len(shape) == 3 and shape[-1] <= _CHANNELS < shape[0]:
            words = f"the samples have the shape {shape}, with the channels last, and PyTorch takes them first"
            yield f"{words}: give X.permute(0, 3, 1, 2)", lambda X, *rest: (X.permute(0, 3, 1, 2), *rest)
        if X.is_floating_point():
            words = f"the samples are {_named(X.dtype)}, and an embedding takes whole numbers: give X.long()"
            yield words, lambda X, *rest: (X.long(), *rest)
    if isinstance(y, torch.Tensor):
        if y.dtype != torch.int64:
            words = f"the labels are {_named(y.dtype)}, and numbers of classes must be int64: give y.long()"
            yield words, lambda *batch: (*batch[:-1], batch[-1].long())
        if y.dtype != weights:
            words = f"the targets are {_named(y.dtype)}, what the model answers is {kind}: give y.to(torch.{kind})"
            yield words, lambda *batch: (*batch[:-1], batch[-1].to(weights))
        if y.dim() == 2 and y.shape[1] == 1:
            words = "the labels have a second axis of length 1: give y.squeeze(1)"
            yield words, lambda *batch: (*batch[:-1], batch[-1].squeeze(1))


def _named(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _output(case: _Case, _: Exception) -> str | None:
    """A model that returns several things, or a label for each token, and a loss that takes one tensor of classes."""
    (output, target), loss = case.answer(), getattr(case.job.objective, "loss", None)
    if not str(getattr(loss, "__module__", "")).startswith("torch."):
        return None
    scores, part, gives = output, "output", type_in_words(output)
    if isinstance(output, Mapping):
        key = next(iter(output))
        scores, part, gives = output[key], f"output[{key!r}]", f"{gives} with {', '.join(map(repr, output))}"
    elif isinstance(output, (tuple, list)):
        shapes = ", ".join(str(tuple(each.shape)) if isinstance(each, torch.Tensor) else "?" for each in output)
        scores, part, gives = output[0], "output[0]", f"{gives} of {counted(len(output), 'part')} ({shapes})"
    elif not isinstance(output, torch.Tensor):
        scores, part = getattr(output, "logits", None), "output.logits"
    # In language models each sample has several labels, and the scores of their classes are last.
    for_tokens = not target.is_floating_point() and target.dim() > 1
    for_tokens = for_tokens and isinstance(scores, torch.Tensor) and scores.shape[:-1] == target.shape
    name = _name_of(case.job.objective)
    call = f"torch.nn.{name}()" if isinstance(loss, torch.nn.Module) else f"torch.nn.functional.{name}"
    arguments = f"{part}.flatten(0, -2), y.flatten()" if for_tokens else f"{part}, y"
    cure = f"give loss=lambda output, y: {call}({arguments})"
    if scores is not output:
        return f"the model gives {gives}, and {name} takes one tensor: {cure}"
    if not for_tokens:
        return None
    loss(output.flatten(0, -2), target.flatten())  # type: ignore[misc]  # it has to work to be advised
    labels = f"the shape {tuple(output.shape[1:])} for a sample with {tuple(target.shape[1:])} labels"
    return f"the model gives {labels}, and {name} takes classes first: {cure}"


def _name_of(objective: Any) -> str:
    return str(getattr(objective.loss, "__name__", type(objective.loss).__name__))


_OF_SUPERVISED = (_list_of_batches, _too_many_parts, _text, _pairs, _kinds, _output)


def _layer(case: _Case, error: Exception) -> str | None:
    """Which layer fails as the job did, what it takes, and what it gets."""
    model, batch = case.copies(case.samples())
    running: list[tuple[str, Any, Any]] = []
    for name, layer in model.named_modules():
        if not any(True for _ in layer.children()):
            layer.register_forward_pre_hook(lambda layer, inputs, name=name: running.append((name, layer, inputs)))
            layer.register_forward_hook(lambda *_: running.pop() and None)
    try:
        case.loss(model, batch)
    except Exception as again:
        failed = str(again).splitlines()[0]
    else:
        return None
    if not running or re.sub(r"\d+", "#", failed) not in re.sub(r"\d+", "#", str(error)):  # batch sizes differ
        return None
    name, layer, (X, *_) = running[-1]
    shape, kind = tuple(X.shape), type(layer).__name__
    which = f"the layer {name!r}, {layer}," if name else f"{layer}"
    gets = "the samples have" if isinstance(batch, (tuple, list)) and X is batch[0] else "it gets"
    if isinstance(layer, torch.nn.Linear) and shape[-1] != layer.in_features:
        takes = f"{which} takes {counted(layer.in_features, 'number')} per sample, and {gets} {shape[-1]:,}"
        if X[0].numel() == layer.in_features:
            return f"{takes} on their last axis (shape {shape}): put torch.nn.Flatten() before it, or give X.flatten(1)"
        return f"{takes} (shape {shape}): make it {kind}({shape[-1]}, {layer.out_features}), or give it other samples"
    if isinstance(layer, compat.Convolution) and X.dim() == layer.weight.dim() and shape[1] != layer.in_channels:
        takes = f"{which} takes {counted(layer.in_channels, 'channel')}, and {gets} {shape[1]} (shape {shape})"
        return f"{takes}: make it {kind}({shape[1]}, {layer.out_channels}, ...), or give it other samples"
    if isinstance(layer, torch.nn.Embedding) and not X.is_floating_point():
        entries, low, high = layer.num_embeddings, int(X.min()), int(X.max())
        if low < 0 or high >= entries:
            return f"{which} has entries 0 to {entries - 1}, and {gets} numbers from {low} to {high}"
    return f"{which} does not take an input of the shape {shape}: {failed}"


def _gradient(case: _Case, _: Exception) -> str | None:
    if case.loss(*case.copies(case.samples())).requires_grad:
        return None
    return (
        "the loss does not depend on the model's weights, so there are no gradients: compute it without "
        "torch.no_grad(), .detach(), .item() and NumPy"
    )


# Prediction


def of_prediction(job: Job) -> str | None:
    """What to change for a prediction: samples of a dtype or a shape that the model does not take."""
    if not can_be_read(job.train):
        return None
    with contextlib.suppress(Exception):
        case = _Case(job)
        batch = case.samples()
        reason = _refusal(case, batch, lambda model, batch: predicted(model, batch, job.inputs))
        if reason is None:
            return None
        if not isinstance(batch, Mapping):
            parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
            inputs = parts if job.inputs is None else job.inputs.of(parts)
            for words, correct in _corrections(job.model, (*inputs, None)):
                if _refusal(case, correct(*inputs, None)[:-1], lambda model, inputs: model(*inputs)) is None:
                    return words
            return reason
        labels = next((name for name in LABELS if name in batch), None)
        if labels is not None and _refusal(case, batch, dict_batches.output_of) is None:
            return (  # an encoder-decoder makes the decoder's inputs of the labels
                f"{type(job.model).__name__} needs {labels!r}, which predict(model, data) leaves out: write "
                "predict(model, data, targets=False) to give them to the model, too"
            )
        return reason
    return None


def _refusal(case: _Case, batch: Any, call: Callable[[Any, Any], Any]) -> str | None:
    """Why a copy of the model does not take this batch, from its own error; None if it does."""
    model, batch = case.copies(batch)
    try:
        with torch.no_grad(), randomness.preserved(next(model.parameters()).device):
            call(model.eval(), batch)
    except Exception as error:
        inputs = batch[:-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else batch
        return str(
            refusals.not_taken(model, [tensor.shape[1:] for tensor in tensors_in(inputs) if tensor.dim()], error)
        )
    return None
