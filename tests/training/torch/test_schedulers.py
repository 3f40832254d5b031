"""PyTorch's own schedulers: the rates of a loop by hand, resumed to the bit, on any number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from training_cases import fit, mlp, same, vectors

import manyhands.torch as mh
from manyhands.errors import BadSettings
from manyhands.training.options import Limits

STEPS = 6  # of an epoch: 90 samples in batches of 16


def warm_up_and_decay(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


MAKERS: dict[str, Any] = {
    "StepLR": functools.partial(lr_scheduler.StepLR, step_size=4, gamma=0.5),
    "MultiStepLR": functools.partial(lr_scheduler.MultiStepLR, milestones=[2, 9]),
    "CosineAnnealingLR": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=40),
    "LambdaLR": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "SequentialLR": warm_up_and_decay,
}


def by_hand(make: Any, steps: int) -> list[float]:
    """The rate of every step of a plain loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", list(MAKERS))
def test_rates_of_a_loop_by_hand_and_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    make, expected = MAKERS[name], by_hand(MAKERS[name], 9)
    how: dict[str, Any] = {"optimizer": sgd, "schedule": mh.PerStep(make), "max_epochs": None, "lr": None}
    rows = Limits(max_steps=8, evaluate_every="1 steps")
    whole, result = fit(mlp(), vectors(), 1, **how, limits=rows, callbacks=[mh.LearningRateMonitor()])
    assert [row["lr"] for row in result.rows] == pytest.approx(expected[1:9], rel=1e-12)
    for steps in (5, 8):
        limits = Limits(max_steps=steps)
        cut, _ = fit(mlp(), vectors(), 1, **how, limits=limits, run=tmp_path / "run", resume="auto")
    assert same(whole, cut)


def test_per_epoch_and_on_two_ranks() -> None:
    make = functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    how: dict[str, Any] = {"optimizer": sgd, "schedule": mh.PerEpoch(make), "max_epochs": 3, "lr": None}
    monitor = [mh.LearningRateMonitor()]
    one, result = fit(mlp(), vectors(), 1, **how, callbacks=monitor)
    assert [row["lr"] for row in result.rows] == [0.1, 0.05, 0.025]
    two, _ = fit(mlp(), vectors(), 2, **how, callbacks=monitor)
    assert all(torch.allclose(one[name], two[name], rtol=1e-10) for name in one)


def test_a_finished_scheduler_goes_on_with_its_optimizer() -> None:
    for ranks in (1, 2):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        fit(net, vectors(), ranks, optimizer=optimizer, schedule=mh.PerStep(scheduler), max_epochs=1, lr=None)
        assert scheduler.optimizer is optimizer
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (STEPS, 0.05)
    other = lr_scheduler.StepLR(torch.optim.SGD(mlp().parameters(), lr=0.1), step_size=4)
    with pytest.raises(BadSettings, match="belongs to another optimizer"):
        fit(mlp(), vectors(), 1, optimizer=sgd, schedule=mh.PerStep(other), lr=None)


def test_a_job_that_is_refused_leaves_a_finished_scheduler_alone() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    no_blocks = mh.Step(activation_checkpointing=lambda module: False)
    for scheduler, options in ((step, {"step": no_blocks}), (plateau, {})):
        with pytest.raises(BadSettings):
            fit(net, vectors(), 1, optimizer=optimizer, schedule=mh.PerStep(scheduler), lr=None, **options)
        assert scheduler.optimizer is optimizer
    fit(net, vectors(), 1, optimizer=optimizer, schedule=mh.PerStep(step), max_epochs=1, lr=None)
    assert step.last_epoch == STEPS


def test_a_plateau_follows_a_figure_and_is_resumed(tmp_path: Path) -> None:
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0, threshold_mode="abs")
    how: dict[str, Any] = {"optimizer": sgd, "lr": None, "callbacks": [mh.LearningRateMonitor()]}
    data = (vectors(), vectors(20))
    whole, result = fit(mlp(), data, 1, **how, schedule=mh.PerEpoch(plateau), max_epochs=4)
    assert [row["lr"] for row in result.rows] == [0.1, 0.1, pytest.approx(0.01), pytest.approx(0.001)]
    for epochs in (2, 4):
        resumed = {"max_epochs": epochs, "run": tmp_path / "run", "resume": "auto"}
        cut, _ = fit(mlp(), data, 1, **how, **resumed, schedule=mh.PerEpoch(plateau))
    assert same(whole, cut)
    # An evaluation that only the end of a job brings is no metric that the resumed job has seen.
    for steps in (result.steps * 3 // 8, result.steps):
        within = {"max_epochs": 4, "run": tmp_path / "within", "resume": "auto", "limits": mh.Limits(max_steps=steps)}
        cut, _ = fit(mlp(), data, 1, **how, **within, schedule=mh.PerEpoch(plateau))
    assert same(whole, cut)
    trainer, numbers = mh.Trainer(1, loss="mse", schedule=mh.PerEpoch(plateau, "val_acc")), (torch.rand(8, 4),) * 2
    with pytest.raises(BadSettings, match=r"PerEpoch\(monitor='val_acc'\): there is no metric 'val_acc'"):
        trainer.fit(torch.nn.Linear(4, 4), numbers, numbers)
    with pytest.raises(BadSettings, match=r"'val_loss'\): there is no metric.*no validation data"):
        fit(mlp(), vectors(), 1, **how, schedule=mh.PerEpoch(plateau))
    by_training = mh.PerEpoch(plateau, monitor="train_loss")
    assert fit(mlp(), vectors(), 1, **how, schedule=by_training, max_epochs=3)[1].rows[2]["lr"] == pytest.approx(0.01)


def test_schedulers_as_they_are() -> None:
    """A finished one, a class, a function; after every epoch, or after every step where that is what it is for."""
    cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=18, cycle_momentum=False)
    for schedule, kind in (
        (functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), mh.PerEpoch),
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), mh.PerEpoch),
        (lr_scheduler.ConstantLR, mh.PerEpoch),
        (cycle, mh.PerStep),
    ):
        how: dict[str, Any] = {"optimizer": sgd, "max_epochs": 3, "lr": None, "callbacks": [mh.LearningRateMonitor()]}
        _, as_it_is = fit(mlp(), vectors(), 1, **how, schedule=schedule)
        _, said = fit(mlp(), vectors(), 1, **how, schedule=kind(schedule))
        assert [row["lr"] for row in as_it_is.rows] == [row["lr"] for row in said.rows]
    by_class = fit(mlp(), vectors(), 1, **how, schedule=mh.PerEpoch(lr_scheduler.ExponentialLR, gamma=0.5))[1]
    halved = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)
    by_function = fit(mlp(), vectors(), 1, **how, schedule=mh.PerEpoch(halved))[1]
    assert [row["lr"] for row in by_class.rows] == [row["lr"] for row in by_function.rows]
    net = mlp()
    optimizer = sgd(net.parameters())
    fit(net, vectors(), 1, optimizer=optimizer, schedule=lr_scheduler.StepLR(optimizer, 1, 0.5), max_epochs=2, lr=None)
    assert optimizer.param_groups[0]["lr"] == 0.025
    how = {"optimizer": sgd, "max_epochs": 3, "lr": None, "schedule": lambda done: 1 - done}
    fit(mlp(), vectors(), 1, **how)  # a function of progress stays one


def test_what_is_no_schedule() -> None:
    with pytest.raises(BadSettings, match="a schedule is a function"):
        mh.Trainer(schedule=torch.optim.SGD)
    with pytest.raises(BadSettings, match=r"'step_size': .*schedule=mh.PerEpoch\(StepLR, name=value\)"):
        fit(mlp(), vectors(), 1, schedule=lr_scheduler.StepLR)
    with pytest.raises(BadSettings, match=r"give a scheduler's class with its arguments, as mh.PerStep\(StepLR"):
        mh.PerStep(3)
    with pytest.raises(BadSettings, match="the function gave an int"):
        fit(mlp(), vectors(), 1, schedule=mh.PerStep(lambda optimizer: 3))
