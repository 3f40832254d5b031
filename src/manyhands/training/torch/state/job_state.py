"""A job's state as bytes and JSON, for checkpoints and for the way back from a worker.

Tensors become safetensors, everything else JSON. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load as _load
from safetensors.torch import save as _save

from manyhands.errors import WrongCheckpoint, type_in_words

_RUN_OPTIONS = ("lr", "capturable", "fused", "foreach")  # what the fast step or a schedule may change
_NOT_SAVED = ("params", "differentiable", *_RUN_OPTIONS)
_GROUP = "group"  # of parameters: what an optimizer counts for all of them is saved as 'group.0.step'


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name as safetensors; tensors that share memory (tied weights) are written separately."""
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return _save(plain)


def unpack(blob: bytes) -> dict[str, torch.Tensor]:
    return _load(blob)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def restore_model(model: torch.nn.Module, blob: bytes) -> None:
    """Put weights into a model; a checkpoint of another model is refused, with the differences named."""
    from manyhands.training.checkpoints.tensors import refuse_others  # with safetensors' part for NumPy

    # The model's own tensors, not views of them: one that cannot be written to is given other memory.
    current = {n: value for n, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    saved = unpack(blob)
    refuse_others(saved, current, "weights of another model")
    with torch.no_grad():
        for name, tensor in current.items():
            write(tensor, saved[name])


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set a tensor's values; an expanded tensor (many elements in one place) gets new memory if they differ."""
    if is_sharded(tensor):
        parts: Any = tensor
        parts.data.to_local().copy_(_part_of(value, tensor).to_local())
        return
    if not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        tensor.data.copy_(value)
    elif not torch.equal(tensor.data, value.to(tensor.device, tensor.dtype)):
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a sharded tensor of FSDP2; does not import DTensor."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "device_mesh")


def _part_of(value: torch.Tensor, like: torch.Tensor) -> Any:
    """A whole tensor, which every rank has, sharded like another one."""
    from torch.distributed.tensor import distribute_tensor

    parts: Any = like
    return distribute_tensor(value.to(like.device), parts.device_mesh, parts.placements, src_data_rank=None)


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state by name, and the rest as JSON."""
    tensors = {
        f"{_GROUP}.{number}.{name}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, torch.Tensor) and name not in _NOT_SAVED
    }
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value
            elif isinstance(value, (int, float, str, bool, type(None))):
                numbers[f"{index}.{name}"] = value
            else:
                kept = f"the optimizer {type(optimizer).__name__} keeps {type_in_words(value)} as {name!r}"
                raise WrongCheckpoint(f"{kept}: only tensors and plain numbers can be saved")
    return tensors, numbers


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer per group of parameters, as JSON, without its learning rate and how it runs."""
    return [
        {name: _as_lists(value) for name, value in group.items() if name not in _NOT_SAVED and _is_plain(value)}
        for group in optimizer.param_groups
    ]


def optimizer_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options that an optimizer was created with, by name; several groups have prefixes."""
    groups = optimizer_groups(optimizer)
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        group["lr"] = float(live["lr"])
    prefixes = _prefixes(optimizer)
    return {
        prefix + name: value for prefix, group in zip(prefixes, groups, strict=True) for name, value in group.items()
    }


def _prefixes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The prefix of the options of each group of parameters: nothing, its number, or the optimizer's name."""
    count = len(optimizer.param_groups)
    names = getattr(optimizer, "group_names", [""] if count == 1 else list(map(str, range(count))))
    return [f"{name}." if name else "" for name in names]


def parameter_names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str | None]]:
    """The names of an optimizer's parameters in the model, per group; None for a parameter outside the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _check_parameters(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str | None]], saved: Sequence[Sequence[str | None]]
) -> None:
    """Refuse an optimizer that has other parameters than in the checkpoint, or the same in another order."""
    for prefix, group, before in zip(_prefixes(optimizer), names, saved, strict=False):
        if list(group) != list(before):
            which = f"the optimizer (or group of parameters) {prefix[:-1]!r}" if prefix else "the optimizer"
            pairs = [(new, old) for new, old in itertools.zip_longest(group, before) if new != old]
            raise WrongCheckpoint(
                f"{which} has other parameters than in the checkpoint: {pairs[0][0]} where it had {pairs[0][1]}. Keep "
                "each optimizer's parameters, and the order of a list of optimizers"
            )


def _as_lists(value: Any) -> Any:
    """Tuples (Adam's betas) as lists: JSON knows no tuples."""
    return [_as_lists(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    finite = not isinstance(value, float) or math.isfinite(value)
    return finite and type(value) in (int, float, str, bool, type(None))


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    blob: bytes,
    numbers: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
    stays: Callable[[str], bool] = lambda name: False,
    names: tuple[Sequence[Sequence[str | None]], Sequence[Sequence[str | None]]] = ((), ()),
) -> None:
    """Give an optimizer its state; ``stays`` says which of its options do not change."""
    _check_parameters(optimizer, *names)
    state: dict[int, dict[str, Any]] = {}
    of_groups: list[tuple[int, str, torch.Tensor]] = []
    for name, value in [*unpack(blob).items(), *numbers.items()]:
        index, _, key = name.partition(".")
        if index == _GROUP:
            group_number, _, key = key.partition(".")
            of_groups.append((int(group_number), key, value))
            continue
        state.setdefault(int(index), {})[key] = value
    known = sum(len(group["params"]) for group in optimizer.param_groups)
    if state and max(state) >= known:
        raise WrongCheckpoint(f"the optimizer's state is of {max(state) + 1} parameters, the model has {known}")
    own_groups = optimizer.state_dict()["param_groups"]
    for prefix, group, saved in zip(_prefixes(optimizer), own_groups, groups, strict=False):
        for name, value in saved.items():
            if not stays(prefix + name):
                was_tuple = isinstance(group.get(name), tuple) and isinstance(value, list)
                group[name] = tuple(value) if was_tuple else value
    for number, name, value in of_groups:
        if number < len(own_groups):
            own_groups[number][name] = _where_it_counts(value, optimizer.param_groups[number])
    _load_state(optimizer, {"state": state, "param_groups": own_groups})
    settle(optimizer)


def _where_it_counts(value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of a group of parameters: counts are on the host, unless the optimizer reads them on the device."""
    if not value.dim() and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(group["params"][0].device)


def _load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer its state: tensors where their parameters are, in the parameters' dtype and memory format.

    Single numbers (NAdam's product of momenta) keep the dtype that the optimizer chose for them. The memory format
    matters: a fused kernel goes through the memory of a parameter and of its state side by side.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, before in saved["state"].items():
        if is_sharded(parameters[number]):
            for name, value in before.items():
                if isinstance(value, torch.Tensor) and value.shape == parameters[number].shape and value.dim():
                    before[name] = value if is_sharded(value) else _part_of(value, parameters[number])
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, before in saved["state"].items():
        parameter = parameters[number]
        now = optimizer.state.get(parameter, {})
        for name, value in before.items():
            if not isinstance(value, torch.Tensor) or name not in now:  # an optimizer around another has it inside
                continue
            if not value.dim():
                now[name] = now[name].to(value.dtype)
            elif value.shape == parameter.shape and now[name].stride() != parameter.stride():
                now[name] = torch.empty_like(parameter, dtype=now[name].dtype, requires_grad=False).copy_(now[name])


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's state to where its parameters are, in their dtype: the model may have been moved."""
    if not optimizer.state:
        return
    _load_state(optimizer, optimizer.state_dict())
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:  # load_state_dict leaves the count of steps where it is
            count = optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor):
                optimizer.state[parameter]["step"] = count.cpu()


def count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer count its steps on the device, if it can; existing state moves there, too."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    settle(optimizer)


def run_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """How an optimizer runs, per group of parameters."""
    return [{name: group[name] for name in _RUN_OPTIONS if name in group} for group in optimizer.param_groups]


def restore_run_options(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]], rates: Sequence[float]
) -> None:
    """Undo what the fast step or a schedule changed: the options of :func:`run_options`, and the first rates."""
    for group, saved, rate in zip(optimizer.param_groups, options, rates, strict=True):
        group.update(saved)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
    settle(optimizer)
