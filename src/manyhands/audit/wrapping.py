"""Wrap calls that wait: what the hooks of the frameworks share."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from manyhands.audit import sites, watch
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind
from manyhands.training import loop

# Whether a value is on a device that is waited for.
IsOnDevice = Callable[[Any], bool]
READS = ("__float__", "__int__", "__index__", "__complex__", "item", "tolist", "asscalar")
DECISIONS = ("__bool__", "__nonzero__")
PRINTS = ("__repr__", "__str__", "__format__")


class StepListeners:
    """The steps of a framework, of its optimizers and of the trainer's loop: who listens to them."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[object, bool], None]] = []

    def listen(self, listener: Callable[[object, bool], None]) -> None:
        """Tell a listener of every step, until :meth:`stop`."""
        self.stop()
        self.listeners.append(listener)
        loop.step_listeners.append(self._of_loop)

    def stop(self) -> None:
        """Leave nothing behind that a program or a trainer could notice."""
        if self.listeners:
            self.listeners.clear()
            loop.step_listeners.remove(self._of_loop)

    def _of_loop(self) -> None:
        self.note_end("the trainer's loop", loop=True)

    def note_end(self, who: object, *, loop: bool = False) -> None:
        """An optimizer, or what else makes the steps, has made one."""
        for listener in self.listeners:
            listener(who, loop)


class Installation:
    """The hooks of a framework: installed once, and whether the CPU stands in for a GPU."""

    def __init__(
        self,
        framework: str,
        on_device: IsOnDevice,
        virtual_count: Callable[[], int],
        gpu_count: Callable[[], int],
    ) -> None:
        self._framework, self._on_device = framework, on_device
        self._virtual_count, self._gpu_count = virtual_count, gpu_count
        self.stands_in = False
        self._installed = False
        self._lock = threading.Lock()

    def stand_in(self) -> None:
        """Let the CPU stand in for a GPU."""
        self.stands_in = True

    @property
    def on_cpu(self) -> bool:
        """Whether arrays in the memory of the CPU count as a device's."""
        return self.stands_in or self._virtual_count() > 0

    def has_device(self) -> bool:
        """Whether there is a device whose waits can be seen."""
        return self.on_cpu or self._gpu_count() > 0

    def used_device(self) -> bool:
        """Whether the program could use a GPU, or what stands in for one."""
        return self.stands_in or self._gpu_count() > 0

    def begins(self) -> bool:
        """Whether this is the first time, so that everything has to be wrapped; it stays wrapped."""
        with self._lock:
            first, self._installed = not self._installed, True
        return first

    def wrap(self, owner: Any, name: str, call: str, kind: Kind, *, whole: bool = False) -> None:
        """Replace a function of a class or module by one that announces its wait.

        It waits if its first argument is on a device; ``whole``: if any argument, or a part of one, is, or if it has
        none and there is a device.
        """
        original = getattr(owner, name, None)
        if original is None or hasattr(original, "manyhands_audit"):
            return

        def waits(*args: Any, **kwargs: Any) -> Any:
            if not watch.listening or not self._concerns(args, kwargs, whole):
                return original(*args, **kwargs)
            nbytes = getattr(args[0], "nbytes", 0) if args else 0
            with watch.Waiting(kind, call, nbytes if isinstance(nbytes, int) else 0, framework=self._framework):
                return original(*args, **kwargs)

        names = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__qualname__"]  # no text in C++ methods
        functools.update_wrapper(waits, original, names)
        waits.manyhands_audit = True  # type: ignore[attr-defined]
        setattr(owner, name, waits)

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> bool:
        if not whole:
            return bool(args) and self._on_device(args[0])
        if not args and not kwargs:
            return self.has_device()
        return any(map(self._on_device, _leaves([args, kwargs])))

    def wrap_numpy(self) -> None:
        """``np.asarray`` reads memory of the CPU without asking the array: only where that stands in for a device."""
        for name in ("asarray", "array") if self.on_cpu else ():
            self.wrap(sys.modules["numpy"], name, f"numpy.{name}", Kind.TO_HOST)

    def wrap_values(self, owner: Any, name: str) -> None:
        """The methods by which Python reads, decides on and prints a value."""
        for kind, methods in ((Kind.READ, READS), (Kind.CONTROL_FLOW, DECISIONS), (Kind.PRINT, PRINTS)):
            for method in methods:
                if method in vars(owner):
                    self.wrap(owner, method, f"{name}.{method}", kind)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


class Counted:
    """A function that the framework calls later: each call is a wait of the line that passed the function."""

    def __init__(
        self, function: Callable[..., Any], call: str, kind: Kind, site: sites.Site | None, framework: str
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._call, self._kind, self.site = function, call, kind, site
        self._framework = framework

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            if watch.listening and self.site is not None:
                stall = Stall(self._kind, self._call, self.site, self._framework)
                event = watch.WaitEvent(stall, begin, time.perf_counter() - begin)
                for sink in watch.sinks():
                    sink.before(stall)
                    sink.after(event)
