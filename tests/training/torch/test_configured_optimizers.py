"""What ``configure_optimizers`` gives: Lightning's forms, with schedulers, are the trainer's own options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from training_cases import fit, mlp, same, vectors

import manyhands.torch as mh
from manyhands.errors import BadSettings

halved = functools.partial(lr_scheduler.StepLR, step_size=4, gamma=0.5)


class Net(torch.nn.Module):
    """A net that says itself how it is optimized."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.configure = mlp(), configure

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.net(X)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.configure(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


class Two(torch.nn.Module):
    """Two nets, each with its optimizer."""

    def __init__(self, configure: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 1).double(), torch.nn.Linear(6, 1).double()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        a, b = (torch.optim.SGD(net.parameters(), lr=rate) for net, rate in ((self.a, 0.1), (self.b, 0.01)))
        return self.configure(a, b)

    def training_step(self, batch: Any, optimizers: Any) -> None:
        for name, net in zip(optimizers, (self.a, self.b), strict=True):
            optimizers[name].minimize((net(batch[0]) - 1).square().mean())


FORMS: dict[str, Callable[[Any], Any]] = {
    "pair of lists": lambda one: ([one], [{"scheduler": halved(one), "interval": "step", "name": "rate"}]),
    "dict": lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": halved(one), "interval": "step"}},
    "list of a dict": lambda one: [{"optimizer": one, "lr_scheduler": {"scheduler": halved(one), "interval": "step"}}],
}


@pytest.mark.parametrize("form", list(FORMS))
def test_lightnings_forms_are_the_trainers_options(form: str, tmp_path: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    how: dict[str, Any] = {"lr": None, "callbacks": [mh.LearningRateMonitor()]}
    expected, rows = fit(mlp(), vectors(), 1, **how, max_epochs=2, optimizer=sgd, schedule=mh.PerStep(halved))
    own, result = fit(Net(FORMS[form]), vectors(), 1, **how, max_epochs=2)
    assert same(expected, {name.removeprefix("net."): one for name, one in own.items()})
    assert [row["lr"] for row in result.rows] == [row["lr"] for row in rows.rows] == [0.05, 0.0125]
    if form == "dict":
        for epochs in (1, 2):
            run = {"run": tmp_path / "run", "resume": "auto", "max_epochs": epochs}
            resumed, _ = fit(Net(FORMS[form]), vectors(), 1, **how, **run)
        assert same(own, resumed)


def test_each_of_several_optimizers_has_its_scheduler(tmp_path: Path) -> None:
    def lists(a: Any, b: Any) -> Any:
        return [a, b], [{"scheduler": lr_scheduler.ExponentialLR(b, 0.5), "interval": "epoch"}]

    def named(a: Any, b: Any) -> Any:
        both = {"scheduler": lr_scheduler.ReduceLROnPlateau(a, patience=0, threshold=9.0), "monitor": "train_loss"}
        return {"b": {"optimizer": b, "lr_scheduler": halved(b)}, "a": {"optimizer": a, "lr_scheduler": both}}

    how: dict[str, Any] = {"lr": None, "callbacks": [mh.LearningRateMonitor()]}
    _, result = fit(Two(lists), vectors(), 1, **how, max_epochs=3)
    rates = [[value for name, value in row.items() if name.startswith("lr")] for row in result.rows]
    assert rates == [[0.1, 0.01], [0.1, 0.005], [0.1, 0.0025]]
    whole, result = fit(Two(named), vectors(), 1, **how, max_epochs=4)
    for epochs in (2, 4):
        run = {"run": tmp_path / "run", "resume": "auto", "max_epochs": epochs}
        resumed, again = fit(Two(named), vectors(), 1, **how, **run)
    assert same(whole, resumed)
    last = {name: value for name, value in again.rows[-1].items() if name.startswith("lr")}
    assert last == {name: value for name, value in result.rows[-1].items() if name.startswith("lr")}
    assert min(last.values()) < 0.01


def test_a_key_that_is_not_supported_is_named() -> None:
    def refused(configure: Callable[[Any], Any], match: str, **options: Any) -> None:
        with pytest.raises(BadSettings, match=match):
            fit(Net(configure), vectors(), 1, **{"lr": None, **options})

    def with_key(**keys: Any) -> Callable[[Any], Any]:
        return lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": halved(one), **keys}}

    refused(with_key(frequency=2), "gave 'frequency': 2: leave it out")
    refused(with_key(interval="batch"), "gave 'interval': 'batch': give 'step' or 'epoch'")
    refused(with_key(strict=False), "gave 'strict': False")
    refused(with_key(opt_idx=0), "gave 'opt_idx' with a scheduler: known are scheduler, interval")
    refused(lambda one: {"optimizer": one, "frequency": 5}, "gave 'frequency' beside an optimizer: known are optimizer")
    refused(lambda one: {"optimizer": one, "lr_scheduler": 3}, "gave an int as a scheduler")
    refused(lambda one: ([one], [halved(one)] * 2), "two schedulers for one optimizer")
    refused(with_key(), "gave a scheduler, and the trainer has schedule=", schedule=mh.PerStep(halved))


def test_schedulers_that_cannot_be_stepped_so() -> None:
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=2)
    with pytest.raises(
        BadSettings, match=r"ReduceLROnPlateau follows a metric, .*mh.PerEpoch\(make, monitor='val_loss'"
    ):
        fit(mlp(), vectors(), 1, schedule=mh.PerStep(plateau))
    cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=10)
    with pytest.raises(ValueError, match=r"Tried to step 11 times"):
        fit(mlp(), vectors(), 1, schedule=mh.PerStep(cycle), max_epochs=2)
