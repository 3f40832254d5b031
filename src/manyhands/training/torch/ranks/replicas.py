"""The model of a rank: a whole copy, equal on every rank.

Every rank makes the same update of the same weights, so replicas stay equal. Before a checkpoint they are compared:
each rank sums up every parameter on its device, and one small all-gather brings the sums together. On devices of one
kind replicas are equal to the bit: there the numbers' bits are summed, as integers and as their squares, which does not
depend on the order. Unlike devices round differently: there norms are compared, with a tolerance.

:class:`.sharding.Shards` has the same interface for a model of which every rank holds a part.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from manyhands import machine
from manyhands.errors import ResultsDiffer
from manyhands.training.torch.job import Job, NumberFormat
from manyhands.training.torch.ranks import global_batch_norm
from manyhands.training.torch.ranks.gradient_sum import Gradients, GradientSum, LocalGradients
from manyhands.training.torch.ranks.world import World

_AT_ONCE = 1 << 22  # numbers that are summed at once: each takes 16 bytes meanwhile
_TOLERANCE = 1e-2  # of a norm
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The caller's model on the rank's device, and what ranks do together with it."""

    sharded = False

    def __init__(self, job: Job, world: World, number_format: NumberFormat) -> None:
        self._job, self._world, self._number_format = job, world, number_format
        self.model = self._place_model()

    def _place_model(self) -> torch.nn.Module:
        model = self._job.model.to(self._world.device)
        if self._job.settings.precision == "fp64":
            model = model.double()
        if self._number_format.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._world.broadcast_([*model.parameters(), *model.buffers()])
        if self._job.settings.step.batch_stats == "global" and self._world.size > 1:
            global_batch_norm.use_global_statistics(model)
        return model if model.training else model.train()  # layers that the caller has frozen stay so

    def gradients(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Gradients:
        """How the gradients of these parameters become those of the whole batch."""
        if self._world.size == 1:
            return LocalGradients(optimizer)
        return GradientSum(parameters)

    def with_whole_weights(self) -> AbstractContextManager[None]:
        """Within it every rank holds all weights, so that each can evaluate on its own."""
        return nullcontext()

    def whole(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors at the first rank, for a checkpoint; all ranks take part."""
        return tensors

    def into_caller_model(self) -> torch.nn.Module:
        """After the job: the caller's model with its weights; all ranks take part."""
        return self.model

    def check(self) -> None:
        """Raise where a parameter of one rank differs from that of the first; all ranks take part."""
        if self._world.size > 1:
            check(self.model, self._world)

    def close(self) -> None:
        global_batch_norm.use_local_statistics(self.model)


def check(model: torch.nn.Module, world: World) -> None:
    kinds = world.values(_kind(world.device))
    alike = len(set(kinds)) == 1
    first, *others = world.gather(numbers_of(model, alike=alike))
    for rank, numbers in enumerate(others, 1):
        equal = numbers == first if alike else torch.isclose(numbers, first, rtol=_TOLERANCE, equal_nan=True)
        if not bool(equal.all()):
            names = [name for name, _ in model.named_parameters()]
            name = names[int((~equal.all(1)).nonzero()[0])]
            raise ResultsDiffer(
                f"the replicas of the model differ, so no checkpoint is written: the parameter {name!r} of rank {rank} "
                "is not that of rank 0. Something changes it on each device alone: a forward pass that writes to it "
                "(Embedding(max_norm=...)), an optimizer or a hook that reads the rank or the clock, or a device that "
                "computes wrongly. Train on one device, or change parameters in the optimizer's step alone"
            )


def numbers_of(model: torch.nn.Module, *, alike: bool) -> torch.Tensor:
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
