"""Explicit tasks over PyTorch: options, undeclared writes, modules, and the modes of the thread that gives a task."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from manyhands import torch as mh
from manyhands.errors import EngineError

# Options


def test_a_synchronous_scope_runs_tasks_in_the_callers_thread() -> None:
    with mh.parallel(synchronous=True):
        future = mh.task(threading.get_ident)()
        assert future.done()
        assert future.result() == threading.get_ident()


@pytest.mark.parametrize("option", [{"memory": 2.0}, {"compile": True}, {"reuse_outputs": True}], ids=str)
def test_a_scope_refuses_what_only_functions_have(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(EngineError, match=rf"parallel\(fn, {name}=") as caught, mh.parallel(**option):
        pass
    assert f"with parallel({name}=" in str(caught.value)


def test_a_function_refuses_threads() -> None:
    with pytest.raises(EngineError, match="threads=2"):
        mh.parallel(torch.sin, threads=2)  # type: ignore[call-overload]
    with pytest.raises(EngineError, match="threads=2"):
        mh.parallel(threads=2)(torch.sin)
