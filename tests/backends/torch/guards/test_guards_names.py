"""Globals that a function reads in other ways than by their name. Our guards alone: virtual devices have no others."""

from __future__ import annotations

import builtins
import sys
import textwrap
import types
from typing import Any

import pytest

from manyhands.backends.torch.guards.state import Outside
from manyhands.errors import CannotTrace


class Names(dict[str, Any]):
    """Globals that are not an ordinary dict."""


def script(source: str, names: dict[str, Any] | None = None) -> Any:
    """The function that a script defines; its globals have ``settings`` and ``scale``."""
    settings = types.ModuleType("settings_of_a_script")
    vars(settings).update(scale=2.0)
    names = {} if names is None else names
    names |= {"__name__": "script", "sys": sys, "builtins": builtins, "scale": 2.0, "settings_of_a_script": settings}
    exec(textwrap.dedent(source), names)
    return names["function"]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("line", ["import settings_of_a_script as settings", "from settings_of_a_script import scale"])
def test_a_module_that_is_imported_inside_and_outside(line: str) -> None:
    used = "settings.scale" if "as settings" in line else "scale"
    function = script(f"""
        def function(x):
            {line}
            return x * {used}
    """)
    settings = function.__globals__["settings_of_a_script"]
    sys.modules["settings_of_a_script"] = settings
    outside = Outside(function)
    assert outside.holds()
    settings.scale = 3.0
    assert not outside.holds()


def test_a_global_that_is_read_from_its_module() -> None:
    function = script("def function(x): return x * sys.modules[__name__].scale")
    outside = Outside(function)
    assert outside.holds()
    function.__globals__["scale"] = 3.0
    assert not outside.holds()


@pytest.mark.parametrize("read", ["globals()['scale']", "builtins.globals()['scale']", "eval('scale')"])
def test_what_may_read_anything_is_refused(read: str) -> None:
    with pytest.raises(CannotTrace, match="which can read anything"):
        Outside(script(f"def function(x): return x * {read}"))


@pytest.mark.parametrize("line", ["return x.eval().globals", "return eval(x)"])
def test_other_things_of_these_names_are_not_refused(line: str) -> None:
    names: dict[str, Any] = {"eval": abs} if "(x)" in line else {}
    assert Outside(script(f"def function(x): {line}", names)).holds()


def test_globals_of_another_class() -> None:
    names = Names()
    outside = Outside(script("def function(x): return x * abs(scale)", names))
    assert outside.holds()
    names["abs"] = float
    assert not outside.holds()
