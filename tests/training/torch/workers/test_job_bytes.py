"""What a job's definitions need on their way to the worker processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
from training_cases import difference, fit, vectors

from manyhands.training.torch.workers import job_bytes

NET = """
import torch

FACTOR = {factor}

def scaled(x):
    return FACTOR * x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        return scaled(self.linear(x))
"""


def loaded(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that is loaded by its path, as programs do it with plugins and configurations."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("twin", [False, True])
def test_a_model_from_a_module_that_was_loaded_by_its_path(
    twin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the path has another module of the same name, which a worker would import."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "loaded_by_path.py").write_text(NET.format(factor=3.0))
    if twin:
        (tmp_path / "loaded_by_path.py").write_text(NET.format(factor=1.0))
        monkeypatch.syspath_prepend(tmp_path)
    module = loaded(plugins / "loaded_by_path.py", "loaded_by_path", monkeypatch)
    registered = cloudpickle.list_registry_pickle_by_value()
    alone, _ = fit(module.Net(), vectors(), 1)
    both, _ = fit(module.Net(), vectors(), 2)
    assert difference(alone, both) < 1e-12
    assert cloudpickle.list_registry_pickle_by_value() == registered


def test_a_module_that_can_be_imported_travels_by_name() -> None:
    assert b"training_cases" in job_bytes.dumps(vectors)
    assert job_bytes.dumps(torch.nn.Linear) == pickle.dumps(torch.nn.Linear, cloudpickle.DEFAULT_PROTOCOL)


class Recording(torch.nn.Module):
    _can_record_outputs: ClassVar = {"hidden_states": "layer"}


class _ByModel(dict[Any, Any]):
    """The registry of recent versions of transformers."""

    def __setitem__(self, model: Any, value: Any) -> None:
        super().__setitem__(str(type(model)), value)


@pytest.mark.parametrize("registry", [{}, _ByModel()])
def test_models_of_transformers_are_announced_in_a_worker(
    registry: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("transformers.utils.output_capturing")
    fake._CAN_RECORD_REGISTRY = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)

    class Job:
        model = torch.nn.Sequential(Recording())

    job_bytes.loads(cloudpickle.dumps(Job()))
    assert list(registry.values()) == [{"hidden_states": "layer"}]
