"""Sums gradients over all ranks while the backward pass still runs.

Parameters are laid into buckets in the reverse of their order in the model, which is about the order in which
a backward pass reaches them. Each parameter's ``grad`` is a view into its bucket's one flat buffer, so no gradient
exists twice. When the last gradient of a bucket is there, its sum over the ranks starts, without waiting, provided
that all buckets before it have started: every rank must issue the same sums in the same order. :meth:`sum_up`
starts what is left (a rank without samples, parameters that a step did not use) and makes the results safe to read.

Behind its gradients a bucket carries one number per parameter, how many ranks used it: what none used has no gradient
afterwards, as on one device (zero would be another thing: weight decay and momentum would move it). One more number
tells all ranks whether the loss of any of them was NaN.

Why not DistributedDataParallel: it averages over ranks, which is wrong for unequal shards, it needs a forward pass on
every rank, also on one without samples, and by default it keeps a second copy of the gradients. Both communicate by
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from manyhands.backends.torch import compat

_FIRST_BUCKET = 1 << 20  # bytes: a small first bucket lets the sums begin early
_BUCKET = 25 << 20
_TWICE = (
    "a parameter got a second gradient in one backward pass, when the first was already on its way to the other ranks. "
    "A layer that is used twice within reentrant checkpointing does that: give checkpoint(..., use_reentrant=False)"
)


class Signal(Protocol):
    """A point in the work of the device."""

    def record(self) -> None:
        """The work issued so far."""

    def after(self) -> AbstractContextManager[None]:
        """Work issued within it waits for that point, and for nothing else."""


@dataclass
class _Bucket:
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    flat: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    users: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    views: list[torch.Tensor] = field(default_factory=list)  # of ``flat``, one for each parameter
    used: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)  # those of them whose gradient is whole: the last backward gave it
    work: Any = None
    elements: int = 0
    signal: Signal | None = None  # recorded where the gradients are whole, if sums start later than that
    is_signalled: bool = False

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.parameters)


class Gradients:
    """The gradients of a step: of one rank alone, or the sum over all ranks. One interface for both.

    Beside them it knows whether each loss is finite, and sums the weight of the labels.
    """

    # NaN where the loss of a rank is not finite, else zero; None for a rank alone, whose losses are its marks.
    loss_mark: torch.Tensor | None = None
    every_rank = False  # whether a rank without samples has to make every pass
    _weight: torch.Tensor

    def lay_out(self) -> None:
        """Between two steps: other parameters may be trained now."""

    def begin(self) -> None:
        """No gradients yet."""
        raise NotImplementedError

    def arm(self, armed: bool) -> None:
        """Whether the backward pass that comes is the last of this step: only then sums may start."""

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember whether this loss is finite; call before its backward pass."""
        raise NotImplementedError

    def set_zero(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Give parameters that the next backward pass leaves out a gradient of zeros."""
        raise NotImplementedError

    def marks(self) -> list[torch.Tensor]:
        """Numbers that are finite if all losses of the step are."""
        raise NotImplementedError

    def sum_up(self, weight: torch.Tensor | None = None) -> None:
        """After the last backward pass: the gradients become those of the whole batch.

        ``weight``: of the labels of this shard, to be summed, too.
        """
        if weight is not None:
            self._weight = weight

    def divide(self) -> torch.Tensor:
        """Divide the gradients by the weight of all labels, and return it. Call after :meth:`sum_up`."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the parameters without hooks."""


class LocalGradients(Gradients):
    """Those of one rank alone, of which nothing is exchanged."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._losses: list[torch.Tensor] = []
        self._zeros: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        self._losses = []
        self._optimizer.zero_grad(set_to_none=True)

    def note_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def set_zero(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """In every step: gradient clipping by a norm of NaN turns zeros into NaN."""
        for parameter in parameters:
            if parameter not in self._zeros:
                self._zeros[parameter] = torch.empty_like(parameter, requires_grad=False)
            parameter.grad = self._zeros[parameter]
        if parameters:
            compat.foreach_zero_([self._zeros[parameter] for parameter in parameters])

    def marks(self) -> list[torch.Tensor]:
        return self._losses

    def divide(self) -> torch.Tensor:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        compat.foreach_div_(gradients, self._weight.to(gradients[0].dtype))
        return self._weight


class SummedGradients(Gradients):
    """Those that are summed over the ranks, and with them whether each loss is finite and the weight of the labels."""

    loss_mark: torch.Tensor

    def note_loss(self, loss: torch.Tensor) -> None:
        loss = loss.detach()
        self.loss_mark += (loss - loss).to(self.loss_mark.dtype)  # zero for a number, NaN for anything else

    def marks(self) -> list[torch.Tensor]:
        return [self.loss_mark]


# Which parameters of each bucket a pass used, and whether it signalled that the bucket was complete.
Arrivals = list[tuple[frozenset[int], bool]]


class GradientSum(SummedGradients):
    """The gradients of a model's parameters in buckets, summed over all ranks.

    A step that is replayed from CUDA graphs keeps its gradients here, too, also on one rank (``alone``). There nothing
    can start within the backward pass. With :meth:`start_later` a signal is recorded for each bucket instead, and
    :meth:`sum_up` starts the sums, each behind its signal: on the device they run at the same moment.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, alone: bool = False) -> None:
        self.alone, self._parameters = alone, [*parameters]
        self._handles: list[tuple[torch.nn.Parameter, Any]] = []
        self.lay_out()

    def lay_out(self) -> None:
        self.close()
        self._buckets = _buckets([parameter for parameter in self._parameters if parameter.requires_grad])
        self._next = 0
        self._armed = False
        self._places = {
            parameter: (bucket, number)
            for bucket in self._buckets
            for number, parameter in enumerate(bucket.parameters)
        }
        self._handles = [
            (parameter, parameter.register_post_accumulate_grad_hook(self._arrive)) for parameter in self._places
        ]
        last = self._buckets[-1]
        # In the bucket that is sent last: by then the loss is known.
        self.loss_mark = last.flat[-1]
        self._weight = torch.zeros((), dtype=torch.float64, device=last.flat.device)

    def contents(self) -> list[tuple[int, list[torch.nn.Parameter]]]:
        """The bytes of each bucket, in the order in which they are summed, and the parameters in it."""
        return [(bucket.flat.numel() * bucket.flat.element_size(), [*bucket.parameters]) for bucket in self._buckets]

    def start_later(self, signal: Callable[[], Signal] | None) -> None:
        """From now on sums start in :meth:`sum_up`, each behind the signal that its gradients are complete.

        Without a signal they start within the backward pass again.
        """
        for bucket in self._buckets:
            bucket.signal = signal() if signal is not None and not self.alone else None

    def begin(self) -> None:
        """Set all gradients to zero, in the buckets."""
        for bucket in self._buckets:
            _lay_views(bucket)
            bucket.flat.zero_()
        self.reset()

    def reset(self) -> None:
        """The part of :meth:`begin` that is the host's, also where a graph does the rest: nothing has arrived yet."""
        self._next = 0
        for bucket in self._buckets:
            bucket.used, bucket.arrived = set(), set()
            bucket.work, bucket.is_signalled = None, False
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    def arm(self, armed: bool) -> None:
        self._armed = armed

    def note_loss(self, loss: torch.Tensor) -> None:
        super().note_loss(loss)
        for parameter, handle in self._handles:  # a hook that the forward pass has registered may change what is sent
            compat.run_last(parameter, handle.id)

    def set_zero(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:  # they are zero since the step began
            self._arrive(parameter)

    def arrivals(self, work: Callable[[], object]) -> Arrivals:
        """What arrives in this work, a pass that is recorded; :meth:`repeat` has to follow, as after each replay."""
        before = [bucket.used for bucket in self._buckets]
        for bucket in self._buckets:
            bucket.used = set()
        try:
            work()
            return [(frozenset(bucket.used), bucket.is_signalled) for bucket in self._buckets]
        finally:
            for bucket, used in zip(self._buckets, before, strict=True):
                bucket.used = used

    def repeat(self, arrivals: Arrivals) -> None:
        """A replayed pass brings the same gradients as when it was recorded."""
        for bucket, (used, is_signalled) in zip(self._buckets, arrivals, strict=True):
            bucket.used |= used
            bucket.is_signalled = is_signalled

    def unused(self) -> frozenset[int]:
        """The parameters that have no gradient in this step, by number. Call after :meth:`sum_up`."""
        return frozenset(number for number, parameter in enumerate(self._places) if parameter.grad is None)

    def sum_up(self, weight: torch.Tensor | None = None) -> None:
        """Start what has not started; afterwards gradients hold the sums.

        All ranks start the same sums in the same order. On a GPU the host does not wait here: the current stream does.
        """
        self._armed = False
        for bucket in self._buckets:
            if bucket.work is None:
                with bucket.signal.after() if bucket.signal and bucket.is_signalled else nullcontext():
                    self._start(bucket)
        works = [bucket.work for bucket in self._buckets]
        if weight is not None:
            self._weight.copy_(weight)
            works.append(self._sum(self._weight))
        for work in works:
            if work is not None:
                work.wait()
        self._drop_unused()

    def divide(self) -> torch.Tensor:
        for bucket in self._buckets:
            bucket.flat[: bucket.elements] /= self._weight
        return self._weight

    def close(self) -> None:
        for _, handle in self._handles:
            handle.remove()

    def _start(self, bucket: _Bucket) -> None:
        if not bucket.is_signalled:
            self._count_users(bucket)
        bucket.work = self._sum(bucket.flat)

    def _sum(self, tensor: torch.Tensor) -> Any:
        return None if self.alone else dist.all_reduce(tensor, async_op=True)

    def _count_users(self, bucket: _Bucket) -> None:
        if self.alone:
            return
        if len(bucket.used) == len(bucket.parameters):
            bucket.users.fill_(1)
        elif bucket.used:
            bucket.users.copy_(torch.tensor([float(n in bucket.used) for n in range(len(bucket.parameters))]))

    def _arrive(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter has been computed."""
        bucket, number = self._places[parameter]  # type: ignore[index]
        bucket.used.add(number)
        view = bucket.views[number]
        if parameter.grad is not view and parameter.grad is not None:  # a hook of the user's has replaced it
            view.copy_(parameter.grad)
            parameter.grad = view
        if not self._armed:
            return
        if bucket.work is not None or bucket.is_signalled:
            raise RuntimeError(_TWICE)
        bucket.arrived.add(number)
        while self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._complete(self._buckets[self._next])
            self._next += 1

    def _complete(self, bucket: _Bucket) -> None:
        """All gradients of the bucket are there: its sum starts, or may start from here on."""
        if bucket.signal is None:
            self._start(bucket)
            return
        self._count_users(bucket)
        bucket.signal.record()
        bucket.is_signalled = True

    def _drop_unused(self) -> None:
        """Take the gradient from parameters that no rank used.

        The optimizer must neither decay them nor count a step for them, and it decides on the host. So a rank that left
        parameters out waits here, once a step, for the sums that say whether another rank used them (with Gloo they are
        on the host already). A rank that used all of its parameters never waits.
        """
        buckets = [bucket for bucket in self._buckets if len(bucket.used) < len(bucket.parameters)]
        if not buckets:
            return
        if self.alone:
            users = [float(n in bucket.used) for bucket in buckets for n in range(len(bucket.parameters))]
        else:
            users = torch.cat([bucket.users.double() for bucket in buckets]).tolist()
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        for parameter, count in zip(parameters, users, strict=True):
            if not count:
                parameter.grad = None


def _buckets(parameters: list[torch.nn.Parameter]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        kind = (parameter.dtype, parameter.device)
        last = buckets[-1].parameters[-1] if buckets else None
        if last is None or size > room or (last.dtype, last.device) != kind:
            room = _BUCKET if buckets else _FIRST_BUCKET
            buckets.append(_Bucket())
        buckets[-1].parameters.append(parameter)
        room -= size
    for bucket in buckets:
        first = bucket.parameters[0]
        elements, count = sum(parameter.numel() for parameter in bucket.parameters), len(bucket.parameters)
        bucket.elements, bucket.flat = elements, first.detach().new_zeros(elements + count + 1)
        bucket.users = bucket.flat[elements : elements + count]
    return buckets


def _lay_views(bucket: _Bucket) -> None:
    """Give each parameter its part of the buffer, in its own memory format."""
    if bucket.views and all(v.stride() == p.stride() for v, p in zip(bucket.views, bucket.parameters, strict=True)):
        return
    bucket.views, offset = [], 0
    for parameter in bucket.parameters:
        part = bucket.flat[offset : offset + parameter.numel()]
        offset += parameter.numel()
        # A view with the parameter's strides: autograd then adds in place instead of replacing it.
        dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
        bucket.views.append(
            part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)
        )
