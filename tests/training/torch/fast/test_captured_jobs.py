"""Jobs of every kind, captured: they compute what plain steps compute, and most of their steps are replays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from captured_cases import assert_as_plain, capturing, trained
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CLASSES, Batches, Chunks, Rows, WithNet, convnet, difference, images, mlp, vectors

from manyhands import torch as mh
from manyhands.training.options import Limits, Step
from manyhands.training.torch.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Named(WithNet):
    """Takes a dict with a name, and computes its loss itself."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        scores = self.net(x * mask)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def dicts() -> Batches:
    X, y = vectors()
    pairs = enumerate(zip(X.split(16), y.split(16), strict=True))
    return Batches([{"x": x, "mask": torch.ones_like(x), "labels": y, "name": f"{n}.png"} for n, (x, y) in pairs])


class Lengths(nn.Module):
    """Reads sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


def sequences(lengths: list[int]) -> Batches:
    generator = torch.Generator().manual_seed(0)
    return Batches(
        [(torch.randn(8, length, 4, generator=generator).double(), torch.arange(8) % CLASSES) for length in lengths]
    )


class Sums(WithNet):
    """A step whose loss is a sum and a count."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        weight = (y + 1).double()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return mh.LossSum((losses * weight).sum(), weight.sum())


class Attacked(Sums):
    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch[0].requires_grad_(), batch[1]
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(self.net(x), y), x)
        return nn.functional.cross_entropy(self.net(x + slope.sign() / 10), y)


class Adversaries(nn.Module):
    """Two optimizers, of which one makes two updates in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(), nn.Linear(CLASSES, 1).double()

    def configure_optimizers(self) -> Any:
        return {"maker": SGD(self.maker.parameters()), "critic": SGD(self.critic.parameters())}

    def training_step(self, batch: Any, batch_idx: int, optimizers: Any) -> None:
        x, _ = batch
        for _ in range(2):
            optimizers["critic"].minimize(self.critic(self.maker(x).detach()).square().mean())
        optimizers["maker"].minimize(-self.critic(self.maker(x)).mean())


JOBS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "arrays": (partial(mlp, norm=True), vectors(), {}),
    "a data set": (partial(mlp, norm=True), Rows, {}),
    "a loader": (mlp, lambda: DataLoader(Rows(), 16, shuffle=True), {}),
    "a loader of its own": (mlp, lambda: Chunks(*vectors(), 16), {}),
    "dicts with a name": (partial(Named, norm=True), dicts, {}),
    "several lengths": (Lengths, lambda: sequences([5, 7, 5, 7, 9] * 6), {"optimizer": SGD, "batch_size": 8}),
    "images": (convnet, images(120), {}),
    "clip": (mlp, vectors(), {"gradient_clip_val": 0.1}),
    "momentum and a schedule": (mlp, vectors(), {"optimizer": SGD, "schedule": mh.one_cycle}),
    "a scheduler of PyTorch": (mlp, vectors(), {"optimizer": SGD, "schedule": torch.optim.lr_scheduler.LinearLR}),
    "accumulation": (partial(mlp, norm=True), vectors(), {"step": Step(accumulate=3), "optimizer": SGD}),
    "accumulation from a loader": (mlp, Rows, {"step": Step(accumulate=4)}),
    "accumulation of images": (convnet, images(), {"step": Step(accumulate=2)}),
    "a sum and a count": (Sums, vectors(), {}),
    "accumulation of sums": (Sums, Rows, {"step": Step(accumulate=3)}),
    "an average": (mlp, vectors(), {"callbacks": [mh.EMA(0.9)]}),
    "gradients of inputs": (Attacked, Rows, {}),
    "several optimizers": (Adversaries, Rows, {}),
    "a limit of steps": (mlp, Rows, {"limits": Limits(max_steps=11), "max_epochs": 9}),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_captured_job_is_the_plain_one(job: str) -> None:
    make, data, options = JOBS[job]
    captured, result = assert_as_plain(make(), data, **options)
    assert captured.replays > 5, result.notes
    assert not any("plain" in note for note in result.notes), result.notes


def test_a_batch_that_is_left_out() -> None:
    X, y = vectors()
    X[20] = torch.nan
    for data in ((X, y), Chunks(X, y, 16)):
        with pytest.warns(UserWarning, match="continuing"):
            captured, _ = assert_as_plain(mlp(), data, step=Step(on_nan="continue"), optimizer=SGD)
        assert captured.replays > 5


def test_the_longest_lengths_are_plain_and_a_note_says_what_would_help() -> None:
    lengths = [*range(3, 24)] * 2
    captured, result = assert_as_plain(Lengths(), lambda: sequences(lengths), max_epochs=2, batch_size=8)
    assert captured.replays
    (note,) = [note for note in result.notes if "padded" in note]
    assert "multiples of 8" in note


def test_a_captured_job_is_resumed_within_an_epoch(tmp_path: Any) -> None:
    """From a data set, where it was stopped; the graphs are recorded anew."""
    whole, _ = trained(mlp(norm=True), Rows(), optimizer=SGD, max_epochs=4)
    with capturing() as captured:
        trained(mlp(norm=True), Rows(), optimizer=SGD, max_epochs=4, limits=Limits(max_steps=9), run=tmp_path / "run")
        resumed, _ = trained(mlp(norm=True), Rows(), optimizer=SGD, max_epochs=4, run=tmp_path / "run", resume="auto")
    assert captured.replays > 5
    assert difference(resumed, whole) < 1e-12


def test_one_micro_step_is_recorded_for_all() -> None:
    with capturing() as captured:
        trained(mlp(), vectors(96), step=Step(accumulate=4))
    assert captured.recorded == 3  # begin, passes, update


def test_the_user_reads_how_steps_run(capsys: pytest.CaptureFixture[str]) -> None:
    with capturing():
        trained(mlp(), Rows(), quiet=False)
    assert "the step: one CUDA graph, batches from the loader" in capsys.readouterr().err


# Evaluation and prediction by replays: the same losses, metrics and outputs as without


class Validated(WithNet):
    """Steps of its own; ``reads``: the one that validates reads the number of the batch."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.training_step(batch)
        return loss * (1 + batch_idx) if self.reads else loss


NETS = {
    "scores": lambda: mlp(norm=True),
    "a step of its own": lambda: Validated(reads=False),
    "a step that reads": lambda: Validated(reads=True),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("data", [vectors, Rows], ids=["arrays", "a data set"])
def test_the_same_evaluation(net: str, data: Any) -> None:
    train, test = vectors(32), data(150)
    _, expected = trained(NETS[net](), (train, test))
    with capturing() as captured:
        _, result = trained(NETS[net](), (train, test))
    assert captured.recorded > 2, "more than the steps"
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row["val_loss"] == pytest.approx(other["val_loss"], abs=1e-10)
        assert row["val_acc"] == other["val_acc"]


def test_metrics_and_predictions() -> None:
    def mean(outputs: Any, targets: Any) -> float:
        return float(outputs.mean()) + float(targets.sum())

    model, (X, y) = mlp(norm=True), vectors(4000)
    trainer = Trainer(1, batch_size=16, devices=["cpu"], precision="fp64", metrics={"mean": mean})
    measured, predicted = trainer.evaluate(model, (X, y)), trainer.predict(model, X)
    with capturing() as captured:
        assert trainer.evaluate(model, (X, y)) == pytest.approx(measured, abs=1e-10)
        assert torch.equal(trainer.predict(model, X), predicted)
    assert captured.replays > 10


class Numbered(nn.Linear):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0].float()) + batch_idx


def test_a_predict_step_that_reads_the_number_of_its_batch() -> None:
    model, data, trainer = Numbered(6, 2), vectors(4000), Trainer(1, batch_size=16, devices=["cpu"])
    expected = trainer.predict(model, data)
    with capturing():
        assert torch.equal(trainer.predict(model, data), expected)
