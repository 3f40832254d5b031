"""The same job with captured steps and with plain ones. A recorder for CPUs takes the place of CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from cpu_recorder import CpuRecorder
from training_cases import difference

from manyhands.training.result import Result
from manyhands.training.torch.fast import build
from manyhands.training.torch.step import steps
from manyhands.training.torch.trainer import Trainer


@dataclass
class Captured:
    """What a captured job left."""

    recorders: list[CpuRecorder] = field(default_factory=list)

    @property
    def replays(self) -> int:
        return sum(recorder.replays for recorder in self.recorders)

    @property
    def recorded(self) -> int:
        return sum(recorder.recorded for recorder in self.recorders)


@contextmanager
def capturing() -> Iterator[Captured]:
    """Jobs on the CPU capture their steps within it."""
    captured = Captured()

    def recorder_for(device: torch.device) -> CpuRecorder:
        captured.recorders.append(CpuRecorder())
        return captured.recorders[-1]

    # Kernels of our own fill in their results later, which the recorder's tape does not see.
    with mock.patch.object(steps, "recorder_for", recorder_for), build.without("fused norms"):
        yield captured


def trained(net: torch.nn.Module, data: Any, **options: Any) -> tuple[dict[str, Any], Result]:
    options = {"max_epochs": 3, "batch_size": 16, "devices": ["cpu"], "precision": "fp64", "quiet": True, **options}
    if "optimizer" not in options and not hasattr(net, "configure_optimizers"):
        options["lr"] = 0.05
    model = copy.deepcopy(net)
    torch.manual_seed(0)
    result = Trainer(**options).fit(model, data)
    return model.state_dict(), result


def assert_as_plain(net: torch.nn.Module, data: Any, **options: Any) -> tuple[Captured, Result]:
    """Weights, statistics and metrics of captured steps are those of plain ones."""
    without_run = {name: value for name, value in options.items() if name != "run"}
    plain, expected = trained(net, data() if callable(data) else data, **without_run)
    with capturing() as captured:
        weights, result = trained(net, data() if callable(data) else data, **options)
    assert difference(weights, plain) < 1e-8, result.notes  # a learning rate on the device is a float32
    for row, other in zip(result.rows, expected.rows, strict=True):
        left_out = dict.fromkeys(("seconds", "train_loss", "val_loss"))
        assert {**row, **left_out} == {**other, **left_out}
        assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-8)
    return captured, result
