"""Side lanes for a compiled step: weight gradients in parallel with the compiled backward pass.

A dispatch mode does not see what a compiler fuses, and a compiler decides itself when to reuse memory. So a pass adds
the lanes to the graph before it is compiled:

    main chain                                      after the pass

    dx, dw = convolution_backward(g, x, w)          dw = convolution_on_lane(lane 1, g, x, w)
    ... uses of dx ...                              dx = convolution_backward(g, x, w)       (its input alone)
    return dw.to(float32), ...                      ... uses of dx ...
                                                    join_lanes([dw, ...], [g, x, w, ...])
                                                    return dw, ...

The pass is in :mod:`.inductor_pass`, its operations are here. ``convolution_on_lane`` forks off its lane
where it stands in the graph. ``join_lanes`` declares that it writes to all results, so that nothing reads them earlier,
and that it reads all inputs of the lanes, so that their memory is not reused earlier. All of this is verified: every
storage that a lane has read must be among the inputs of its join, everything must be joined at the end, and the checker
verifies the order of the issued work.

Outside of ``with CompiledLanes(...)`` the operations run in program order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.amounts import counted
from manyhands.backends.torch import compat
from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.recorded import Journal
from manyhands.schedule.task import Task
from manyhands.training.torch.fast.lanes.eager import Lanes

_aten = torch.ops.aten
_Memories = dict[int, torch.UntypedStorage]
_UNREAD = "results of side lanes are not joined: they might be read too early"

# The lanes of the current step. Not thread-local, because the backward pass runs in a thread of autograd.
_current: CompiledLanes | None = None


@dataclass
class _Call:
    """Work on a side lane, and the marks after it in the journal and on the lane."""

    read: _Memories
    created: _Memories
    lane: int
    recorded_mark: int
    mark: Any


class CompiledLanes:
    """``with CompiledLanes(lanes, 2): loss.backward()``, for a loss that was compiled with :class:`MoveToSideLanes`."""

    def __init__(self, lanes: Lanes, count: int, *, device: str = "cpu") -> None:
        self._lanes, self._count = lanes, count
        self._described = [Lane(device, number=number) for number in range(count + 1)]
        self.schedule: Schedule | None = None
        self._begin()

    def _begin(self) -> None:
        self.moved: list[str] = []
        self._journal = Journal(self._described)
        self._calls: list[_Call] = []  # not joined yet; their inputs are held until then

    def __enter__(self) -> CompiledLanes:
        global _current
        self._begin()
        _current = self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        global _current
        _current = None
        left = self._calls
        self._join(left)
        self.schedule = self._journal.schedule()
        if kind is None:
            check(self.schedule)
            if left:
                raise UnsafeSchedule(_UNREAD)

    def call(self, lane: int, name: str, function: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute on a side lane, after all work issued to the main lane so far."""
        lane = (lane - 1) % self._count + 1
        read = _memories(inputs)
        self._journal.task(0, Task("main chain", writes=frozenset(read.keys() - self._read(self._calls))))
        self._journal.wait(lane, self._journal.mark(0))
        self._lanes.wait(lane, self._lanes.mark(0))
        with self._lanes.on(lane):
            results: list[torch.Tensor] = function()
        created = _memories(results)
        self._journal.task(lane, Task(name, frozenset(read), frozenset(created)))
        self.moved.append(name)
        self._calls.append(_Call(read, created, lane, self._journal.mark(lane), self._lanes.mark(lane)))
        return results

    def join(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Let the main lane wait for the work that computes these results, and for no other work.

        ``inputs``: the tensors that the work reads; they must not have been freed before.
        """
        there = _memories(results).keys()
        joined = [call for call in self._calls if call.created.keys() & there]
        unread = {memory for call in joined for memory in call.created} - there
        read = self._read(joined)
        lost = read - _memories(inputs).keys()
        self._join(joined)
        if unread:
            raise UnsafeSchedule(_UNREAD)
        if lost:
            raise UnsafeSchedule(
                f"the compiler gave {len(lost)} of {counted(len(read), 'input')} of side lanes as copies that it may "
                "use again while they are read"
            )

    def _join(self, joined: Sequence[_Call]) -> None:
        for call in {call.lane: call for call in joined}.values():  # the last call of each lane
            self._journal.wait(0, call.recorded_mark)
            self._lanes.wait(0, call.mark)
        self._calls = [call for call in self._calls if call not in joined]
        # From here on the results may be read, and inputs that no other call reads may be overwritten.
        created = {memory for call in joined for memory in call.created}
        free = self._read(joined) - self._read(self._calls)
        self._journal.task(0, Task("join", writes=frozenset(created | free)))

    @staticmethod
    def _read(calls: Sequence[_Call]) -> set[int]:
        return {memory for call in calls for memory in call.read}


def _memories(tensors: Sequence[torch.Tensor]) -> _Memories:
    return {compat.memory_id(tensor): tensor.untyped_storage() for tensor in tensors}


# The operations in the compiled graph

_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define(
    "convolution_on_lane(int lane, ScalarType? dtype, Tensor gradient, Tensor input, Tensor weight, SymInt[]? bias, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool for_bias) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "product_on_lane(int lane, ScalarType? dtype, Tensor tensor, Tensor other) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "join_lanes(Tensor(a!)[] results, Tensor[] inputs) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _weight_gradient(dtype: torch.dtype | None, *arguments: Any) -> list[torch.Tensor]:
    *convolution, for_bias = arguments
    gradients = _aten.convolution_backward.default(*convolution, [False, True, for_bias])[1 : 3 if for_bias else 2]
    return [gradient if dtype is None else gradient.to(dtype) for gradient in gradients]


def _product(dtype: torch.dtype | None, tensor: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    product = torch.mm(tensor, other)
    return [product if dtype is None else product.to(dtype)]


def _convolution_on_lane(lane: int, dtype: torch.dtype | None, *arguments: Any) -> list[torch.Tensor]:
    if _current is None:
        return _weight_gradient(dtype, *arguments)
    name = "convolution, weight and bias" if arguments[-1] else "convolution, weight"
    return _current.call(lane, name, lambda: _weight_gradient(dtype, *arguments), arguments[:3])


def _product_on_lane(lane: int, dtype: torch.dtype | None, *factors: torch.Tensor) -> list[torch.Tensor]:
    if _current is None:
        return _product(dtype, *factors)
    return _current.call(lane, "product, weight", lambda: _product(dtype, *factors), factors)


def _join_lanes(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    if _current is not None:
        _current.join(results, inputs)


_library.impl("convolution_on_lane", _convolution_on_lane, "CompositeExplicitAutograd")
_library.impl("product_on_lane", _product_on_lane, "CompositeExplicitAutograd")
_library.impl("join_lanes", _join_lanes, "CompositeExplicitAutograd")
torch.library.register_fake(
    "manyhands::convolution_on_lane", lambda lane, *arguments: _weight_gradient(*arguments), lib=_library
)
torch.library.register_fake("manyhands::product_on_lane", lambda lane, *arguments: _product(*arguments), lib=_library)
torch.library.register_fake("manyhands::join_lanes", lambda results, inputs: None, lib=_library)
_ops = torch.ops.manyhands
