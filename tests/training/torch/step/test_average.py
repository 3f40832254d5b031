"""The moving average of the weights: what one would compute by hand, whatever the weights are."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_cases import Batches, mlp, vectors

from manyhands import torch as mh
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.options import Step
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.part import Turn

DECAY = 0.9


@pytest.mark.parametrize(("use_buffers", "bad"), [(False, None), (True, None), (False, 2)])
def test_it_is_that_of_swa_utils(use_buffers: bool, bad: int | None, tmp_path: Path) -> None:
    """As in AveragedModel: buffers of BatchNorm are the newest ones of the training, or averaged like weights.

    A batch that is left out, for its loss is NaN, leaves no trace in the average either.
    """
    X, y = vectors(48)
    batches = list(enumerate(zip(X.split(8), y.split(8), strict=True)))
    by_hand, model = mlp(norm=True), mlp(norm=True)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    averaged = AveragedModel(by_hand, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)
    averaged.n_averaged.fill_(1)  # else it forgets the weights at the start
    for _, (inputs, labels) in [batch for batch in batches if batch[0] != bad]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(by_hand(inputs), labels).backward()
        optimizer.step()
        averaged.update_parameters(by_hand)
    loader = Batches(
        [(inputs * torch.nan if number == bad else inputs, labels) for number, (inputs, labels) in batches]
    )
    how: Any = {"lr": 0.1, "precision": "fp64", "quiet": True, "run": tmp_path / "run", "step": Step(on_nan="continue")}
    with contextlib.nullcontext() if bad is None else pytest.warns(UserWarning, match="not a number"):
        result = mh.Trainer(1, callbacks=[mh.EMA(DECAY, use_buffers)], **how).fit(model, loader, (X, y))
    loaded = mh.load_weights(mlp(norm=True), tmp_path / "run")
    for found in (model, loaded):
        for name, value in averaged.module.state_dict().items():
            if "num_batches" in name:  # whole numbers are not averaged here
                assert found.state_dict()[name] == len(batches) - (bad is not None)
                continue
            assert torch.allclose(found.state_dict()[name], value, rtol=1e-12, atol=1e-14), name
    expected = torch.nn.functional.cross_entropy(averaged.module.eval()(X), y)
    assert result.rows[-1]["val_loss"] == pytest.approx(float(expected.detach()), rel=1e-12)


def test_half_precision_and_tied_weights() -> None:
    """An average of bfloat16 is kept in float32, and a weight with two names is saved under both."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    average = Average(net, Averaging(0.999))
    before = average.tensors()[0].clone()
    assert before.dtype == torch.float32
    with torch.no_grad():
        net[0].weight += 1
    for _ in range(10):
        average.after_update(Turn(0))
    moved = (average.tensors()[0] - before).mean()
    assert 0.0095 < float(moved) < 0.0105, "bfloat16 would have lost most of it"
    again = Average(net, Averaging(0.999))
    assert again.restore(*average.state_to_save()) is None
    assert torch.equal(again.tensors()[0], average.tensors()[0])
    weights = net[0].weight.detach().clone()
    with average.in_model():
        assert torch.equal(net[1].weight, average.tensors()[0].bfloat16())
    assert torch.equal(net[0].weight, weights)


def test_buffers_that_cannot_be_averaged_stay() -> None:
    """A mask of -inf, an expanded buffer, whole numbers; and a layer may put another tensor into its buffer."""

    class Net(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), -torch.inf))
            self.register_buffer("wide", torch.ones(1).expand(3))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("cache", torch.ones(2), persistent=False)
            self.register_buffer("mean", torch.zeros(2))

    net = Net()
    average = Average(net, Averaging(0.5, buffers=True))
    net.mean, net.count = torch.ones(2), torch.tensor(4)
    average.after_update(Turn(0))
    with average.in_model():
        assert net.mean.tolist() == [0.5, 0.5]
    assert net.mean.tolist() == [1, 1]
    average.close()
    assert (net.mask == -torch.inf).all()
    assert net.count == 4
    again = Average(net, Averaging(0.5, buffers=True))
    assert again.restore(*average.state_to_save()) is None
    assert again.of_buffers[0].tolist() == [0.5, 0.5]


def test_a_run_without_an_average_gets_one(tmp_path: Path) -> None:
    how: Any = {"run": tmp_path / "run", "lr": 0.1, "quiet": True}
    mh.Trainer(1, **how).fit(mlp(), vectors())
    result = mh.Trainer(2, resume="auto", callbacks=[mh.EMA()], **how).fit(mlp(), vectors())
    assert any("no average of the weights (EMA)" in note for note in result.notes)
    result = mh.Trainer(3, resume="auto", **how).fit(mlp(), vectors())
    assert any("and this job keeps none" in note for note in result.notes)
