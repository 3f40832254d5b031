"""``Step(shard=True)``: every rank holds a part of each parameter, of its gradient and of the optimizer's state.

PyTorch's FSDP2 (``fully_shard``) does the work. The model's blocks are gathered one after the other while they compute,
and their gradients go back to the ranks that hold the parameters.

Everything else is as without: gradients are summed, not averaged, so shards of a batch may have any size, and
checkpoints hold whole weights and states, so that a sharded run is resumed unsharded and the other way round. A copy of
the caller's model is sharded; at the end the caller's own gets the whole weights.

Gathering a block is something that all ranks do together. So all make the same number of passes: one without samples
makes them with none.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from manyhands.errors import BadSettings
from manyhands.training import launcher
from manyhands.training.options import Settings
from manyhands.training.torch.ranks.gradient_sum import Gradients, SummedGradients
from manyhands.training.torch.ranks.replicas import Replicas
from manyhands.training.torch.ranks.world import World, backend_for
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.activation_checkpoints import blocks_of

_STEPS = ("training_step", "validation_step")


def check(settings: Settings, optimizer: object, devices: list[torch.device]) -> None:
    """Refuse options that do not work with sharded parameters; ``devices``: those of the ranks."""
    reason = None
    if isinstance(optimizer, torch.optim.Optimizer):
        reason = "an optimizer object holds whole parameters: give a name, a class or a function of the parameters"
    elif settings.step.on_nan == "continue":
        reason = "on_nan='continue' keeps whole copies of weights and states: leave it out"
    elif settings.step.batch_stats == "global":
        reason = "batch_stats='global' lets ranks meet in layers whose parameters they are gathering: leave it out"
    elif settings.precision == "fp16":
        reason = "precision='fp16' keeps whole copies of weights and states: give 'bf16'"
    elif any(device.type == "cuda" for device in devices) and backend_for(devices) == "gloo":
        reason = "every rank needs its own GPU: NCCL refuses two on one, and Gloo cannot gather on a GPU"
    if reason is not None:
        raise BadSettings(f"Step(shard=True): {reason}")


def _shard_model(model: torch.nn.Module, world: World, dtype: torch.dtype | None) -> torch.nn.Module:
    """A sharded copy of the model, with the weights of the first rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = copy.deepcopy(model)
    if dtype is not None:
        whole = whole.to(dtype)
    whole.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for tensor in [*whole.parameters(), *whole.buffers()]:
        staged = tensor.detach().to(world.device)
        world.broadcast_([staged])
        job_state.write(tensor, staged)
    if not launcher.is_launched():  # in a worker the model is ours alone: what is sent back is gathered at the end
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(0)
    for block in blocks_of(whole):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(whole, mesh=mesh, reshard_after_forward=False)
    whole.to(world.device)  # buffers
    for module in _modules(whole):
        module.set_gradient_divide_factor(1.0)  # a sum over the ranks, not a mean
        module.set_force_sum_reduction_for_comms(True)
    for name in _STEPS:
        if callable(getattr(whole, name, None)):
            register_fsdp_forward_method(whole, name)
    return whole if whole.training else whole.train()


def _modules(model: torch.nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Shards(Replicas):
    """A sharded copy of the caller's model, and what ranks do together with it."""

    sharded = True

    def _place_model(self) -> torch.nn.Module:
        self._number_format.channels_last = False  # FSDP2 divides contiguous memory only
        dtype = torch.float64 if self._job.settings.precision == "fp64" else None
        return _shard_model(self._job.model, self._world, dtype)

    def gradients(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Gradients:
        return ShardedGradients(self.model, optimizer, self._world.device)

    @contextlib.contextmanager
    def with_whole_weights(self) -> Iterator[None]:
        modules = _modules(self.model)
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(module is not self.model, recurse=False)

    def whole(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _whole_tensors(tensors, keep=self._world.first)

    def into_caller_model(self) -> torch.nn.Module:
        whole = _whole_tensors(job_state.model_tensors(self.model), keep=True)
        weights = self._job.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in whole.items():
                if weights[name].shape == tensor.shape:
                    weights[name].data.copy_(tensor)
                else:
                    weights[name].data = tensor
        return self._job.model

    def check(self) -> None:
        """There are no replicas to compare."""


def _whole_tensors(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Sharded tensors, gathered one after the other into the host's memory; all ranks take part, some keep them."""
    gathered: dict[str, torch.Tensor] = {}
    part: Any
    for name, part in sorted(tensors.items()):  # as they lie in a restored optimizer differs from rank to rank
        whole: torch.Tensor = part.full_tensor() if job_state.is_sharded(part) else part
        if keep:
            gathered[name] = whole.detach().cpu()
    return gathered


class ShardedGradients(SummedGradients):
    """The counterpart of :class:`~.gradient_sum.GradientSum` where FSDP2 sums the gradients itself."""

    every_rank = True

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model: Any = model
        self._optimizer = optimizer
        self.loss_mark = torch.zeros((), device=device)

    def begin(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self.loss_mark.zero_()

    def arm(self, armed: bool) -> None:
        self._model.set_requires_gradient_sync(armed)
        self._model.set_is_last_backward(armed)

    def sum_up(self, weight: torch.Tensor | None = None) -> None:
        super().sum_up(weight)
        dist.all_reduce(self.loss_mark)
        if weight is not None:
            dist.all_reduce(weight)

    def divide(self) -> torch.Tensor:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().div_(self._weight)
        return self._weight
