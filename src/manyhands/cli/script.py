"""A user's script as a module: for commands that take ``script.py:function``."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings, ManyhandsError, first_line, type_in_words


def load(text: str) -> tuple[Any, Any]:
    """The module and the function that ``script.py:function`` names."""
    file, _, name = text.partition(":")
    path = Path(file)
    if not name:
        raise BadSettings(f"{text!r} does not name a function of a script: write script.py:function")
    if not path.is_file():
        raise BadSettings(f"{text}: there is no file {file!r}")
    try:
        with _arguments_of(path):
            module = _module(path)
    except ManyhandsError:
        raise
    except SyntaxError as error:
        raise BadSettings(f"{path} has a syntax error in line {error.lineno}: {error.msg}") from error
    except Exception as error:
        raise BadSettings(f"{path} raised {first_line(error)}{_where(error, text)}") from error
    if not hasattr(module, name):
        raise BadSettings(f"there is no function {name!r} in {path}")
    function = getattr(module, name)
    if not callable(function):
        raise BadSettings(f"{name} in {path} is not a function but of type {type(function).__name__}")
    return module, function


def made_by(text: str) -> tuple[Any, Any, Any]:
    """The model, the data and the loss (or None) that the function ``script.py:function`` returns."""
    _, function = load(text)
    if needed := _needed(function):
        raise BadSettings(
            f"{text} needs arguments ({', '.join(needed)}): let it take none and return (model, (X, y)), or "
            "(model, (X, y), loss)"
        )
    try:
        with _arguments_of(Path(text.partition(":")[0])):
            returned = function()
    except ManyhandsError:
        raise
    except Exception as error:
        raise BadSettings(f"{text} raised {first_line(error)}{_where(error, text)}") from error
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        is_row = isinstance(returned, (tuple, list))
        shown = (
            f"{type_in_words(returned)} of length {len(returned)}"
            if is_row
            else f"one value of type {type(returned).__name__}"
        )
        raise BadSettings(f"{text} returns {shown}: let it return (model, (X, y)), or (model, (X, y), loss)")
    model, data, *loss = returned
    return model, data, loss[0] if loss else None


def _needed(function: Any) -> list[str]:
    """The function's required arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [known.name for known in parameters if known.default is known.empty and known.kind not in optional]


def _where(error: Exception, text: str) -> str:
    """The line of the script that was running when the error was raised."""
    file = Path(text.partition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f" (line {lines[-1]})" if lines else ""


@contextlib.contextmanager
def _arguments_of(path: Path) -> Iterator[None]:
    """A script that parses its arguments gets none: those of this command are not meant for it."""
    arguments = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = arguments


def _module(path: Path) -> Any:
    """Import the script. Its definitions are pickled by value, because workers cannot import it."""
    sys.path.insert(0, str(path.parent.resolve()))
    name = f"manyhands_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if importlib.util.find_spec("cloudpickle"):  # comes with the frameworks that have worker processes
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return module
