"""Run a user's program as Python would, with the hooks in place: what ``manyhands audit`` starts in a child process.

The program is ``__main__`` of this process, with its own ``sys.argv`` and ``sys.path``; its output, its exit code, its
traceback and what it does with signals are those of ``python script.py``. What was recorded is written to a file when
it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands import files
from manyhands.audit import sites, speeds, watch
from manyhands.audit.recorder import Recorder
from manyhands.audit.reports import report
from manyhands.device import FRAMEWORKS

_MORE = {"torch": "manyhands.audit.torch.busy"}  # what one framework has beyond its hooks


class EnoughSteps(BaseException):
    """As many steps were made as ``--steps`` wants: the program ends here."""


class _NoModule(ImportError):
    """``-m`` names a module that is not there."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when a framework has been imported by the program; the auditor imports none itself."""

    def __init__(self, then: Callable[[str], None]) -> None:
        self._then, self._waiting = then, {*FRAMEWORKS, "keras"}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            execute(module)
            then(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run(settings: dict[str, Any], arguments: Sequence[str]) -> int:
    """Run a program to its end and write the record; returns its exit code."""
    target = speeds.DeviceSpeeds(**settings["speeds"]) if settings["speeds"] else None
    limit = settings["warmup"] + settings["steps"] if settings["steps"] else None

    def on_step(steps: int) -> None:
        for step in at_step:
            step(steps)
        if limit is not None and steps >= limit:
            raise EnoughSteps

    at_step: list[Callable[[int], None]] = []
    recorder = Recorder(speeds=target, on_step=on_step)
    process = os.getpid()

    def count_fork() -> None:
        recorder.forks += os.getpid() == process

    os.register_at_fork(before=count_fork)

    def import_framework(framework: str) -> None:
        recorder.frameworks.add(framework)
        try:
            begin_recording(framework, recorder, settings["warmup"], at_step)
        except Exception as error:  # the program runs all the same
            recorder.remarks.append(f"{framework} could not be watched: {type(error).__name__}: {error}")

    code, ended = 1, "killed"
    sites.name_callers_in_warnings()
    try:
        with framework_imports(import_framework), watch.everywhere(recorder):
            code, ended = _run_as_main(settings["module"], arguments)
    finally:
        if os.getpid() == process:
            _write(recorder, settings, ended)
    return code


@contextlib.contextmanager
def framework_imports(import_framework: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of every framework that is imported, or is there already."""
    seen: set[str] = set()

    def then(name: str) -> None:
        if name == "keras":  # which may import TensorFlow, or be imported by it
            if "tensorflow" in seen:
                watch.hooks_of("tensorflow").wrap_steps()
            return
        seen.add(name)
        import_framework(name)

    for framework in FRAMEWORKS:
        if framework in sys.modules:
            then(framework)
    finder = _AfterImport(then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


# What is recorded of a framework


def begin_recording(framework: str, recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Record what a program does with a framework from now on."""
    hooks = watch.hooks_of(framework)
    if recorder.speeds is not None:
        hooks.stand_in()
    hooks.install()
    hooks.steps.listen(lambda who, loop: recorder.step(who, loop=loop))
    if framework in _MORE:
        importlib.import_module(_MORE[framework]).begin(recorder, warmup, at_step)


def end_recording(framework: str, recorder: Recorder) -> None:
    """Stop, and record what is known only at the end."""
    hooks = watch.hooks_of(framework)
    hooks.steps.stop()
    recorder.used_device |= hooks.used_device()
    if framework in _MORE:
        importlib.import_module(_MORE[framework]).end(recorder)


# Running the program as Python does


def _write(recorder: Recorder, settings: dict[str, Any], ended: str) -> None:
    for framework in recorder.frameworks:
        end_recording(framework, recorder)
    written = report.make(recorder, program=settings["program"], warmup=settings["warmup"])
    written.ended = ended
    files.replace(Path(settings["result"]), json.dumps(written.as_data()).encode())


def _run_as_main(module: bool, arguments: Sequence[str]) -> tuple[int, str]:
    """Do what ``python [-m] arguments`` does; returns its exit code, and how it ended."""
    loaded = False
    try:
        main, code = _load_module(arguments) if module else _load_script(arguments)
        loaded = True
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except EnoughSteps:
        return 0, "enough"
    except SystemExit as end:
        number = _exit_code(end)
        return number, f"exit {number}" if number else "normally"
    except _NoModule as error:
        print(f"manyhands audit: {error}", file=sys.stderr)
        return 1, "no-module"
    except BaseException as error:
        _show(error)
        ended = "syntax-error" if isinstance(error, SyntaxError) and not loaded else f"exception {type(error).__name__}"
        return 130 if isinstance(error, KeyboardInterrupt) else 1, ended
    return 0, "normally"


def _load_script(arguments: Sequence[str]) -> tuple[types.ModuleType, types.CodeType]:
    script = arguments[0]
    path = os.path.abspath(script)
    sys.argv = list(arguments)
    _search_first(os.path.dirname(os.path.realpath(script)))  # a link's target has its modules beside it
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    with open(script, "rb") as file:
        source = file.read()
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return main, compile(source, path, "exec", dont_inherit=True)


def _search_first(folder: str) -> None:
    """Look for modules in a folder first, as Python does for its script, unless ``-P`` forbids it."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _load_module(arguments: Sequence[str]) -> tuple[types.ModuleType, types.CodeType]:
    name = arguments[0]
    _search_first(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):  # its package imports what is not there
            raise
        spec = None
    if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise _NoModule(f"there is no module {name!r} to audit, or none that can be run")
    code = spec.loader.get_code(spec.name)
    if code is None:
        raise _NoModule(f"module {name!r} is not written in Python")
    sys.argv = [spec.origin, *arguments[1:]]
    sites.set_user_roots(_root(spec))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent, __builtins__=__builtins__)
    main.__loader__ = spec.loader
    return main, code


def _root(spec: importlib.machinery.ModuleSpec) -> str:
    """The folder of the program: that of its topmost package, or its own."""
    folder = Path(spec.origin or ".").resolve().parent
    for _ in spec.name.split(".")[2:]:
        folder = folder.parent
    return str(folder)


def _exit_code(end: SystemExit) -> int:
    """As the interpreter takes it: a number, nothing, or a text for stderr."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback, beginning in the program, through the program's own hook."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    error.__traceback__ = shown
    if isinstance(error, SyntaxError) and shown is None:
        traceback.print_exception(error)
    else:
        sys.excepthook(type(error), error, shown)


def main() -> int:
    return run(json.loads(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    # The interpreter's own end (threads, atexit) follows, as in any program.
    sys.exit(importlib.import_module("manyhands.audit.program").main())
