"""Why a job failed: found by experiment, and reported only where it is proved.

PyTorch says what an operation refused, not what was wrong with the user's data. When a job has failed, its first
samples go through a copy of the model and the loss again. If that fails too, the usual mistakes are corrected, one at a
time and then several; the first correction that works is reported. For example samples of float64 (NumPy's default) and
labels of int32 for a model of float32::

    as they are                           fails
    samples as float32                    fails
    labels as int64                       fails
    samples as float32, labels as int64   works: both are reported

What other trainers call an option, and what every framework refuses: :mod:`manyhands.training.refusals`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.training import refusals
from manyhands.training.data.roles import LABELS
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, map_tensors, tensors_in
from manyhands.training.torch.data.sources import Samples
from manyhands.training.torch.evaluation import own_predict_step, predict
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective, Supervised, place
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.state import randomness

_FEW = 4
_CHANNELS = 4  # of an image, at most
_AT_ONCE = 3  # corrections that are tried together
# What PyTorch says, where it says enough
_SAID = {
    "more than 1 value per channel": "BatchNorm takes two samples or more, and the last batch, or one of its "
    "micro-batches, has only one: give another batch_size or accumulate, or a DataLoader with drop_last=True",
    "does not require grad": "the loss does not depend on the model's weights, so there are no gradients: compute it "
    "without torch.no_grad(), .detach(), .item() and NumPy",
}
_IN_BF16 = (
    "the model works in float32 and fails in bfloat16, which precision='auto' has chosen for this hardware: give "
    "precision='fp32'"
)
Tried = tuple[Any, ...]  # the inputs, the target and the loss of a trial
Correction = tuple[str, Callable[..., Tried]]  # what went wrong and what to write instead; and a function that does it


def of(job: Job, error: Exception) -> str | None:
    """What to change so that the model can be trained with these data; None if no change is known to help."""
    for words, lesson in _SAID.items():
        if words in str(error):
            return lesson
    for data, words in ((job.train, "{}"), (job.test, "the test data are the cause: {}")):
        if data is None or not data.rereadable:
            return None
        case = _Case(dataclasses.replace(job, train=data))
        if case.error(case.batch) is not None:
            found = _correct_dtype(case) or _layer(case, error)
            return None if found is None else words.format(found)
        if job.settings.precision == "auto" and _is_cause(_Case(case.job, bf16=True).error(case.batch), error):
            return _IN_BF16
    return None


class _Case:
    """A job, whose first samples are tried on copies of its model."""

    def __init__(self, job: Job, *, bf16: bool = False) -> None:
        self.job, self._bf16 = job, bf16
        self._dtype = torch.float64 if job.settings.precision == "fp64" else None
        try:
            self.batch = job.train.few(_FEW)
        except Exception:  # samples that cannot be collated
            self.batch = job.train.few(1)

    def copies(self, batch: Batch) -> tuple[Any, Any]:
        """A copy of the model, and the batch on its device; both in float64 if the job is."""
        model = checks.copy_of(self.job.model)
        device = next(model.parameters()).device

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, self._dtype if tensor.is_floating_point() else None)

        return model.to(device, self._dtype), map_tensors(move, batch)

    def train(self, model: torch.nn.Module, batch: Batch, objective: Objective | None = None) -> None:
        """A forward and a backward pass."""
        objective = place(objective or self.job.objective, next(model.parameters()).device, self._dtype)
        objective(model, batch)[0].backward()

    def error(self, batch: Batch, work: Callable[[Any, Any], Any] | None = None) -> Exception | None:
        """What training, or this work, fails with on copies of the model and of the batch."""
        try:
            model, batch = self.copies(batch)
            device = next(model.parameters()).device
            with randomness.preserve(device), torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
                (work or self.train)(model, batch)
        except Exception as error:
            return error
        return None


def _correct_dtype(case: _Case) -> str | None:
    """The first corrections that make a supervised job work."""
    objective, batch = case.job.objective, case.batch
    if not isinstance(objective, Supervised) or isinstance(batch, Mapping) or len(batch) < 2:
        return None
    if isinstance(labels := batch[-1], (list, tuple)) and labels and isinstance(labels[0], (str, bytes)):
        return (
            f"the labels are text, as {labels[0]!r}, and a loss takes numbers: names, y = np.unique(labels, "
            "return_inverse=True) makes numbers of them"
        )
    corrections = [*_of_batches(case), *_of_samples(case.job.model, batch), *_of_outputs(case, objective.loss)]
    for count in range(1, _AT_ONCE + 1):
        for chosen in itertools.combinations(corrections, count):
            with contextlib.suppress(Exception):
                *tried, loss = functools.reduce(lambda tried, each: each[1](*tried), chosen, (*batch, objective.loss))
                corrected = functools.partial(case.train, objective=dataclasses.replace(objective, loss=loss))
                if case.error(tuple(tried), corrected) is None:
                    return "; ".join(words for words, _ in chosen)
    return None


def _of_batches(case: _Case) -> Iterator[Correction]:
    entries: Any = case.job.train.dataset if isinstance(case.job.train, Samples) else None
    if isinstance(entries, (list, tuple)) and isinstance(entries[0], (list, tuple)):
        words = (
            f"the data are a list of {count_of(len(entries), 'batch', 'batches')}, and each entry of a list is taken"
        )
        words += " for one sample: give the loader itself, or the arrays (X, y)"
        yield words, lambda *tried: (*entries[0], tried[-1])
    parameters = inspect.signature(case.job.model.forward).parameters.values()
    takes = sum(each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in parameters)
    if takes < len(case.batch) - 1:
        yield (
            f"a batch has {len(case.batch)} parts, and the model's forward takes "
            f"{count_of(takes, 'input')}: the last part is the target, all others are inputs. To weigh samples, give "
            "the model a training_step(batch) that returns mh.LossSum((weight * losses).sum(), weight.sum())",
            lambda *tried: (*tried[: takes + 1], tried[-1]),
        )


def _of_samples(model: torch.nn.Module, batch: Any) -> Iterator[Correction]:
    """Samples and labels of a dtype or a shape that the model or the loss does not take."""
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    kind, X, y = _name_of(weights), batch[0], batch[-1]

    def target(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tried]:
        return lambda *tried: (*tried[:-2], change(tried[-2]), tried[-1])

    if found := ", ".join(sorted({_name_of(tensor.dtype) for tensor in tensors_in(batch[:-1])} - {kind})):
        words = f"the samples are {found}, the model's weights {kind}: give X.to(torch.{kind})"
        yield words, lambda *tried: (*map_tensors(lambda tensor: tensor.to(weights), tried[:-2]), *tried[-2:])
    if isinstance(X, torch.Tensor):
        shape = tuple(X.shape[1:])
        if len(shape) == 2:
            words = f"the samples have the shape {shape}, without the axis of channels that a convolution takes"
            yield f"{words}: give X.unsqueeze(1)", lambda X, *rest: (X.unsqueeze(1), *rest)
        if len(shape) == 3 and shape[-1] <= _CHANNELS < shape[0]:
            words = f"the samples have the shape {shape}, with the channels last, and PyTorch takes them first"
            yield f"{words}: give X.permute(0, 3, 1, 2)", lambda X, *rest: (X.permute(0, 3, 1, 2), *rest)
        if X.is_floating_point():
            words = f"the samples are {_name_of(X.dtype)}, and an embedding takes whole numbers: give X.long()"
            yield words, lambda X, *rest: (X.long(), *rest)
    if isinstance(y, torch.Tensor):
        if y.dtype != torch.int64:
            words = f"the labels are {_name_of(y.dtype)}, and numbers of classes must be int64: give y.long()"
            yield words, target(lambda y: y.long())
        if y.dtype != weights:
            words = f"the targets are {_name_of(y.dtype)}, what the model answers is {kind}: give y.to(torch.{kind})"
            yield words, target(lambda y: y.to(weights))
        if y.dim() == 2 and y.shape[1] == 1:
            yield "the labels have a second axis of length 1: give y.squeeze(1)", target(lambda y: y.squeeze(1))


def _name_of(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _of_outputs(case: _Case, loss: Any) -> Iterator[Correction]:
    """A model that returns several things, or a label for each token, and a loss that takes one tensor of classes."""
    if not str(getattr(loss, "__module__", "")).startswith("torch."):
        return
    try:
        model, batch = case.copies(case.batch)
        output = model(*batch[:-1])
    except Exception:  # another correction is needed
        return
    part: str = "output.logits"
    pick: Callable[[Any], Any] = operator.attrgetter("logits")
    if isinstance(output, (Mapping, tuple, list)):
        key = next(iter(output)) if isinstance(output, Mapping) else 0
        part, pick = f"output[{key!r}]", operator.itemgetter(key)
    name = str(getattr(loss, "__name__", type(loss).__name__))
    call = f"torch.nn.{name}()" if isinstance(loss, torch.nn.Module) else f"torch.nn.functional.{name}"
    words = f"the model gives {refusals.in_words(output)}, and {name} takes one tensor"
    if isinstance(output, torch.Tensor):
        labels = f"the shape {tuple(output.shape[1:])} for a sample with {tuple(batch[-1].shape[1:])} labels"
        part, pick, words = "output", lambda output: output, f"the model gives {labels}, and {name} takes classes first"
    else:
        cure = f"{words}: give loss=lambda output, y: {call}({part}, y)"
        yield cure, lambda *tried: (*tried[:-1], lambda output, y: loss(pick(output), y))
    # In language models each sample has several labels, and the scores of their classes are last.
    cure = f"{words}: give loss=lambda output, y: {call}({part}.flatten(0, -2), y.flatten())"
    yield cure, lambda *tried: (*tried[:-1], lambda output, y: loss(pick(output).flatten(0, -2), y.flatten()))


def _layer(case: _Case, error: Exception) -> str | None:
    """Which layer fails as the job did, what it takes, and what it gets."""
    running: list[tuple[str, Any, Any]] = []
    seen: list[Any] = []

    def watch(model: torch.nn.Module, batch: Batch) -> None:
        seen.append(batch)
        for name, layer in model.named_modules():
            if not any(True for _ in layer.children()):
                layer.register_forward_pre_hook(lambda layer, inputs, name=name: running.append((name, layer, inputs)))
                layer.register_forward_hook(lambda *_: running.pop() and None)
        case.train(model, batch)

    failed = case.error(case.batch, watch)
    if not running or not _is_cause(failed, error):
        return None
    name, layer, (X, *_) = running[-1]
    shape, kind = tuple(X.shape), type(layer).__name__
    which = f"the layer {name!r}, {layer}," if name else f"{layer}"
    gets = "the samples have" if isinstance(seen[0], (tuple, list)) and X is seen[0][0] else "it gets"
    if isinstance(layer, torch.nn.Linear) and shape[-1] != layer.in_features:
        takes = f"{which} takes {count_of(layer.in_features, 'number')} per sample, and {gets} {shape[-1]:,}"
        if X[0].numel() == layer.in_features:
            return f"{takes} on their last axis (shape {shape}): put torch.nn.Flatten() before it, or give X.flatten(1)"
        return f"{takes} (shape {shape}): make it {kind}({shape[-1]}, {layer.out_features}), or give it other samples"
    if isinstance(layer, compat.Convolution) and X.dim() == layer.weight.dim() and shape[1] != layer.in_channels:
        takes = f"{which} takes {count_of(layer.in_channels, 'channel')}, and {gets} {shape[1]} (shape {shape})"
        return f"{takes}: make it {kind}({shape[1]}, {layer.out_channels}, ...), or give it other samples"
    if isinstance(layer, torch.nn.Embedding) and not X.is_floating_point():
        entries, low, high = layer.num_embeddings, int(X.min()), int(X.max())
        if low < 0 or high >= entries:
            return f"{which} has entries 0 to {entries - 1}, and {gets} numbers from {low} to {high}"
    return f"{which} does not take an input of the shape {shape}: {str(failed).splitlines()[0]}"


def _is_cause(again: Exception | None, error: Exception) -> bool:
    """Whether a trial has failed as the job did."""
    first = next(iter(str(again).splitlines()), "")
    return again is not None and re.sub(r"\d+", "#", first) in re.sub(r"\d+", "#", str(error))  # batch sizes differ


# Prediction


def of_prediction(job: Job) -> str | None:
    """What to change for a prediction: samples of a dtype or a shape that the model does not take."""
    case = _Case(job) if job.train.rereadable and own_predict_step(job.model) is None else None

    def error(batch: Batch, call: Callable[[Any, Any], Any]) -> Exception | None:
        with torch.no_grad():
            return None if case is None else case.error(batch, lambda model, batch: call(model.eval(), batch))

    if case is None or (reason := error(case.batch, lambda model, batch: predict(model, batch, job.inputs))) is None:
        return None
    inputs = batch = case.batch
    if isinstance(batch, Mapping):
        labels = next((name for name in LABELS if name in batch), None)
        if labels is not None and error(batch, dict_batches.output_of) is None:
            return (  # an encoder-decoder makes the decoder's inputs of the labels
                f"{type(job.model).__name__} needs {labels!r}, which predict(model, data) leaves out: write "
                "predict(model, data, targets=False) to give them to the model, too"
            )
    else:
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        inputs = parts[:-1] or parts
        tried = (*(parts if job.inputs is None else job.inputs.of(parts)), None)
        for words, correct in _of_samples(job.model, tried):
            if error(correct(*tried, None)[:-2], lambda model, batch: model(*batch)) is None:
                return words
    shapes = [tensor.shape[1:] for tensor in tensors_in(inputs) if tensor.dim()]
    return str(refusals.not_taken(job.model, shapes, reason))
