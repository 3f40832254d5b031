"""A job's state as bytes and JSON, for checkpoints and for the way home from a worker.

Tensors become safetensors, everything else JSON. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as _load
from safetensors.torch import save as _save

from manyhands.errors import WrongCheckpoint
from manyhands.training.settings import Settings
from manyhands.training.torch.sources import Source


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name as safetensors; those that share memory (tied weights) are written each for itself."""
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return _save(plain)


def unpack(blob: bytes) -> dict[str, torch.Tensor]:
    return _load(blob)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def restore_model(model: torch.nn.Module, blob: bytes) -> None:
    """Put weights into a model; a checkpoint of another model is refused, with the differences named."""
    saved, own = unpack(blob), model_tensors(model)
    differences = [f"{name} is missing" for name in own.keys() - saved.keys()]
    differences += [f"{name} is not in the model" for name in saved.keys() - own.keys()]
    differences += [
        f"{name} is {tuple(saved[name].shape)}, the model's is {tuple(own[name].shape)}"
        for name in own.keys() & saved.keys()
        if saved[name].shape != own[name].shape
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5]) + ("; ..." if len(differences) > 5 else "")
        raise WrongCheckpoint(f"these are weights of another model: {shown}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state by name, and the rest as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value
            elif isinstance(value, (int, float, str, bool, type(None))):
                numbers[f"{index}.{name}"] = value
            else:
                raise WrongCheckpoint(
                    f"the optimizer {type(optimizer).__name__} keeps a {type(value).__name__} as {name!r}: only "
                    "tensors and plain numbers can be saved"
                )
    return tensors, numbers


def restore_optimizer(optimizer: torch.optim.Optimizer, blob: bytes, numbers: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*unpack(blob).items(), *numbers.items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    known = sum(len(group["params"]) for group in optimizer.param_groups)
    if state and max(state) >= known:
        raise WrongCheckpoint(f"the optimizer's state is of {max(state) + 1} parameters, the model has {known}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_state(device: torch.device) -> torch.Tensor:
    """The state of this process's random numbers on its device, as bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def check_fits(saved: Mapping[str, Any], settings: Settings, data: Source, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to go on with data or settings that would make it another job."""
    before = saved["settings"]
    for name in ("batch_size", "seed"):
        if before[name] != getattr(settings, name):
            raise WrongCheckpoint(
                f"the checkpoint is of a job with {name}={before[name]}, this one has {getattr(settings, name)}: the "
                f"order of samples would not be the same. Give {name}={before[name]}"
            )
    if saved["samples"] != data.count:
        raise WrongCheckpoint(
            f"the checkpoint is of a data set of {saved['samples']} samples, this one has {data.count}"
        )
    if saved["shuffle"] != data.shuffle:
        raise WrongCheckpoint("the checkpoint is of data in another order: one is shuffled, the other is not")
    if saved["optimizer_type"] != type(optimizer).__name__:
        raise WrongCheckpoint(
            f"the checkpoint holds the state of the optimizer {saved['optimizer_type']}, this job has a "
            f"{type(optimizer).__name__}"
        )
