"""``parallel(fn, pure=True)``: the function is traced whole, and replayed for every call with the same signature.

The contract is that of ``jax.jit``. Values of tensors, also of those outside the arguments, are read at each replay;
what the function reads in Python is read once, and what it does besides (printing, counting) happens once. What cannot
be traced runs as written, with a note.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manyhands.backends.torch.capture.call import Call, call
from manyhands.backends.torch.capture.whole import Whole, trace_whole
from manyhands.backends.torch.run.cuda_graph import NoMemoryForResults
from manyhands.errors import CannotTrace, NotYet, first_line
from manyhands.parallel import planner
from manyhands.parallel.plan import AS_WRITTEN, Plan
from manyhands.parallel.planner import PlanningProgress, PlanOptions

_SIGNATURES = 8  # that are kept
_TRACES = 8  # of one signature: then what the function depends on outside changes at every call


@dataclass
class _Traced:
    """A trace and its plan; None: calls like this are made as written."""

    whole: Whole | None
    plan: Plan


class Pure:
    """The traces of a function, by the signatures of its calls."""

    def __init__(self, function: Callable[..., object], options: PlanOptions, name: str) -> None:
        self._function, self._options, self._name = function, options, name
        self._traces: OrderedDict[tuple[object, ...], list[_Traced]] = OrderedDict()
        self._counts: dict[tuple[object, ...], int] = {}  # how often each was traced
        self._alone = threading.RLock()
        self.last: Plan | None = None

    def __call__(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        made = call(arguments, keywords)
        traced = self._find(made.signature) or self._trace(made)
        self.last = traced.plan
        if traced.whole is None:
            return self._function(*arguments, **keywords)
        try:
            return traced.whole.result(traced.plan.run(made.tensors))
        except NoMemoryForResults as error:
            note = f"{traced.plan.how} ran out of memory: plain execution is used instead ({error})"
        traced.plan = self.last = replace(traced.plan, method=AS_WRITTEN, exactness=None, notes=(note,))
        traced.whole = None
        return self._function(*arguments, **keywords)

    def _find(self, signature: tuple[object, ...]) -> _Traced | None:
        for traced in self._traces.get(signature, ()):
            if traced.whole is None or traced.whole.holds():
                return traced
        return None

    def _trace(self, made: Call) -> _Traced:
        with self._alone:
            if (traced := self._find(made.signature)) is not None:  # by another thread in the meantime
                return traced
            count = self._counts[made.signature] = self._counts.get(made.signature, 0) + 1
            if count > _TRACES:
                traced = _plain(
                    f"traced {_TRACES} times already: gradients or numbers of an optimizer change at every call. Give "
                    "a tensor, as in SGD(..., lr=torch.tensor(0.1), fused=True)"
                )
            else:
                with PlanningProgress(self._name) as progress:
                    progress.enters("capture")
                    try:
                        whole = trace_whole(self._function, made)
                        traced = _Traced(whole, planner.plan(whole.trace, made.tensors, self._options, progress))
                    except NotYet as error:
                        return _plain(str(error))  # it is tried again at the next call
                    except Exception as error:  # also one of ours
                        traced = _plain(str(error) if isinstance(error, CannotTrace) else first_line(error))
            self._traces.setdefault(made.signature, []).insert(0, traced)
            self._traces.move_to_end(made.signature)
            if len(self._traces) > _SIGNATURES:
                self._counts.pop(self._traces.popitem(last=False)[0], None)
        return traced


def _plain(why: str) -> _Traced:
    return _Traced(None, Plan(_as_written, notes=(f"cannot be traced: {why}",)))


def _as_written(tensors: Sequence[object]) -> list[object]:
    raise AssertionError("the function runs as written")
