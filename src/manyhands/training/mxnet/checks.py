"""Checks before a job begins, and the initial values of its parameters.

On one device they make no pass through the model or the loss. There are two exceptions: parameters may wait for a first
batch to get their shapes, and on several devices a loss that is not Gluon's is tried
(:mod:`manyhands.training.loss.loss_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mxnet import autograd, gluon

from manyhands.backends.mxnet import devices as backend
from manyhands.backends.mxnet.parallel import blocks_of
from manyhands.errors import BadSettings
from manyhands.training import launcher, refusals
from manyhands.training.data.labels import ClassLabels, Look, check_sources
from manyhands.training.data.sources import Arrays, Batch, Source
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import Pass, Term
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.objective import Objective, checked_output

_FEW = 2


def refuse_launcher() -> None:
    if launcher.is_launched():
        raise BadSettings(
            "RANK and WORLD_SIZE name several processes, and MXNet's packages have no distributed key-value store: "
            "start one process, which trains on all devices of its machine"
        )


def check_block(model: Any) -> None:
    if not backend.is_model(model):
        raise refusals.not_a_model(model, "a gluon.Block")


def check_model(model: Any) -> None:
    check_block(model)
    parameters = replicas.distinct(model)
    if all(parameter.grad_req == "null" for parameter in parameters):
        raise refusals.nothing_to_train(model, "set grad_req = 'write' of those that are to be trained")
    if any(parameter._stype != "default" or parameter._grad_stype != "default" for parameter in parameters):
        raise BadSettings("parameters and gradients that are sparse cannot be trained here: make the layer dense")


def check_values(model: Any) -> None:
    """Refuse to compute with a model that has no values yet."""
    check_block(model)
    if any(parameter._data is None for parameter in replicas.distinct(model)):
        raise BadSettings("the model has no values yet: model.initialize(), and call it on a few samples")


def make_parameters(model: Any, data: Source, seed: int) -> None:
    """Initialise parameters without values, by the seed; deferred ones get their shapes from a first batch."""
    missing = [
        parameter for parameter in replicas.distinct(model) if parameter._data is None and not parameter._deferred_init
    ]
    for parameter in missing:
        parameter.initialize()
    if any(parameter._deferred_init for parameter in replicas.distinct(model)) and not data.is_read_once:
        with autograd.pause():
            few = laid_for(model, data.few(_FEW, replicas.native))
            checked_output(model, few[:-1])
    if missing:
        replicas.initialise(model, seed, only=missing)


def check_labels(objective: Objective, *sources: Source | None) -> Look | None:
    """Check that the model has an output for every label: MXNet would take the nearest class."""
    if not objective.of_classes:
        return None
    objective.labels = labels = ClassLabels(floats=True, columns=True)
    return check_sources(labels, lambda batch: batch[-1] if len(batch) > 1 else None, *sources)


def check_loss(model: Any, objective: Objective, data: Source) -> list[str]:
    """Refuse a loss that is not a mean over samples; notes if that could not be checked.

    A model with dropout or statistics is in evaluation mode; all others are not, for there MXNet's max pooling keeps
    nothing of what its gradient needs, which is then any number. Gradients are not written to the parameters. MXNet's
    random numbers are not put back: every step of such a job seeds them.
    """
    parameters = replicas.distinct(model)
    trained = [parameter.list_data()[0] for parameter in parameters if parameter.grad_req != "null"]
    drops = any(getattr(layer, name, 0) for layer in blocks_of(model) for name in ("_rate", "_dropout"))
    training = not drops and len(trained) == len(parameters)

    def compute(arrays: Arrays, rows: Sequence[int]) -> Pass:
        batch = arrays.prepare(tuple(map(replicas.native, arrays.rows(rows))))
        return _pass(objective, laid_for(model, batch), trained, training)

    precisions = {np.dtype(array.dtype).name for array in trained}
    own, weigh = objective.loss is None, not objective.is_gluons  # how labels weigh in Gluon's losses is known
    return loss_trial.check_source(data, compute, precisions=precisions, own_step=own, labels_weigh=weigh)


def _pass(objective: Objective, batch: Batch, trained: Sequence[Any], training: bool) -> Pass:
    with autograd.record(train_mode=training):
        loss = objective(batch, training=True)
        # MXNet wants to see each parameter in what it differentiates, and not every one need be used.
        head = sum((0 * array.sum().astype(loss.total.dtype) for array in trained), loss.total)
    gradients = [array.asnumpy().astype(np.float64) for array in autograd.grad(head, trained, train_mode=training)]
    count = len(batch[0]) if loss.count is None else float(loss.count.asnumpy().reshape(()))
    return Pass([Term(float(loss.total.asnumpy().reshape(())), count, gradients)])


def laid_for(model: Any, batch: Batch) -> Batch:
    """The batch on the model's device, with floating-point numbers in the model's dtype."""
    first: gluon.Parameter = replicas.distinct(model)[0]
    device, dtype = first.list_ctx()[0], first.dtype

    def move(part: Any) -> Any:
        part = part.as_in_context(device)
        return part.astype(dtype) if "float" in np.dtype(part.dtype).name else part

    return tuple(map(move, batch))
