"""Means that divide by what the labels weigh: class weights and labels that are left out, exact in parts of a batch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from training_cases import CLASSES, convnet, difference, fit, images, mlp, vectors

from manyhands.errors import BadSettings
from manyhands.training.loss.own_step import LossSum
from manyhands.training.options import Step
from manyhands.training.torch.preflight import trial_model

WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def log_scores() -> nn.Module:
    return nn.Sequential(mlp(), nn.LogSoftmax(1))


LOSSES: dict[str, tuple[Any, Any]] = {
    "weights": (mlp, nn.CrossEntropyLoss(weight=WEIGHT)),
    "left out": (mlp, nn.CrossEntropyLoss(ignore_index=1)),
    "both, smoothed": (mlp, nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0, label_smoothing=0.1)),
    "likelihood": (log_scores, nn.NLLLoss(weight=WEIGHT, ignore_index=1)),
    "a function": (mlp, functools.partial(functional.cross_entropy, weight=WEIGHT)),
}


def close(make: Any, data: Any, **options: Any) -> None:
    """The same on one rank, in parts on one rank, and on two ranks with uneven shares."""
    alone, expected = fit(make(), data, **options)
    for ranks, parts in ((1, {"accumulate": 3}), (2, {"shares": [0.8, 0.2]})):
        step = replace(options.get("step", Step()), **parts)
        weights, result = fit(make(), data, ranks, **{**options, "step": step})
        assert difference(alone, weights) < 1e-12
        for one, other in zip(expected.rows, result.rows, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)
            assert one["train_acc"] == other["train_acc"]
            assert one["val_loss"] is None or one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_exact_in_parts(name: str) -> None:
    make, loss = LOSSES[name]
    close(make, (vectors(), vectors(37)), loss=loss, gradient_clip_val=0.5)


def test_the_loss_over_a_test_set_is_divided_once() -> None:
    net, (X, y) = mlp(), vectors(37)
    _, result = fit(net, (vectors(), (X, y)), 2, loss=nn.CrossEntropyLoss(weight=WEIGHT), batch_size=8, max_epochs=1)
    expected = functional.cross_entropy(net(X), y, weight=WEIGHT).detach()
    assert result.rows[-1]["val_loss"] == pytest.approx(float(expected), rel=1e-12)


def test_weights_follow_the_model() -> None:
    """The caller's loss is as it was, and the job's own has the dtype that the model was given."""
    loss = nn.CrossEntropyLoss(weight=WEIGHT.float())
    for ranks in (1, 2):
        fit(mlp(), vectors(), ranks, loss=loss, max_epochs=1)
        fit(mlp(), vectors(), ranks, loss=functools.partial(functional.cross_entropy, weight=loss.weight), max_epochs=1)
    assert loss.weight.dtype == torch.float32


def marked(count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors(count)
    y[::3] = -100
    y[:4] = -100  # a whole shard without a label that counts
    return X, y


def test_the_usual_loss_leaves_out_what_is_marked() -> None:
    X, y = marked()
    close(mlp, DataLoader(TensorDataset(X, y), batch_size=16))
    close(mlp, DataLoader(TensorDataset(X, y), batch_size=16, drop_last=True))
    close(mlp, TensorDataset(X, y))


def test_labels_per_pixel() -> None:
    X, _ = images(40)
    y = torch.randint(CLASSES, (40, 6, 6), generator=torch.Generator().manual_seed(3))
    y[:, 2:4] = 255
    y[5] = 255

    def pixels() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(1, CLASSES, 3, padding=1).double()

    close(pixels, (X, y), loss=nn.CrossEntropyLoss(ignore_index=255))


def test_probabilities() -> None:
    X, y = vectors()
    likely = functional.one_hot(y, CLASSES).double() * 0.7 + 0.1
    close(mlp, (X, likely), loss=nn.CrossEntropyLoss(weight=WEIGHT))


def test_statistics_over_the_whole_batch() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    alone, _ = fit(convnet(), images(), loss=loss, step=Step(batch_stats="global"))
    both, _ = fit(convnet(), images(), 2, loss=loss, step=Step(batch_stats="global", shares=[1, 0]))
    assert difference(alone, both) < 1e-12


class Own(nn.CrossEntropyLoss):
    """A class of the user's own around one of PyTorch's."""

    def forward(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(scores * 2, y)


# Losses of the user's own code: known by what they call, or given as a sum and its count.


def total_and_count(scores: torch.Tensor, y: torch.Tensor) -> LossSum:
    return LossSum(functional.cross_entropy(scores, y, weight=WEIGHT, reduction="sum"), WEIGHT[y].sum())


CODE: dict[str, Any] = {
    "a class": Own(weight=WEIGHT),
    "a lambda": lambda scores, y: functional.cross_entropy(scores, y, weight=WEIGHT),
    "smoothed": lambda scores, y: functional.cross_entropy(scores, y, WEIGHT, label_smoothing=0.1),
    "likelihood": lambda scores, y: functional.nll_loss(scores.log_softmax(1), y, WEIGHT, ignore_index=1),
    "a sum": total_and_count,
    "samples": lambda scores, y: LossSum(functional.cross_entropy(scores, y, reduction="sum"), len(y)),
}


@pytest.mark.parametrize("name", CODE)
def test_code_is_exact_in_parts(name: str) -> None:
    close(mlp, (vectors(), vectors(37)), loss=CODE[name], step=Step(on_nan="continue"))


TEXTS, LENGTH, WORDS = 60, 12, 7


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers, and the next one as the label; the first four are equally long, the others end earlier."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, WORDS, (TEXTS, LENGTH + 1), generator=generator)
    lengths = torch.randint(1, LENGTH, (TEXTS, 1), generator=generator)
    lengths[:4] = LENGTH
    X, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    beyond = torch.arange(LENGTH) >= lengths
    X[beyond], y[beyond] = 0, -100
    return X, y


def steps(kind: str, scores: torch.Tensor, y: torch.Tensor) -> Any:
    """The loss of a language model, which is no mean over samples."""
    flat, labels = scores.flatten(0, 1), y.flatten()
    if kind == "masked":
        each, mask = functional.cross_entropy(flat, labels, reduction="none"), labels != -100
        return (each * mask).sum() / mask.sum()
    return functional.cross_entropy(flat, labels) + 0.1 * scores.square().mean()


class Language(nn.Module):
    def __init__(self, kind: str, *, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.kind = kind
        self.net = nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)).double()
        if zeros:
            nn.init.zeros_(self.net[1].weight)
            nn.init.zeros_(self.net[1].bias)

    def training_step(self, batch: Any) -> Any:
        return steps(self.kind, self.net(batch[0]), batch[1])


@pytest.mark.parametrize("kind", ["masked", "with another"])
@pytest.mark.parametrize("options", [{"ranks": 2}, {"step": Step(accumulate=2)}])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_mean_over_tokens_is_refused(kind: str, options: Any, zeros: bool) -> None:
    """Not by the first texts, which are equally long; nor by values alone, which are equal with a layer of zeros."""
    coupled = r"mh\.whole_batch" if "ranks" in options else "accumulate=1"  # no one divisor makes two terms right
    advice = coupled if kind == "with another" and not zeros else r"training_step: `return mh\.LossSum\(total, count\)`"
    with pytest.raises(BadSettings, match=f"not a mean over the samples.*{advice}"):
        fit(Language(kind, zeros=zeros), texts(), **options)
    fit(Language(kind, zeros=zeros), texts(), max_epochs=1)


def test_one_rare_text_is_enough() -> None:
    X, y = texts()
    y[y == -100] = 1
    y[47, 3:] = -100
    with pytest.raises(BadSettings, match="not a mean over the samples"):
        fit(Language("masked"), (X, y), step=Step(accumulate=2))
    with pytest.raises(BadSettings, match="not a mean over the samples"):
        fit(Language("masked"), DataLoader(TensorDataset(X, y), 60, drop_last=True), step=Step(accumulate=2))


def rarely_weighed(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, y, weight=torch.tensor([1.0, 1.0, 9.0])) + 1e-3 * scores.pow(2).mean()


def test_a_rare_class_of_a_dataset_is_found() -> None:
    X, y = vectors(2000)
    y[y == 2] = 1
    y[7::100] = 2
    model = nn.Sequential(mlp()).float()
    for data in ((X.float(), y), TensorDataset(X.float(), y)):
        with pytest.raises(BadSettings, match="not a mean over the samples"):
            fit(model, data, loss=rarely_weighed, step=Step(accumulate=4), max_epochs=1)


def test_sparse_and_large_gradients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Language("masked", zeros=True)
    model.net[0].sparse = True
    monkeypatch.setattr(trial_model, "_COMPARED", 10)
    with pytest.raises(BadSettings, match="the gradients of 8 samples"):
        fit(model, texts(), step=Step(accumulate=2))


def test_losses_that_pass() -> None:
    """Means over samples, with terms that do not depend on the batch; equally long texts; a loss in float32."""
    whole = texts()[0][:40], texts()[0][:40]
    for model, data, loss in (
        (Language("with another"), whole, None),
        (mlp(), vectors(), lambda scores, y: functional.cross_entropy(scores, y) * 2),
        (mlp(dropout=0.3, norm=True), vectors(), lambda scores, y: functional.multi_margin_loss(scores, y)),
    ):
        _, result = fit(model, data, step=Step(accumulate=2), max_epochs=1, loss=loss)
        assert not any("not checked" in note for note in result.notes)


def test_a_generator_keeps_its_first_batch() -> None:
    X, y = vectors(48)
    seen: list[int] = []

    def counted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(len(labels))
        return functional.cross_entropy(scores, labels) * 2

    batches = ((X[start : start + 16], y[start : start + 16]) for start in range(0, 48, 16))
    fit(mlp(), batches, step=Step(accumulate=2), max_epochs=1, loss=counted)
    assert seen == [8] * 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_malformed_sum_is_refused(accumulate: int) -> None:
    for total, count, said in (
        (lambda loss: loss, 1, r"the total of a LossSum is of type Tensor and shape \(\d+,\)"),
        (lambda loss: float(loss.detach().sum()), 1, "the total of a LossSum is of type float: "),
        (lambda loss: loss.sum(), torch.ones(3), r"the count of a LossSum has the shape \(3,\): "),
    ):

        def malformed(scores: torch.Tensor, y: torch.Tensor, total: Any = total, count: Any = count) -> LossSum:
            return LossSum(total(functional.cross_entropy(scores, y, reduction="none")), count)

        with pytest.raises(BadSettings, match=said):
            fit(mlp(), vectors(), loss=malformed, step=Step(accumulate=accumulate))


def test_two_kinds_of_loss_are_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = mlp(), 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            return LossSum(loss * len(batch[1]), len(batch[1])) if self.steps < 3 else loss * 1

    with pytest.raises(BadSettings, match="for one batch and a plain number for another"):
        fit(Changing(), vectors(), step=Step(accumulate=2))
    fit(Changing(), vectors())
