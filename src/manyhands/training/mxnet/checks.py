"""What is looked at before a job begins, and the parameters that it begins with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mxnet import autograd, gluon

from manyhands.backends import mxnet as backend
from manyhands.errors import BadBatch, BadSettings
from manyhands.training import launcher
from manyhands.training.labels import ClassLabels
from manyhands.training.mxnet import batch_norm, modes, replicas
from manyhands.training.mxnet.feed import Look
from manyhands.training.mxnet.models import initialise
from manyhands.training.mxnet.objective import Objective
from manyhands.training.settings import Settings
from manyhands.training.sources import Arrays, Batch, Source, Stream

_FEW = 2
_TRIED = 16  # samples that a loss is tried on, as a whole and in parts
_CLOSE = 1e-3


def refuse_launcher() -> None:
    if launcher.is_there():
        raise BadSettings(
            "RANK and WORLD_SIZE say that a launcher started this as one of several processes. MXNet as it can be "
            "installed has no distributed key-value store, so they could not train together: start one process, which "
            "trains on all devices of its machine"
        )


def check_model(model: Any, settings: Settings, devices: int) -> None:
    if not backend.is_model(model):
        raise BadSettings(f"a {type(model).__name__} is no model to train: give a gluon.Block")
    own = replicas.distinct(model)
    if all(one.grad_req == "null" for one in own):
        raise BadSettings(f"a {type(model).__name__} has no parameters that could be trained")
    if any(one._stype != "default" or one._grad_stype != "default" for one in own):
        raise BadSettings("parameters and gradients that are sparse cannot be trained here: make the layer dense")
    if settings.batch_stats == "global" and devices > 1 and replicas.normalises(model):
        batch_norm.check(model)


def check_parts(objective: Objective, data: Source) -> None:
    if objective.loss is not None and isinstance(data, Arrays) and len(data.arrays) < 2:
        raise BadBatch(
            "a batch (inputs, target) is needed, and there is only one part: give both, or a model with a "
            "training_step(batch) of its own"
        )


def make_parameters(model: Any, data: Source, seed: int) -> None:
    """Draw parameters that nobody initialised, by the seed, and give those a shape that wait for a first batch."""
    missing = [one for one in replicas.distinct(model) if one._data is None and not one._deferred_init]
    for parameter in missing:
        parameter.initialize()
    if any(one._deferred_init for one in replicas.distinct(model)) and can_be_read(data):
        first_answer(model, few_samples(data, _FEW))
    if missing:
        initialise(model, seed, only=missing)


def check_labels(model: Any, objective: Objective, train: Source, test: Source | None) -> Look | None:
    """Those of arrays are looked at now; what is given back looks at those of a loader, batch by batch."""
    if not objective.of_classes or not can_be_read(train):
        return None
    try:
        scores = first_answer(model, few_samples(train, _FEW))
    except BadBatch:
        raise
    except Exception:  # the first step will say it, with all that belongs to it
        return None
    if not backend.is_tensor(scores) or len(scores.shape) != 2:
        return None
    look = ClassLabels(scores.shape[1], floats=True, columns=True)
    for data in (train, test):
        if isinstance(data, Arrays) and len(data.arrays) > 1:
            look(data.arrays)
    return look


def check_loss(model: Any, objective: Objective, data: Source, parts: int) -> None:
    """Refuse a loss that is no mean over samples where a batch is processed in parts: the parts would not add up."""
    if parts == 1 or objective.is_gluons or not can_be_read(data):
        return
    try:
        batch = laid_for(model, few_samples(data, _TRIED, spread=True))
        size = min(len(batch[0]), _TRIED)
        cuts = sorted({0, min(1, size // 2), size // 2, size})
        whole, again = (_loss(objective, batch, 0, size) for _ in range(2))
        of_parts = [_loss(objective, batch, *part) for part in itertools.pairwise(cuts)]
    except Exception:  # the first step will say it, with all that belongs to it
        return
    if whole != again or not all(map(math.isfinite, whole)):  # a loss that draws random numbers says nothing
        return
    total, count = (sum(values) for values in zip(*of_parts, strict=True))
    if math.isclose(whole[0], total, rel_tol=_CLOSE, abs_tol=1e-6) and math.isclose(whole[1], count, rel_tol=_CLOSE):
        return
    raise BadSettings(
        f"the loss of {size} samples is {whole[0] / whole[1]:.6g}, but put together from {len(of_parts)} parts of them "
        f"it is {total / count:.6g}: on several devices, or with accumulate, the batch is processed in parts, and this "
        "loss would then train another model than one device does. Give a loss of one number per sample, or their "
        "mean; if it is divided by something else, as by the tokens that are not padding, return "
        "mh.LossSum(total, count)"
    )


def _loss(objective: Objective, batch: Batch, start: int, stop: int) -> tuple[float, float]:
    """A sum of losses, and what it is divided by."""
    with autograd.pause():
        loss = objective(tuple(part[start:stop] for part in batch), training=True)
    count = stop - start if loss.count is None else float(loss.count.asnumpy().reshape(()))
    return float(loss.total.asnumpy().reshape(())), count


def can_be_read(data: Source) -> bool:
    """Whether a look at the first samples takes none away, as it does where samples can be gone through only once."""
    return not (isinstance(data, Stream) and isinstance(data.loader, Iterator))


def few_samples(data: Source, count: int, *, spread: bool = False) -> Batch:
    """The first samples, or some from everywhere; for a stream its first batch. As the model will get them."""
    if isinstance(data, Arrays):
        rows = np.unique(np.linspace(0, data.count - 1, count).astype(int)) if spread else slice(count)
        return data.prepare(tuple(map(modes.native, data.rows(rows))))
    return tuple(map(modes.native, data.first_batch()))


def first_answer(model: Any, batch: Batch) -> Any:
    """What the model answers; samples of whole numbers that its layers do not take are said to be so."""
    try:
        return answer(model, batch)
    except Exception:
        kind = np.dtype(replicas.distinct(model)[0].dtype).name
        others = {np.dtype(part.dtype).name for part in batch[:-1] if "float" not in np.dtype(part.dtype).name}
        if not others or not _answers(model, (*(part.astype(kind) for part in batch[:-1]), batch[-1])):
            raise
        raise BadBatch(
            f"the samples are {', '.join(sorted(others))}, the model's weights {kind}, and MXNet does not compute with "
            f"both: give X.astype('{kind}')"
        ) from None


def _answers(model: Any, batch: Batch) -> bool:
    try:
        answer(model, batch)
    except Exception:
        return False
    return True


def answer(model: Any, batch: Batch) -> Any:
    """What the model answers, in its way of predicting."""
    with autograd.pause():
        return model(*laid_for(model, batch)[:-1])


def laid_for(model: Any, batch: Batch) -> Batch:
    """The batch where the model is, in its kind of floating-point numbers."""
    first: gluon.Parameter = replicas.distinct(model)[0]
    device, dtype = first.list_ctx()[0], first.dtype

    def laid(part: Any) -> Any:
        part = part.as_in_context(device)
        return part.astype(dtype) if "float" in np.dtype(part.dtype).name else part

    return tuple(map(laid, batch))
