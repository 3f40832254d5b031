"""Losses and models whose samples depend on each other: exact on several devices, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from training_cases import CLASSES, WithNet, difference, fit, mlp, vectors

from manyhands import torch as mh
from manyhands.errors import BadSettings
from manyhands.training.options import Step, Workers


def doubled() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of views of a sample."""
    X, _ = vectors(46)
    return X, X + 0.1 * X.flip(0)


def similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """CLIP's loss: each sample has to find its own pair among all others."""
    scores = functional.normalize(first) @ functional.normalize(second).T
    labels = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.T, labels)) / 2


def dice(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One ratio over the whole batch."""
    chosen = scores.softmax(1).gather(1, y[:, None])[:, 0]
    return 1 - (2 * chosen.sum() + 1) / (scores.softmax(1).square().sum() + len(y) + 1)


def summed(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum of the user's own: on gathered outputs it is that of the whole batch."""
    return functional.cross_entropy(scores, y, reduction="sum") / 10


def balanced(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Class weights computed from the batch: it ends in a function that PyTorch divides itself."""
    counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return functional.cross_entropy(scores, y, weight=len(y) / counts.to(scores.dtype))


def standardised(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy((scores - scores.mean(0)) / (scores.std(0, correction=0) + 0.1), y)


class Temperature(WithNet):
    """A loss of the whole batch with a parameter of its own among the model's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), self.scale.exp()


def scaled_similarity(output: tuple[torch.Tensor, torch.Tensor], pair: torch.Tensor) -> torch.Tensor:
    return similarity(output[0] * output[1], pair[:, :CLASSES]) * output[1]


CASES: dict[str, tuple[Any, Any, Any]] = {
    "CLIP": (mlp, lambda output, pair: similarity(output, pair[:, :CLASSES]), doubled),
    "Dice": (mlp, dice, lambda: vectors(46)),
    "a sum": (mlp, summed, lambda: vectors(46)),
    "class weights of the batch": (mlp, balanced, lambda: vectors(46)),
    "scores standardised over the batch": (mlp, standardised, lambda: vectors(46)),
    "a temperature": (Temperature, scaled_similarity, doubled),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_of_the_whole_batch_gets_it_on_devices_and_is_refused_in_parts(name: str) -> None:
    """Also with uneven shares, and with a last batch of two samples for three ranks."""
    make, loss, data = CASES[name]
    options: dict[str, Any] = {"loss": loss, "batch_size": 11, "max_epochs": 2}
    alone, expected = fit(make(), data(), **options)
    for ranks, shares in ((2, [0.7, 0.3]), (3, None)):
        weights, result = fit(make(), data(), ranks, step=Step(shares=shares), **options)
        assert difference(alone, weights) < 1e-11
        assert any("gathered" in note for note in result.notes)
        for one, other in zip(expected.rows, result.rows, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
    with pytest.raises(BadSettings, match="accumulate=1"):
        fit(make(), data(), **{**options, "max_epochs": 1}, step=Step(accumulate=3))


class Contrastive(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.net, self.whole = mlp(), whole

    def training_step(self, batch: Any) -> torch.Tensor:
        first, second = self.net(batch[0]), self.net(batch[1])
        if self.whole:
            first, second = mh.whole_batch(first), mh.whole_batch(second)
        return similarity(first, second)


class HalfGathered(Contrastive):
    """Gathers one of two: each device compares other pairs."""

    def training_step(self, batch: Any) -> torch.Tensor:
        first, second = self.net(batch[0]), self.net(batch[1])
        return similarity(first, second) + mh.whole_batch(first).square().mean()


def test_a_training_step_asks_for_the_whole_batch() -> None:
    alone, _ = fit(Contrastive(False), doubled(), batch_size=11, max_epochs=2)
    same, _ = fit(Contrastive(True), doubled(), batch_size=11, max_epochs=2)
    assert difference(alone, same) == 0
    for ranks in (2, 3):
        weights, _ = fit(Contrastive(True), doubled(), ranks, batch_size=11, max_epochs=2)
        assert difference(alone, weights) < 1e-11
    for too_little in (Contrastive(False), HalfGathered(True)):
        with pytest.raises(BadSettings, match=r"mh\.whole_batch"):
            fit(too_little, doubled(), 2, batch_size=11, max_epochs=1)
    with pytest.raises(BadSettings, match="accumulate=1"):
        fit(Contrastive(True), doubled(), batch_size=11, max_epochs=1, step=Step(accumulate=2))


class Centred(nn.Module):
    """The forward pass compares samples."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last, self.whole = nn.Linear(6, 5).double(), nn.Linear(5, CLASSES).double(), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h - (mh.whole_batch(h) if self.whole else h).mean(0))


@pytest.mark.parametrize("options", [{"ranks": 2}, {"step": Step(accumulate=2)}])
def test_a_model_that_compares_samples_is_refused(options: Any) -> None:
    with pytest.raises(BadSettings, match="depend"):
        fit(Centred(), vectors(), max_epochs=1, **options)


def test_a_model_may_gather_too() -> None:
    alone, _ = fit(Centred(), vectors(46), batch_size=11, max_epochs=2)
    weights, _ = fit(Centred(whole=True), vectors(46), 2, batch_size=11, max_epochs=2)
    assert difference(alone, weights) < 1e-11


# State that the forward pass changes


class Follows(WithNet):
    """Training subtracts a centre, which follows the outputs of all devices."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def training_step(self, batch: Any) -> torch.Tensor:
        output = self.net(batch[0])
        loss = (output - self.centre - batch[1][:, :CLASSES]).square().mean()
        if self.training:
            self.centre.lerp_(mh.whole_batch(output.detach()).mean(0), 0.3)
        return loss


class Deep(nn.Module):
    """It has one output less in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.second = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return (self.net(x), self.second(x)) if self.training else self.net(x)


def of_both(output: Any, pair: torch.Tensor) -> torch.Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([similarity(each, pair[:, :CLASSES]) for each in outputs]).sum()


def few_doubled() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last batch of 11 one sample is left: the second rank has none."""
    first, second = doubled()
    return first[:45], second[:45]


class Remembers(nn.Module):
    """Its forward pass changes a buffer: ``reads`` says whether training reads it back."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.net, self.reads = mlp(), reads
        self.register_buffer("centre", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.1)
        return self.net(x - self.centre if self.reads else x)


class Renormalised(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(30, 8, **options).double(), nn.Linear(8, CLASSES).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x).mean(1))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(30, (40, 3), generator=generator), torch.randint(CLASSES, (40,), generator=generator)


class Momentum(nn.Module):
    """A second encoder that follows the first one, within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = mlp(), mlp().requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
        return (self.net(batch[0]) - self.slow(batch[0])).square().mean()


TWO: Any = {"ranks": 2}
THREE_PARTS: Any = {"step": Step(accumulate=3)}


@pytest.mark.parametrize("options", [TWO, THREE_PARTS])
def test_a_buffer_that_training_reads_is_refused_by_name(options: Any) -> None:
    with pytest.raises(BadSettings, match="'centre'"):
        fit(Remembers(True), vectors(), max_epochs=1, **options)
    _, result = fit(Remembers(False), vectors(), max_epochs=1, **options)
    assert any("'centre'" in note for note in result.notes)


@pytest.mark.parametrize("kind", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_embeddings_that_depend_on_the_batch_are_refused(kind: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(BadSettings):
        fit(Renormalised(**kind), texts(), 2, max_epochs=1)
    fit(Renormalised(**kind), texts(), max_epochs=1)


def test_a_momentum_update_in_the_step_is_exact_on_devices_and_refused_in_parts() -> None:
    alone, _ = fit(Momentum(), vectors(46), batch_size=11, max_epochs=2)
    weights, result = fit(Momentum(), vectors(46), 2, batch_size=11, max_epochs=2)
    assert difference(alone, weights) < 1e-11
    assert not any("draws random numbers" in note for note in result.notes)
    with pytest.raises(BadSettings, match=r"'slow\."):
        fit(Momentum(), vectors(46), batch_size=11, max_epochs=1, **THREE_PARTS)


@pytest.mark.parametrize(
    ("made", "loss"), [(Momentum, None), (Follows, None), (Deep, of_both)], ids=["momentum", "centre", "outputs"]
)
def test_a_device_without_samples_does_as_the_others(made: Any, loss: Any) -> None:
    options: dict[str, Any] = {"loss": loss, "batch_size": 11, "max_epochs": 2, "lr": 0.03}
    alone, _ = fit(made(), few_doubled(), **options)
    weights, _ = fit(made(), few_doubled(), 2, workers=Workers(per_device=2, hang_seconds=10), **options)
    assert difference(alone, weights) < 1e-11


class Centre(nn.Module):
    """A loss with a buffer, which it changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        loss = (output - self.centre - pair[:, :CLASSES]).square().mean()
        self.centre.lerp_(output.detach().mean(0), 0.3)
        return loss


class Queue(WithNet):
    """A buffer that grows until it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(1, CLASSES, dtype=torch.float64))

    def training_step(self, batch: Any) -> torch.Tensor:
        output = self.net(batch[0])
        loss = (output @ self.queue.T).square().mean()
        self.queue = torch.cat([output.detach(), self.queue])[:30]
        return loss


@pytest.mark.parametrize("options", [TWO, THREE_PARTS])
def test_buffers_of_a_loss_and_buffers_that_grow_are_refused_by_name(options: Any) -> None:
    with pytest.raises(BadSettings, match=r"'loss\.centre'"):
        fit(mlp(), doubled(), loss=Centre(), max_epochs=1, **options)
    with pytest.raises(BadSettings, match="'queue'"):
        fit(Queue(), doubled(), max_epochs=1, **options)


def test_what_differs_and_cannot_be_gathered_is_refused() -> None:
    """Each device pads its own texts, so the rows of two devices have other widths."""

    def padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return tokens.double()[:, :1].expand(-1, 6), tokens

    texts = [torch.arange(1, 2 + number % 7) + number for number in range(40)]
    loader: Any = DataLoader(texts, 10, collate_fn=padded)  # type: ignore[arg-type]
    with pytest.raises(BadSettings, match=r"mh\.whole_batch"):
        fit(mlp(), loader, 2, loss=lambda output, y: similarity(output, y[:, :1].double() + output), max_epochs=1)


class Drops(WithNet):
    """Dropout that is a function: two passes differ in training, and not in evaluation."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(functional.dropout(x, 0.3, self.training))


def test_a_loss_of_the_whole_batch_gets_it_also_where_the_model_draws() -> None:
    _, result = fit(Drops(), doubled(), 2, loss=CASES["CLIP"][1], max_epochs=1)
    assert any("gathered" in note for note in result.notes)


class TwoViews(WithNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.net(x), self.net(x + 0.1)])


def test_two_views_of_a_sample_have_no_accuracy_and_train() -> None:
    _, result = fit(TwoViews(), vectors(), loss=lambda output, _: similarity(*output.chunk(2)), max_epochs=1)
    assert "train_acc" not in result.rows[-1] or result.rows[-1]["train_acc"] is None


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_works_on_devices_and_is_refused_in_parts(norm: Any) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(6, CLASSES).double()))

    for count in (46, 45):  # with a last batch of one sample for two ranks
        alone, _ = fit(made(), vectors(count), batch_size=11, max_epochs=2)
        weights, _ = fit(made(), vectors(count), 2, batch_size=11, max_epochs=2)
        assert difference(alone, weights) < 1e-11
    with pytest.raises(BadSettings, match=r"'0\..*weight"):
        fit(made(), vectors(46), batch_size=11, max_epochs=1, **THREE_PARTS)


def test_the_trial_leaves_no_trace() -> None:
    """Two ranks start from the caller's weights, buffers and random numbers, whatever the trial did to its copy."""
    model = Remembers(False)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    fit(model, vectors(), 2, max_epochs=1, lr=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def mixed(samples: list[Any]) -> Any:
    """Mixup: each sample is mixed with another one of its batch, by a number that is drawn."""
    X, y = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
    share, other = float(torch.rand(())), torch.randperm(len(X))
    one_hot = functional.one_hot(y, CLASSES).double()
    return share * X + (1 - share) * X[other], share * one_hot + (1 - share) * one_hot[other]


@pytest.mark.parametrize("options", [TWO, THREE_PARTS])
def test_a_loss_or_a_collate_function_that_draws_is_announced_and_never_refused(options: Any) -> None:
    def variational(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (scores + torch.randn_like(scores)).square().sum() + functional.cross_entropy(scores, y)

    loader: Any = DataLoader(list(zip(*vectors(), strict=True)), 16, collate_fn=mixed)  # type: ignore[arg-type]
    for data, loss in ((vectors(), variational), (loader, None)):
        _, result = fit(mlp(), data, loss=loss, max_epochs=1, **options)
        assert any("not checked" in note and "draws random numbers" in note for note in result.notes)
