"""Callbacks that ask for the model between epochs: what they see, and that all ranks get what they change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_cases import capturing
from support import as_if_killed
from torch import nn
from training_cases import CLASSES, WithOptimizer, convnet, difference, fit, images, mlp, same, vectors

from manyhands import torch as mh
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Training
from manyhands.training.options import Checkpoints, Step


class Unfreeze(mh.Callback):
    """Trains the first layer from the second epoch on, and the last one in the second epoch alone."""

    def on_model(self, training: Training, model: Any) -> None:
        model[0].requires_grad_(training.epoch >= 1)
        model[-1].requires_grad_(training.epoch < 2)


class Shrink(mh.Callback):
    """Changes a weight and a running mean, and has the model predict, as for a picture."""

    def __init__(self) -> None:
        self.sizes: list[float] = []

    @torch.no_grad()
    def on_model(self, training: Training, model: Any) -> None:
        assert not model[1].training
        self.sizes.append(float(model[0].weight.norm()))
        model[0].weight.mul_(0.5)
        model[1].running_mean.zero_()
        torch.rand(3)
        model(images(4)[0])


class Act(mh.Callback):
    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act

    def on_model(self, training: Training, model: Any) -> None:
        self.act(model)


def frozen() -> nn.Sequential:
    net = mlp()
    net[0].requires_grad_(False)
    return net


ADAMW = {"optimizer": "adamw", "lr": 0.01, "max_epochs": 3}


@pytest.mark.parametrize("options", [ADAMW, {"max_epochs": 3, "step": Step(accumulate=2), "callbacks": mh.EMA(0.5)}])
def test_two_ranks_train_what_one_device_trains(options: dict[str, Any]) -> None:
    callbacks = [Unfreeze(), *([options["callbacks"]] if "callbacks" in options else [])]
    options = {**options, "callbacks": callbacks}
    one, two = frozen(), frozen()
    alone, _ = fit(one, vectors(), **options)
    several, _ = fit(two, vectors(), 2, **options)
    assert difference(alone, several) < 1e-12
    assert not same(alone, fit(frozen(), vectors(), **{**options, "callbacks": callbacks[1:]})[0])
    for net in (one, two):
        assert [parameter.requires_grad for parameter in net.parameters()] == [True, True, False, False]


def test_frozen_weights_stay_and_trained_ones_move() -> None:
    seen: list[list[torch.Tensor]] = []

    class See(Unfreeze):
        def on_model(self, training: Training, model: Any) -> None:
            super().on_model(training, model)
            seen.append([parameter.detach().clone() for parameter in model.parameters()])

    net = frozen()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    fit(
        net,
        vectors(),
        2,
        max_epochs=3,
        optimizer=torch.optim.AdamW(net.parameters(), weight_decay=0.1),
        callbacks=[See()],
    )
    epochs = [before, *seen]
    moved = [[not torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(epochs)]
    assert moved == [[False, False, True, True], [True] * 4, [True, True, False, False]]


def test_values_reach_all_ranks_and_a_forward_pass_changes_nothing() -> None:
    one, two = Shrink(), Shrink()
    alone, _ = fit(convnet(), images(), callbacks=[one], step=Step(batch_stats="global"))
    several, _ = fit(convnet(), images(), 2, callbacks=[two], step=Step(batch_stats="global"))
    assert difference(alone, several) < 1e-12
    assert one.sizes == pytest.approx(two.sizes, rel=1e-12)
    assert alone["0.weight"].norm() == pytest.approx(one.sizes[-1] / 2)

    look = Act(lambda model: model(torch.rand(4, 6, dtype=torch.float64)))
    for ranks in (1, 2):
        net, _ = fit(mlp(dropout=0.5, norm=True), vectors(), ranks, callbacks=[look])
        assert same(net, fit(mlp(dropout=0.5, norm=True), vectors(), ranks)[0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), 1.0

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.scale * self.net(X)  # type: ignore[no-any-return]


class Toggle(mh.Callback):
    def on_model(self, training: Training, model: Any) -> None:
        model.scale = 3.0 - model.scale
        if training.epoch == 3:
            training.save("third")
            training.stop("enough")


def test_attributes_reach_all_ranks_and_the_callback_may_save_and_stop(tmp_path: Path) -> None:
    nets = [Scaled(), Scaled()]
    weights = []
    for ranks, net in enumerate(nets, 1):
        tensors, result = fit(net, vectors(), ranks, max_epochs=9, run=tmp_path / f"{ranks}", callbacks=[Toggle()])
        weights.append(tensors)
        assert (len(result.rows), result.stopped, net.scale) == (3, "enough", 2.0)
        assert len(list((tmp_path / f"{ranks}" / "third").iterdir())) == 1
    assert difference(*weights) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_job_trains_the_same_parameters(ranks: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {**ADAMW, "callbacks": [Unfreeze()], "checkpoints": Checkpoints(every=1, keep=99)}
    whole, _ = fit(frozen(), vectors(), ranks, run=tmp_path / "whole", **options)
    for step in (6, 8):  # at the end of the first epoch, and within the second
        net, run = frozen(), as_if_killed(tmp_path / "whole", step)
        resumed, _ = fit(net, vectors(), ranks, run=run, resume="auto", **options)
        assert same(whole, resumed), step
        assert [parameter.requires_grad for parameter in net.parameters()] == [True, True, False, False]


class Two(nn.Module):
    """Two layers, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, CLASSES).double()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.first, self.second)]

    def training_step(self, batch: Any, optimizers: Any) -> None:
        for number in range(2):
            optimizers[number].minimize(nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1]))


class FreezeBias(mh.Callback):
    def on_model(self, training: Training, model: Any) -> None:
        model.first.bias.requires_grad_(training.epoch == 2)


def test_several_optimizers_on_two_ranks() -> None:
    how: dict[str, Any] = {"max_epochs": 3, "lr": None, "callbacks": [FreezeBias()]}
    assert difference(fit(Two(), vectors(), **how)[0], fit(Two(), vectors(), 2, **how)[0]) < 1e-12


class Part(WithOptimizer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_trained_is_refused(ranks: int) -> None:
    net = Part()
    net.net[0].requires_grad_(False)
    with pytest.raises(BadSettings, match=r"requires_grad of net\.0\.weight.*give the optimizer all parameters"):
        fit(net, vectors(), ranks, callbacks=[Act(lambda model: model.requires_grad_(True))])
    with pytest.raises(BadSettings, match="no parameters that could be trained"):
        fit(mlp(), vectors(), ranks, callbacks=[Act(lambda model: model.requires_grad_(False))])
    replace = Act(lambda model: model.__setitem__(0, nn.Linear(6, 8).double()))
    with pytest.raises(BadSettings, match=r"on_model replaced.*write new values into it"):
        fit(mlp(), vectors(), ranks, callbacks=[replace])


def test_sharded_parameters_are_nowhere_whole() -> None:
    with pytest.raises(BadSettings, match=r"not with Step\(shard=True\).*mh.load_weights"):
        fit(mlp(), vectors(), 2, optimizer="sgd", callbacks=[Unfreeze()], step=Step(shard=True))


def elsewhere(model: Any) -> None:
    """Gives a weight other memory."""
    model[0].weight.data = model[0].weight.data.clone()


@pytest.mark.parametrize(
    ("callback", "net", "graphs"), [(Unfreeze, frozen, 3), (Shrink, convnet, 2), (lambda: Act(elsewhere), mlp, 4)]
)
def test_steps_are_captured_anew_where_a_graph_would_be_wrong(callback: Any, net: Any, graphs: int) -> None:
    data = (images(), images(12)) if net is convnet else (vectors(), vectors(12))
    for accumulate in (1, 2):
        how: dict[str, Any] = {"max_epochs": 4, "batch_size": 6, "step": Step(accumulate=accumulate)}
        plain, expected = fit(net(), data, callbacks=[callback()], **how)
        with capturing() as captured:
            weights, result = fit(net(), data, callbacks=[callback()], **how)
        assert difference(plain, weights) < 1e-8
        for row, other in zip(result.rows, expected.rows, strict=True):
            assert row["val_loss"] == pytest.approx(other["val_loss"], abs=1e-8)
        assert captured.replays > 20
        assert accumulate == 2 or captured.recorded == graphs
