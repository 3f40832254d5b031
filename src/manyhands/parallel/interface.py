"""What ``parallel(fn)`` returns in every framework: a function that can be called, explained, drawn and simulated.

In PyTorch manyhands plans the lanes itself (:mod:`manyhands.parallel.function`); in JAX, TensorFlow and MXNet it hands
the function to their own runtime (:mod:`manyhands.parallel.handed_over`), and there is no plan: asking for it raises an
:class:`EngineError`.
"""

from __future__ import annotations

import abc
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from manyhands.amounts import count_of
from manyhands.errors import EngineError, first_line, type_in_words
from manyhands.parallel import explain
from manyhands.parallel.plan import Plan
from manyhands.schedule import graph_svg
from manyhands.schedule.forecast import Machine, ScheduleForecast, forecast
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.simulate import simulate, timeline_of
from manyhands.schedule.timeline import Timeline, checked_path

P = ParamSpec("P")
R = TypeVar("R")


class ParallelFunction(abc.ABC, Generic[P, R]):
    """A function with the results of the plain one, faster where possible."""

    def __init__(self, function: Callable[P, R]) -> None:
        _must_be_function(function)
        # The attributes of a callable object (a model's parameters) are not copied.
        updated = ("__dict__",) if isinstance(function, types.FunctionType) else ()
        functools.update_wrapper(self, function, updated=updated)
        self.function = function
        self.plain: Callable[..., R] = function  # for arguments that come as a tuple and a dict
        self._last: Plan | None = None

    @abc.abstractmethod
    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        """The function's result for these arguments."""

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """As a decorator of a method: the instance is its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str | tuple[object, ...]:
        """The function and the options are what is stored; of a decorated function its name."""
        name = getattr(self.function, "__qualname__", "")
        found: object = sys.modules.get(getattr(self.function, "__module__", ""))
        for part in name.split("."):  # a method's is Net.forward
            found = getattr(found, part, None)
        return name if found is self else self._stored()

    @abc.abstractmethod
    def _stored(self) -> tuple[object, ...]:
        """What makes this one again, and its arguments."""

    if not TYPE_CHECKING:  # it would let the type checker accept every name

        def __getattr__(self, name: str) -> object:
            """``net = parallel(Net())``, then ``net.parameters()``: the error says which object has the attribute."""
            function = self.__dict__.get("function")
            if name.startswith("__") or not hasattr(function, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            known = explain.name_of(function)
            raise AttributeError(
                f"parallel({known}) has no attribute {name!r}, but {known} has it: keep {known} under another name, or "
                f"write .function.{name}"
            )

    @property
    def planned(self) -> Plan:
        """The plan of the last call."""
        if self._last is None:
            raise EngineError("call the function first: it is planned for the arguments that it gets")
        return self._last

    def explain(self) -> str:
        """How the last call was run, what it took, what bounds it, and why it is not faster."""
        return explain.explain(explain.name_of(self.function), self.planned)

    def draw(self, path: str | Path) -> Path:
        """The graph as SVG, coloured by lane."""
        return graph_svg.save(self._schedule(), path)

    def timeline(self, path: str | Path, *, simulated: bool = False) -> Path:
        """When each task runs on which lane: a trace (``.json``) or a picture (``.png``, ``.svg``).

        Measured in a run of the schedule with made-up arguments, or simulated from the costs of its tasks.
        """
        checked_path(path)  # before anything is run
        return (self.simulate() if simulated else self.measure()).save(path)

    def simulate(self) -> Timeline:
        """When each task of the last call's schedule would run, from the costs of its tasks."""
        return simulate(self._schedule())

    def measure(self) -> Timeline:
        """The last call's schedule, run once more: when each task began and ended."""
        schedule, planned = self._schedule(), self.planned
        assert planned.timed is not None
        try:
            moments = planned.timed()
        except Exception as error:
            raise EngineError(
                f"it cannot be run with substitute arguments ({first_line(error)}): timeline(path, simulated=True) "
                "draws it from the costs of its tasks"
            ) from error
        return timeline_of(schedule, moments, f"measured; {planned.how}")

    def forecast(
        self, devices: int, *, lanes: int | None = None, bandwidth: float = 25e9, latency: float = 10e-6
    ) -> ScheduleForecast:
        """How long the last call's work would take on several devices like this one.

        ``lanes`` of each device (as many as the last call used), ``bandwidth`` in bytes a second into each, ``latency``
        in seconds a copy. A simulation on measured costs; its schedule is proved like any other. Print it.
        """
        schedule, planned = self._schedule(), self.planned
        assert planned.footprint is not None
        placed = zip(schedule.lane_of, schedule.graph.tasks, strict=True)
        used = len({lane for lane, task in placed if task.kind == "compute"})
        machine = Machine(devices, max(1, used) if lanes is None else lanes, bandwidth, latency)
        return forecast(schedule.graph, planned.footprint, machine)

    def _schedule(self) -> Schedule:
        planned = self.planned
        if planned.schedule is None:
            raise EngineError(f"there is no schedule: {planned.how}; {'; '.join(planned.notes)}")
        return planned.schedule


def _must_be_function(function: object) -> None:
    if callable(function):
        return
    advice = "write parallel(fn)(x), not parallel(fn(x)), which calls fn first"
    if type(function) is int and function > 0:
        advice = f"write parallel(threads={function}) for a scope with {count_of(function, 'thread')}"
    raise EngineError(f"parallel(fn) takes a function, not {type_in_words(function)}: {advice}")


def refuse_threads(threads: int | None) -> None:
    """``parallel(fn, threads=...)``: threads are a scope's."""
    if threads is not None:
        raise EngineError(
            f"parallel(fn, threads={threads}): the number of lanes of a function is measured, so leave threads out. "
            f"For tasks, write with parallel(threads={threads}):"
        )
