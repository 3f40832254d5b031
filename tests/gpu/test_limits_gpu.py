"""Limits, signals, schedulers and the batch-size search with a captured step on a real GPU."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training_gpu_cases import captured  # noqa: E402

from manyhands import torch as mh  # noqa: E402

X = torch.rand(300, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(5, (300,), generator=torch.Generator().manual_seed(1))


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)).double()


def trained(**options: Any) -> tuple[dict[str, Any], mh.Result]:
    model = net()
    options = {"devices": ["gpu:0"], "batch_size": 32, "quiet": True, "precision": "fp64", "lr": 0.1, **options}
    result = mh.Trainer(**options).fit(model, (X, Y), (X, Y))
    return model.state_dict(), result


def test_a_scheduler_reaches_the_captured_step() -> None:
    """The rate is a float32 on the device."""
    schedule = mh.PerStep(functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5))
    limits = mh.Limits(max_steps=25, evaluate_every="7 steps")
    fast, result = trained(schedule=schedule, limits=limits)
    assert captured(result)
    plain, _ = trained(schedule=schedule, limits=limits, step=mh.Step(optimize="off"))
    for name, value in plain.items():
        assert torch.allclose(fast[name], value, rtol=1e-5, atol=1e-7)
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=100)
    _, result = trained(schedule=mh.PerStep(cycle), limits=limits, optimizer=momentum, lr=None)
    assert any("the step: plain" in note and "momentum" in note for note in result.notes)


def test_a_signal_and_limits_are_resumed_to_the_bit(tmp_path: Path) -> None:
    def stop(step: int) -> float:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    limits = mh.Limits(max_steps=40, limit_batches=6, evaluate_every="5 steps")
    whole, _ = trained(limits=limits, schedule=mh.by_step(lambda step: 1.0))
    with pytest.raises(mh.Stopped):
        trained(limits=limits, schedule=mh.by_step(stop), run=tmp_path / "run")
    cut, _ = trained(limits=limits, schedule=mh.by_step(lambda step: 1.0), run=tmp_path / "run", resume="auto")
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


def test_the_largest_batch_fills_the_memory_that_it_may() -> None:
    wide = torch.nn.Sequential(torch.nn.Linear(20, 2**16), torch.nn.Tanh(), torch.nn.Linear(2**16, 5))
    samples = X.float().repeat(100, 1), Y.repeat(100)
    trainer = mh.Trainer(devices=["gpu:0"], lr=0.1, precision="fp32", quiet=True)
    found, total = [], torch.cuda.get_device_properties(0).total_memory
    try:
        for gigabytes in (1, 4):
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(gigabytes * 2**30 / total)
            found.append(trainer.find_batch_size(wide, samples))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 64 <= found[0] < found[1]
    assert all(parameter.device.type == "cpu" for parameter in wide.parameters())
