"""Side lanes for a compiled step: weight gradients of a compiled backward pass beside it.

A dispatch mode sees nothing of what a compiler fuses, and a compiler uses memory again as it sees fit. So the lanes are
put into the graph that is compiled, by a pass over it:

    main chain                                      after the pass

    dx, dw = convolution_backward(g, x, w)          dw = convolution_aside(lane 1, g, x, w)
    ... uses of dx ...                              dx = convolution_backward(g, x, w)       (its input alone)
    return dw.to(float32), ...                      ... uses of dx ...
                                                    join_lanes([dw, ...], [g, x, w, ...])
                                                    return dw, ...

The pass is in :mod:`.inductor_pass`; what it puts into the graph is here. ``convolution_aside`` forks its lane off
where it stands. ``join_lanes`` says that it writes to all results, so that the compiler lets nobody read them before
it; and that it reads all that the lanes read, so that the compiler does not use that memory again before it. Nothing of
this is taken on trust: at a join every storage that a lane was given must be among those that the join got, everything
must be joined at the end, and what was issued goes through the checker.

Outside of ``with CompiledLanes(...)`` the operations are computed where they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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

# The lanes of the step that is being made. The backward pass runs in a thread of autograd: it is no thread's own.
_current: CompiledLanes | None = None


@dataclass
class _Call:
    """Work that was given to a side lane, and where that lane is through with it: as noted, and the mark."""

    given: _Memories
    made: _Memories
    lane: int
    noted: int
    mark: Any


class CompiledLanes:
    """``with CompiledLanes(lanes, 2): loss.backward()``, of a loss that was compiled with :class:`TakeAside`."""

    def __init__(self, lanes: Lanes, count: int, *, device: str = "cpu") -> None:
        self._lanes, self._count = lanes, count
        self._described = [Lane(device, number=number) for number in range(count + 1)]
        self.schedule: Schedule | None = None
        self._begin()

    def _begin(self) -> None:
        self.aside: list[str] = []
        self._journal = Journal(self._described)
        self._calls: list[_Call] = []  # that are not joined; what they were given is held until then

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
        """Compute on a side lane, behind all that the main one has been given."""
        lane = (lane - 1) % self._count + 1
        given = _memories(inputs)
        self._journal.task(0, Task("main chain", writes=frozenset(given.keys() - self._read(self._calls))))
        self._journal.wait(lane, self._journal.mark(0))
        self._lanes.wait(lane, self._lanes.mark(0))
        with self._lanes.on(lane):
            results: list[torch.Tensor] = function()
        made = _memories(results)
        self._journal.task(lane, Task(name, frozenset(given), frozenset(made)))
        self.aside.append(name)
        self._calls.append(_Call(given, made, lane, self._journal.mark(lane), self._lanes.mark(lane)))
        return results

    def join(self, results: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
        """The main lane comes behind the work that made these results, and behind no other.

        ``kept``: what must have kept its memory until here.
        """
        there = _memories(results).keys()
        joined = [call for call in self._calls if call.made.keys() & there]
        unread = {memory for call in joined for memory in call.made} - there
        read = self._read(joined)
        lost = read - _memories(kept).keys()
        self._join(joined)
        if unread:
            raise UnsafeSchedule(_UNREAD)
        if lost:
            raise UnsafeSchedule(
                f"the compiler gave {len(lost)} of {len(read)} inputs of side lanes as copies that it may use again "
                "while they are read"
            )

    def _join(self, joined: Sequence[_Call]) -> None:
        for call in {call.lane: call for call in joined}.values():  # of each lane the last
            self._journal.wait(0, call.noted)
            self._lanes.wait(0, call.mark)
        self._calls = [call for call in self._calls if call not in joined]
        # From here on everybody may read the results, and use the memory of what was given, if nobody else reads it.
        made = {memory for call in joined for memory in call.made}
        free = self._read(joined) - self._read(self._calls)
        self._journal.task(0, Task("join", writes=frozenset(made | free)))

    @staticmethod
    def _read(calls: Sequence[_Call]) -> set[int]:
        return {memory for call in calls for memory in call.given}


def _memories(tensors: Sequence[torch.Tensor]) -> _Memories:
    return {compat.memory_id(tensor): tensor.untyped_storage() for tensor in tensors}


# The operations in the compiled graph

_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define(
    "convolution_aside(int lane, ScalarType? dtype, Tensor gradient, Tensor input, Tensor weight, SymInt[]? bias, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool for_bias) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "product_aside(int lane, ScalarType? dtype, Tensor one, Tensor other) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "join_lanes(Tensor(a!)[] results, Tensor[] kept) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _weight_gradient(dtype: torch.dtype | None, *given: Any) -> list[torch.Tensor]:
    *arguments, for_bias = given
    found = _aten.convolution_backward.default(*arguments, [False, True, for_bias])[1 : 3 if for_bias else 2]
    return [one if dtype is None else one.to(dtype) for one in found]


def _product(dtype: torch.dtype | None, tensor: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    found = torch.mm(tensor, other)
    return [found if dtype is None else found.to(dtype)]


def _convolution_aside(lane: int, dtype: torch.dtype | None, *given: Any) -> list[torch.Tensor]:
    if _current is None:
        return _weight_gradient(dtype, *given)
    name = "convolution, weight and bias" if given[-1] else "convolution, weight"
    return _current.call(lane, name, lambda: _weight_gradient(dtype, *given), given[:3])


def _product_aside(lane: int, dtype: torch.dtype | None, *given: torch.Tensor) -> list[torch.Tensor]:
    if _current is None:
        return _product(dtype, *given)
    return _current.call(lane, "product, weight", lambda: _product(dtype, *given), given)


def _join_lanes(results: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
    if _current is not None:
        _current.join(results, kept)


_library.impl("convolution_aside", _convolution_aside, "CompositeExplicitAutograd")
_library.impl("product_aside", _product_aside, "CompositeExplicitAutograd")
_library.impl("join_lanes", _join_lanes, "CompositeExplicitAutograd")
torch.library.register_fake("manyhands::convolution_aside", lambda lane, *given: _weight_gradient(*given), lib=_library)
torch.library.register_fake("manyhands::product_aside", lambda lane, *given: _product(*given), lib=_library)
torch.library.register_fake("manyhands::join_lanes", lambda results, kept: None, lib=_library)
_ops = torch.ops.manyhands
