"""A user's script as a module: for commands that take ``script.py:function``."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings, type_in_words


def load(text: str) -> tuple[Any, Any]:
    """The module and the function that ``script.py:function`` names; an error in the script keeps its traceback."""
    file, _, name = text.partition(":")
    path = Path(file)
    if not name:
        raise BadSettings(f"{text!r} does not name a function of a script: write script.py:function")
    if not path.is_file():
        raise BadSettings(f"{text}: there is no file {file!r}")
    with _arguments_of(path):
        module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise BadSettings(f"there is no function {name!r} in {path}")
    return module, function


def maker(text: str) -> Callable[[], tuple[Any, Any, Any]]:
    """The function ``script.py:function``, which gives a model, the data and the loss (or None)."""
    _, function = load(text)

    def make() -> tuple[Any, Any, Any]:
        with _arguments_of(Path(text.partition(":")[0])):
            returned = function()
        if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
            raise BadSettings(
                f"{text} returns {type_in_words(returned)}: let it return (model, (X, y)), or (model, (X, y), loss)"
            )
        model, data, *loss = returned
        return model, data, loss[0] if loss else None

    return make


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
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    if importlib.util.find_spec("cloudpickle"):  # comes with the frameworks that have worker processes
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return module
