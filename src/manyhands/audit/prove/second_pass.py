"""One more run of a program, as it is or cured: what its rewritten lines call, and what is kept of it."""

from __future__ import annotations

import builtins
import functools
import hashlib
import json
import linecache
import os
import re
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.audit import listen, program, sites
from manyhands.audit.prove import rewrite
from manyhands.audit.prove.deferred import Deferred, known
from manyhands.audit.prove.plan import Way
from manyhands.audit.prove.rewrite import Change
from manyhands.audit.prove.values import Values, of
from manyhands.audit.recorder import Recorder
from manyhands.training.checkpoints import atomic_files

_CONVERSIONS: dict[int, Callable[[Any], Any]] = {-1: lambda value: value, 97: ascii, 114: repr, 115: str}
# PyTorch prints how a tensor was computed; what is kept for later is a copy without that.
_GRADIENT = re.compile(r", (grad_fn=<\w+>|requires_grad=True)")
_PRINTS = {print: "print", str: "str", repr: "repr", format: "format"}


class SecondPass:
    """What rewritten lines call: it does what they say, now or late, and keeps the numbers that they read.

    A ``place`` is the number of a line, and whether it is the line's first call.
    """

    def __init__(
        self, changes: Sequence[Change], *, cured: bool, warmup: int, steps: int, clock: int | None, result: Path
    ) -> None:
        self._changes, self._cured, self._result = changes, cured, result
        self._first, self._last = warmup, warmup + steps
        self._clock = clock  # the line whose runs are the steps, where no optimizer makes steps
        self._ticks = 0
        self._begin = 0.0
        self._frameworks: list[Values] = []
        self._names: list[str] = []
        self._read: list[list[Any]] = [[] for _ in changes]
        self._prints: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._counting = False
        self._needed: list[Counter[str]] = [Counter() for _ in changes]
        self._asked = [0] * len(changes)
        self.culprits: list[int] = []  # lines whose cures may have made the program fail
        self.is_written = False

    def failed(self, error: BaseException) -> None:
        """The program ended with an exception: find the cured lines behind it."""
        self.culprits = _culprits(error, self._changes)

    def imported(self, framework: str) -> None:
        """A framework is there."""
        values = of(framework)
        self._frameworks.append(values)
        self._names.append(framework)
        if self._cured and any(Way.COPY in change.ways for change in self._changes):
            values.prepare_cured()

    # What rewritten lines call

    def call(self, place: tuple[int, bool], name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """``owner.name(*args)``: a read, a wait or a copy."""
        line = self._arrive(place)
        ways = self._changes[line].ways
        if Way.LATE in ways and (isinstance(owner, Deferred) or self._read_by(name, owner, args, kwargs) is not None):
            return self._reads(line, name, owner, args, kwargs)
        if not self._cured:
            return getattr(owner, name)(*args, **kwargs)
        if Way.REMOVED in ways and name in rewrite.WAITS:
            self._asked[line] += self._counting
            return self._without_wait(name, owner, args)
        if Way.COPY in ways:
            self._asked[line] += self._counting
            return next(values for values in self._frameworks if values.copies).copied(name, owner, args, kwargs)
        return getattr(owner, name)(*args, **kwargs)

    def function(self, place: tuple[int, bool], function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function(*args)``: ``float(x)``, ``print(x)``, ``block_until_ready(x)``."""
        line = self._arrive(place)
        if function is print:
            return self._print(line, args, kwargs)
        name = _PRINTS.get(function, getattr(function, "__name__", ""))
        ways = self._changes[line].ways
        first = args[0] if args else None
        if Way.LATE in ways and (isinstance(first, Deferred) or self._read_by(name, None, args, kwargs) is not None):
            return self._reads(line, name, None, args, kwargs, function)
        if self._cured and Way.REMOVED in ways and name in rewrite.WAITS:
            self._asked[line] += self._counting
            return first
        return function(*args, **kwargs)

    def text(self, place: tuple[int, bool], *parts: Any) -> Any:
        """An f-string: texts, and values with their conversion and form."""
        line = self._arrive(place)
        formatted: list[Any] = []
        for part in parts:
            if isinstance(part, str):
                formatted.append(part)
                continue
            value, conversion, form = part
            if isinstance(value, Deferred) and not value.is_known:
                formatted.append(Deferred(lambda v, c, f: format(_CONVERSIONS[c](v), f), (value, conversion, form)))
            elif self._is_on_device(value):
                formatted.append(self._formatted(line, value, conversion, form))
            else:
                formatted.append(format(_CONVERSIONS[conversion](known(value)), form))
        if any(isinstance(part, Deferred) for part in formatted):
            return Deferred(lambda *texts: "".join(texts), tuple(formatted))
        return "".join(formatted)

    # Reading

    def _reads(self, line: int, name: str, owner: Any, args: Any, kwargs: Any, function: Any = None) -> Any:
        if not self._cured:
            result = function(*args, **kwargs) if owner is None else getattr(owner, name)(*args, **kwargs)
            return self._keep(line, result)
        self._asked[line] += self._counting
        value = owner if isinstance(owner, Deferred) or self._is_on_device(owner) else args[0]
        is_number = name in ("float", "int", "complex", "item", "str", "repr", "format")
        if isinstance(value, Deferred):
            waiting, own_line = value, None
        else:
            values = next(
                values for values in self._frameworks if values.read_by(name, owner, args, kwargs) is not None
            )
            is_number, waiting, own_line = values.is_number(name, value), values.snapshot(value), line

        def read(snapshot: Any) -> Any:
            if value is owner:
                return getattr(snapshot, name)(*args, **kwargs)
            rest = (snapshot, *args[1:])
            return function(*rest, **kwargs) if owner is None else getattr(owner, name)(*rest, **kwargs)

        deferred = Deferred(read, (waiting,), own_line, number=is_number)
        return deferred if own_line is None else self._keep(line, deferred)

    def _formatted(self, line: int, value: Any, conversion: int, form: str) -> Any:
        def read(tensor: Any) -> str:
            return format(_CONVERSIONS[conversion](tensor), form)

        if not self._cured:
            return self._keep(line, read(value))
        self._asked[line] += self._counting
        values = next(values for values in self._frameworks if values.on_device(value))
        return self._keep(line, Deferred(read, (values.snapshot(value),), line))

    def _print(self, line: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts = []
        for arg in args:
            parts.append(self._formatted(line, arg, 115, "") if self._is_on_device(arg) else arg)
        if any(isinstance(part, Deferred) and not part.is_known for part in parts):
            self._prints.append((tuple(parts), kwargs))
        else:
            print(*map(known, parts), **kwargs)

    def _keep(self, line: int, value: Any) -> Any:
        """Remember a number that was read; arrays may be changed by the program, and are large."""
        if value.is_number if isinstance(value, Deferred) else not hasattr(value, "__setitem__"):
            self._read[line].append(value)
        return value

    def _read_by(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for values in self._frameworks:
            value = values.read_by(name, owner, args, kwargs)
            if value is not None:
                return value
        return None

    def _is_on_device(self, value: Any) -> bool:
        return any(values.on_device(value) for values in self._frameworks)

    def _without_wait(self, name: str, owner: Any, args: tuple[Any, ...]) -> Any:
        if name != "block_until_ready":
            return None
        return owner if self._is_on_device(owner) else args[0] if args else None

    def needed(self, line: int) -> None:
        """A value that was read in a line is needed now."""
        if self._counting:
            site = sites.current(2)
            self._needed[line][str(site.user) if site is not None else "a library"] += 1

    # Steps

    def _arrive(self, place: tuple[int, bool]) -> int:
        """The number of a line that is run; with its first call a step begins, if its runs are the steps."""
        line, is_first = place
        if line == self._clock and is_first:
            self._ticks += 1
            self.on_step(self._ticks)
        return line

    def on_step(self, steps: int) -> None:
        """A step has ended: the clock runs from the first step that counts to the last, both waited for."""
        if steps == self._first and not self._counting:
            self._drain()
            self._counting = True
            self._begin = time.perf_counter()
        elif steps >= self._last and not self.is_written:
            self._drain()
            seconds = (time.perf_counter() - self._begin) / (self._last - self._first)
            self._counting = False
            self.write("enough", seconds)
            raise program.EnoughSteps

    def _drain(self) -> None:
        for values in self._frameworks:
            values.drain()

    # The result

    def write(self, ended: str, seconds: float | None = None) -> None:
        """Read what was left for later, and write what is compared."""
        Deferred.needed = None
        self.is_written = True
        for args, kwargs in self._prints:
            print(*map(known, args), **kwargs)
        values = [[_exactly(known(value)) for value in read] for read in self._read]
        arrays = self._parameters() if seconds is not None else []
        data = {
            "ended": ended,
            "seconds": seconds,
            "ticks": self._ticks,
            "values": [[len(read), hashlib.sha256(b"\0".join(read)).hexdigest()] for read in values],
            "parameters": [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays],
            "asked": self._asked,
            "culprits": self.culprits,
            "needed": [dict(needed) for needed in self._needed],
        }
        atomic_files.replace(self._result, json.dumps(data).encode())

    def _parameters(self) -> list[Any]:
        return [
            array
            for name, values in zip(self._names, self._frameworks, strict=True)
            for optimizer in list(listen.hooks(name).steps.optimizers.values())
            for array in values.parameters(optimizer)
        ]


def _exactly(value: Any) -> bytes:
    """A value as bytes that are equal only for equal values.

    >>> _exactly(0.3) == _exactly(0.3), _exactly(0.3) == _exactly(0.1 + 0.2)
    (True, False)
    """
    if isinstance(value, float):
        return struct.pack("<d", value)
    if hasattr(value, "tobytes"):
        return bytes(value.tobytes())
    return _GRADIENT.sub("", repr(value)).encode()


def _culprits(error: BaseException, changes: Sequence[Change]) -> list[int]:
    """The lines that an exception passed; if there are none, those whose values its innermost lines use."""
    trace = list(traceback.walk_tb(error.__traceback__))
    passed = {(os.path.abspath(frame.f_code.co_filename), line) for frame, line in trace}
    culprits = [number for number, change in enumerate(changes) if (change.file, change.line) in passed]
    for frame, line in () if culprits else reversed(trace):
        code = linecache.getline(frame.f_code.co_filename, line)
        names = [name for name in frame.f_locals if re.search(rf"\b{re.escape(name)}\b", code)]
        used = [frame.f_locals[name] for name in names]
        parts = [part for value in used for part in (value.values() if isinstance(value, dict) else [value])]
        culprits = sorted({line for part in parts if isinstance(part, Deferred) for line in part.lines()})
        if culprits:
            break
    return culprits


def _let_json_read() -> None:
    """Let ``json``, which takes only numbers, read a deferred value."""
    encoder: Any = json.JSONEncoder
    original = encoder.default

    @functools.wraps(original)
    def default(self: Any, value: Any) -> Any:
        return value.value() if isinstance(value, Deferred) else original(self, value)

    encoder.default = default


def run(settings: dict[str, Any], arguments: Sequence[str]) -> int:
    """Run a program once more: ``settings["proof"]`` says how."""
    proof = settings["proof"]
    cured = proof["mode"] == "cured"
    changes = [Change(**{**change, "ways": tuple(Way(way) for way in change["ways"])}) for change in proof["changes"]]
    second = SecondPass(
        changes,
        cured=cured,
        warmup=proof["warmup"],
        steps=proof["steps"],
        clock=proof["clock"],
        result=Path(settings["result"]),
    )
    recorder = Recorder(on_step=second.on_step)
    Deferred.needed = second.needed
    setattr(builtins, rewrite.NAME, second)
    rewrite.install(changes, cured=cured)
    _let_json_read()

    def imported(framework: str) -> None:
        steps = (
            (lambda who, loop: None) if proof["clock"] is not None else lambda who, loop: recorder.step(who, loop=loop)
        )
        listen.connect(framework, steps, stand_in=proof["stand_in"])
        second.imported(framework)

    def compiled(source: bytes, file: str) -> Any:
        return rewrite.rewritten(source, file, changes, cured=cured)

    process = os.getpid()
    with program.framework_imports(imported):
        code, ended = program.run_as_main(settings["module"], arguments, compiled, second.failed)
    if os.getpid() == process and not second.is_written:
        second.write(ended)
    return code
