"""The tools of an experiment: devices, tensors, alternating trials, and the check of results before them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhands import tree
from manyhands.book.vocabulary import as_number
from manyhands.device import Device
from manyhands.errors import ResultsDiffer
from manyhands.lab.finding import Times, Trial
from manyhands.lab.operations import Operations, operations_of
from manyhands.training.data.sources import as_numpy

_LONG_ENOUGH = 5e-3  # seconds: shorter calls are timed several in a row
_MOST_CALLS = 1000
_ROUNDS = {True: (3, 15), False: (7, 31)}  # with and without --quick: least, most
_BUDGET = {True: 1.5, False: 8.0}  # seconds for one call of `trials`, beyond the least number of rounds


class Bench:
    """The tools of one experiment in one framework.

    ``mh`` is the framework's module, ``quick`` asks for small sizes, ``operations`` has the few functions that
    experiments need from every framework; each computes on the device of its first argument.
    """

    def __init__(
        self, mh: Any, framework: str, *, quick: bool, real_gpus: int = 0, most_devices: int = 1, apart: bool = False
    ) -> None:
        self.mh, self.framework, self.quick, self.real_gpus = mh, framework, quick, real_gpus
        self.virtual: list[str] = []  # the names of the virtual devices that were used
        self.recorded: list[Trial] = []
        self._most, self._apart, self._virtual_devices = most_devices, apart, list[Any]()

    @functools.cached_property
    def operations(self) -> Operations:
        """The module of the few functions that experiments need from every framework."""
        return operations_of(self.framework)

    # Devices and tensors

    def devices(self, count: int) -> list[Any]:
        """This many devices: GPUs, or virtual devices if there are fewer GPUs.

        A single device is the GPU, else the CPU; with ``@experiment(apart=True)`` it is never the host.
        """
        if count > self._most:
            raise ValueError(f"devices({count}): write @experiment(..., devices={count})")
        if self.real_gpus >= count and not self._virtual_devices:
            return [self.mh.gpu(index) for index in range(count)]
        if self._most == 1 and not self._apart:
            return [self.mh.cpu()]
        # In all frameworks except PyTorch, virtual device 0 is the host.
        first = 1 if self._apart else 0
        if not self._virtual_devices:
            self._virtual_devices = list(self.mh.virtual_devices(self._most + first))
        self._mark_virtual(first, count)
        return self._virtual_devices[first : first + count]

    def _mark_virtual(self, first: int, count: int) -> None:
        self.virtual = [str(Device("virtual", first + index)) for index in range(max(count, len(self.virtual)))]

    def for_trainer(self, count: int) -> Any:
        """This many devices, in the form that ``mh.Trainer(devices=...)`` takes: GPUs, or virtual CPU devices.

        Either all are GPUs or none is, so that one GPU is not compared with two cores.
        """
        if self.real_gpus >= max(count, self._most):
            return [self.mh.gpu(index) for index in range(count)]
        if self.framework != "torch":
            return self.devices(self._most)[:count]
        # PyTorch's trainer starts a process for each device, and uses no virtual devices of this process.
        self._mark_virtual(0, count)
        return "cpu" if count == 1 else f"cpu:{count}"

    def gpu(self) -> Any | None:
        """The first real GPU, or None."""
        return self.mh.gpu(0) if self.real_gpus and not self._virtual_devices else None

    def size(self, *, gpu: int, cpu: int, quick: int) -> int:
        """Choose the size for real GPUs, for a CPU, or for ``--quick``, so that trials take a sensible time."""
        return quick if self.quick else gpu if self.real_gpus >= self._most else cpu

    def random(self, shape: tuple[int, ...], device: Any, seed: int = 0, *, scale: float = 1.0) -> Any:
        """Normal float32 numbers on a device: the same ones for the same seed in every framework."""
        import numpy

        values = numpy.random.default_rng(seed).standard_normal(shape, dtype="float32")
        return self.tensor(values * numpy.float32(scale), device)

    def tensor(self, values: Any, device: Any) -> Any:
        """Copy a NumPy array to a device."""
        return self.mh.to(self.operations.tensor(values), device)

    def number(self, x: Any, index: int = 0) -> float:
        """The number in row 0 and this column of a matrix, on the host: the host waits for it."""
        return as_number(x[0, index])

    # Measuring

    def say(self, text: str) -> None:
        """Show a line of progress."""
        print(text, flush=True)

    def equal(self, results: Any, expected: Any, *, tolerance: float = 0.0, compared: str = "the two methods") -> None:
        """Raise :class:`ResultsDiffer` unless both hold the same numbers, in tensors, numbers or trees of them.

        ``tolerance``: the largest difference allowed, relative to the largest number; 0 is to the bit.
        """
        import numpy

        values, wanted = (
            [as_numpy(leaf) for leaf in tree.flatten(self.mh.to(each, self.mh.cpu()))[0]]
            for each in (results, expected)
        )
        if [value.shape for value in values] != [value.shape for value in wanted]:
            raise ResultsDiffer(f"{compared} give results of different number or shape")
        for position, (result, other) in enumerate(zip(values, wanted, strict=True)):
            allowed = tolerance * float(numpy.max(numpy.abs(other), initial=0.0))
            if not numpy.allclose(result, other, rtol=0, atol=allowed):  # also for NaN
                raise ResultsDiffer(f"{compared} differ: result {position} by more than {allowed:.3g}")

    def trials(
        self, methods: Mapping[str, Callable[[], Any]], settings: Mapping[str, Any] | None = None, *, rounds: int = 0
    ) -> Times:
        """Time the methods in alternation, after a warm-up; each call ends with a wait for all devices.

        So a moment in which the machine is busy affects all of them. The report lists ``settings`` with the raw trials
        (a size, a batch size). ``rounds``: exactly this many; by default as many as a few seconds allow, and at least 3
        with ``quick``, 7 without.
        """
        settings = dict(settings or {})
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        calls = {}
        for name, method in methods.items():
            self.say(f"{name}{f' ({shown})' if shown else ''}")
            self._seconds(method, 1)  # warm-up
            once = self._seconds(method, 1)
            calls[name] = max(1, min(_MOST_CALLS, math.ceil(_LONG_ENOUGH / max(once, 1e-7))))
        least, most = (rounds, rounds) if rounds else _ROUNDS[self.quick]
        times, begin = Times({name: [] for name in methods}), time.perf_counter()
        for number in range(most):
            if number >= least and time.perf_counter() - begin > _BUDGET[self.quick]:
                break
            first = number % len(methods)  # each round begins with the next method
            for name in [*methods, *methods][first : first + len(methods)]:
                times[name].append(self._seconds(methods[name], calls[name]))
                self.recorded.append(Trial(name, settings, times[name][-1], calls[name]))
            self.say(f"round {number + 1}{f' ({shown})' if shown else ''}")
        return times

    def _seconds(self, method: Callable[[], Any], calls: int) -> float:
        """Seconds of one call, including the devices' work."""
        self.mh.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            result = method()
        self.mh.synchronize()
        spent = time.perf_counter() - begin
        del result  # after the clock has stopped: freeing it is not measured
        return spent / calls
