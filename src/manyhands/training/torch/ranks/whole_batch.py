"""``mh.whole_batch``: the rows of all devices, for losses that compare the samples of a batch with each other.

In the forward pass every rank gets all rows, in the order of the ranks. In the backward pass each rank's gradients of
these rows are summed over the ranks, and each rank takes the sum for its own. So whatever every rank computes from
them, the sum of the ranks' weighted losses has the right gradient: that of the weights before the rows, and that of
parameters inside the loss, such as a temperature. For example two devices with 3 of 4 samples and 1 of 4, which both
compute the loss L of all rows::

    rank 0    3/4 L  ->  3/4 dL/drow  \
                                        sum: dL/drow of every row; of a temperature 3/4 dL/dt + 1/4 dL/dt
    rank 1    1/4 L  ->  1/4 dL/drow  /

The ranks meet in a process group of their own: sums of gradients start while the backward pass runs, at moments that
depend on which parameters a rank used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from manyhands.amounts import count_of
from manyhands.errors import BadSettings
from manyhands.training.torch.data.batches import map_tensors
from manyhands.training.torch.step.part import Part, Turn

Gather = Callable[[torch.Tensor], torch.Tensor]
_gather: ContextVar[Gather | None] = ContextVar("gather", default=None)


def whole_batch(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of this tensor for the whole batch, from every device, with gradients.

    Call it in a ``training_step``, or in a model, where samples are compared with each other: a contrastive loss, Dice,
    statistics of the batch. Each device has the rows of its own samples; the result has those of all samples, in the
    same order for every tensor. On one device, and in evaluation, which computes whole batches, it is the tensor
    itself::

        def training_step(self, batch):
            image, text = self(batch)
            image, text = mh.whole_batch(image), mh.whole_batch(text)
            return contrastive_loss(image, text)    # as on one device

    Every device has to call it equally often, and compute the same from the result.

    Args:
        tensor: One row for each sample of this device's part of the batch.
    """
    gather = _gather.get()
    return tensor if gather is None else gather(tensor)


@contextlib.contextmanager
def gathered_by(gather: Gather) -> Iterator[None]:
    """Within it, :func:`whole_batch` is this function."""
    before = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(before)


@dataclass(frozen=True)
class Rows:
    """Which tensors of a model's output, and of a batch's target, have a row for each sample, in order.

    Those are gathered before the loss is computed; without any, the model or its step calls :func:`whole_batch`.
    """

    of_output: tuple[bool, ...] = ()
    of_target: tuple[bool, ...] = ()

    def gather(self, output: Any, target: Any) -> tuple[Any, Any]:
        return _gather_some(output, self.of_output), _gather_some(target, self.of_target)


def _gather_some(tensors: Any, have_rows: Sequence[bool]) -> Any:
    left = iter(have_rows)
    return map_tensors(lambda tensor: whole_batch(tensor) if next(left, False) else tensor, tensors)


def check_rows(tensor: torch.Tensor, size: int) -> None:
    if not tensor.dim() or len(tensor) != size:
        raise BadSettings(
            f"mh.whole_batch got a tensor of shape {tuple(tensor.shape)} on a device with {count_of(size, 'sample')}: "
            "give one row for each sample of the device, each tensor in a call of its own"
        )


class AllRanks(Part):
    """Gathers the rows of all ranks in every forward pass."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sizes: tuple[int, ...] = ()  # how many samples of the batch each rank has
        self._group = dist.new_group()  # made on every rank at the same point

    def begin(self, turn: Turn) -> None:
        if turn.shard is not None:
            self._sizes = turn.shard.of_ranks

    def forward(self) -> AbstractContextManager[None]:
        return gathered_by(self._gather_rows)

    def _gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        own = self._sizes[self._rank]
        check_rows(tensor, own or 1)  # a rank without samples computes one, of which it gives nothing
        result: torch.Tensor = _AllRows.apply(tensor[:own], self._rank, self._sizes, self._group)  # type: ignore[no-untyped-call]
        return result


class NotAnnounced(Part):
    """Of a job whose ranks have no group for it: a call of ``mh.whole_batch`` is refused."""

    def forward(self) -> AbstractContextManager[None]:
        return gathered_by(_refuse)


def _refuse(tensor: torch.Tensor) -> torch.Tensor:
    raise BadSettings(
        "mh.whole_batch was not called when the trainer tried the loss before the job began (or that could not be "
        "tried: see the notes). Call it in every step, whatever the batch holds"
    )


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rank: int, sizes: tuple[int, ...], group: Any) -> torch.Tensor:
        ctx.rank, ctx.sizes, ctx.group = rank, sizes, group
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        own = padded.reshape(-1).view(torch.uint8)  # Gloo does not know every dtype
        received = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(received, own, group=group)
        parts = [part.view(tensor.dtype).view_as(padded)[:size] for part, size in zip(received, sizes, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.contiguous()
        wide = wide.clone() if wide is gradient else wide  # summed in place
        dist.all_reduce(wide, group=ctx.group)
        begin = sum(ctx.sizes[: ctx.rank])
        return wide[begin : begin + ctx.sizes[ctx.rank]].to(gradient.dtype), None, None, None
