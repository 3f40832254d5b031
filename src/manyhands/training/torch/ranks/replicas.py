"""Compares the replicas of a model. Every rank makes the same update of the same weights, so these stay equal.

Each rank sums up every parameter on its device, and one small all-gather brings the sums together. On devices of one
kind replicas are equal to the bit: there the numbers' bits are summed, as integers and as their squares, which does not
depend on the order. Unlike devices round differently: there norms are compared, with a tolerance.
"""

from __future__ import annotations

import torch

from manyhands import machine
from manyhands.errors import ResultsDiffer
from manyhands.training.torch.ranks.world import World

_AT_ONCE = 1 << 22  # numbers that are summed at once: each takes 16 bytes meanwhile
_TOLERANCE = 1e-2  # of a norm
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(model: torch.nn.Module, world: World) -> None:
    """Raise where a parameter of one rank differs from that of the first; all ranks take part."""
    kinds = world.gather_bytes(_kind(world.device).encode())
    alike = len(set(kinds)) == 1
    first, *others = world.gather(figures_of(model, alike=alike))
    for rank, figures in enumerate(others, 1):
        equal = figures == first if alike else torch.isclose(figures, first, rtol=_TOLERANCE, equal_nan=True)
        if not bool(equal.all()):
            names = [name for name, _ in model.named_parameters()]
            name = names[int((~equal.all(1)).nonzero()[0])]
            raise ResultsDiffer(
                f"the replicas of the model differ, so no checkpoint is written: the parameter {name!r} of rank {rank} "
                "is not that of rank 0. Something changes it on each device alone: a forward pass or training_step "
                "that writes to it (Embedding(max_norm=...), a codebook), an optimizer or a hook that reads the rank, "
                "the clock or a random generator of its own, or a device that computes wrongly. Train on one device, "
                "or change parameters in the optimizer's step alone"
            )


def figures_of(model: torch.nn.Module, *, alike: bool) -> torch.Tensor:
    """A row for each parameter: the sums of its bits, or its norm."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    if alike:
        return torch.stack([_sums_of_bits(parameter) for parameter in parameters])
    return torch.stack([torch.linalg.vector_norm(parameter).double() for parameter in parameters])[:, None]


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in numbers.view(_INTEGERS[numbers.element_size()]).reshape(-1).split(_AT_ONCE):
        wide = part.to(torch.int64)
        sums += torch.stack([wide.sum(), (wide * wide).sum()])
    return sums


def _kind(device: torch.device) -> str:
    """What has to be the same for two devices to round alike."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.host_name()
    return f"{torch.__version__} {name} {torch.get_num_threads() if device.type == 'cpu' else ''}"
