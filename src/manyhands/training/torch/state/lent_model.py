"""The model on loan to callbacks between two epochs: ``Callback.on_model``.

Callbacks in the process of the first rank get its own model. Those of a job with worker processes are in the caller's,
and get the caller's model with the weights of the first rank::

    first rank                    caller
    all of the model's state  ->  into the caller's model; on_model(training, model)
    into its model            <-  what on_model has changed

Then the first rank's model is sent to all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from manyhands.errors import BadSettings
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.state import job_state, module_state, randomness
from manyhands.training.torch.state.module_state import ModuleState, evaluation_mode

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank

Event = dict[str, Any]


def lend(rank: Rank, show: Callable[[torch.nn.Module], None]) -> None:
    """Show the model, and give all ranks what has changed at the first one; all take part."""
    model, world = rank.model, rank.world
    rank.share_buffers()
    before, places = ModuleState(model), _places(model)
    with _lent(model):
        show(model)
    attributes, tensors, _ = before.save()
    is_another = _places(model) != places or bool(attributes["attributes"])
    attributes, tensors, is_another = world.value_of_first((attributes, tensors, is_another))
    module_state.restore(model, attributes, tensors)
    world.broadcast_([*model.parameters(), *model.buffers()])
    if is_another:
        _check_trained(rank, [name for name, flag in attributes["trained"].items() if flag])
        rank.begin_anew()


def _places(model: torch.nn.Module) -> list[tuple[int, bool]]:
    """What a captured step knows of the tensors. It reads their values anew in each replay."""
    return [(tensor.data_ptr(), tensor.requires_grad) for tensor in [*model.parameters(), *model.buffers()]]


def _check_trained(rank: Rank, names: list[str]) -> None:
    """Refuse a model without parameters to train, and a newly trained parameter that the optimizer does not have."""
    checks.check_trainable(rank.model)
    known = {id(parameter) for group in rank.optimizer.param_groups for parameter in group["params"]}
    for name in names:
        if id(rank.model.get_parameter(name)) not in known:
            raise BadSettings(
                f"on_model set requires_grad of {name}, and the optimizer would not train it: give the optimizer all "
                "parameters from the start, also those that are frozen"
            )


@contextlib.contextmanager
def _lent(model: torch.nn.Module) -> Iterator[None]:
    """Within it callbacks have the model; afterwards modes and random numbers are as before."""
    parameters = [*model.parameters()]
    with randomness.preserve(parameters[0].device), evaluation_mode(model):
        yield
    if [*map(id, model.parameters())] != [*map(id, parameters)]:
        raise BadSettings(
            "on_model replaced, added or removed a parameter, which the optimizer does not know: write new values into "
            "it, as with torch.no_grad(): model.head.weight.copy_(values)"
        )


def sent(event: Event, say: Callable[[Event], Any]) -> Event:
    """In the worker of the first rank: say the event with the model's state, and take what callbacks changed."""
    model = event["model"]
    attributes, tensors, _ = ModuleState(model).save(whole=True)
    weights = job_state.pack(job_state.model_tensors(model))
    answer: Event = say({**event, "model": (weights, attributes, tensors)})
    weights, attributes, tensors = answer.pop("model")
    current = model.state_dict(keep_vars=True)
    for name, value in job_state.unpack(weights).items():
        job_state.write(current[name], value)
    module_state.restore(model, attributes, tensors)
    return answer


def receive(event: Event, model: torch.nn.Module, say: Callable[[Event], Event | None]) -> Event:
    """In the caller's process: say the event with the caller's model; the answer has what changed."""
    weights, attributes, tensors = event["model"]
    job_state.restore_model(model, weights)
    module_state.restore(model, attributes, tensors)
    before = ModuleState(model)
    with _lent(model):
        answer = say({**event, "model": model})
    saved = job_state.unpack(weights)
    changed = {
        name: tensor
        for name, tensor in job_state.model_tensors(model).items()
        if not torch.equal(tensor.cpu(), saved[name].to(tensor.dtype))
    }
    attributes, tensors, _ = before.save()
    return {**(answer or {}), "model": (job_state.pack(changed), attributes, tensors)}
