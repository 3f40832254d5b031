"""Models as the book writes them: they plot their metrics, and a validation step returns nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands import torch as mh

X, Y = torch.randn(48, 6, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3


class Book(nn.Module):
    """The book's base class in short: ``plot`` needs the book's own trainer."""

    def __init__(self):
        super().__init__()
        self.board = object()

    def plot(self, key, value, train):
        raise AssertionError("the trainer is not the book's")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps:
    def training_step(self, batch):
        loss = F.cross_entropy(self(*batch[:-1]), batch[-1])
        self.plot("loss", loss, train=True)
        return loss

    def validation_step(self, batch):
        scores = self(*batch[:-1])
        self.plot("loss", F.cross_entropy(scores, batch[-1]), train=False)
        self.plot("acc", (scores.argmax(1) == batch[-1]).float().mean(), train=False)


class Net:
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


class OfTheBook(Steps, Net, Book):
    pass


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_what_a_validation_step_plots_are_the_figures_of_the_epoch(devices):
    """The contract suite shows it of models with our base class."""
    model = OfTheBook()
    trainer = mh.Trainer(max_epochs=1, devices=devices, batch_size=16, quiet=True)
    row = trainer.fit(model, (X, Y), (X[:20], Y[:20])).rows[-1]
    with torch.no_grad():
        scores = model(X[:20])
    assert row["val_loss"] == pytest.approx(F.cross_entropy(scores, Y[:20]).item(), rel=1e-5)
    assert row["val_acc"] == pytest.approx((scores.argmax(1) == Y[:20]).float().mean().item())
    assert trainer.evaluate(model, (X[:20], Y[:20])) == pytest.approx({"loss": row["val_loss"], "acc": row["val_acc"]})


def test_after_a_job_the_models_own_plot_is_back():
    model = OfTheBook()
    mh.Trainer(max_epochs=1, quiet=True).fit(model, (X, Y), (X, Y))
    with pytest.raises(AssertionError, match="not the book's"):
        model.plot("loss", 1.0, train=True)


def test_a_plot_that_is_not_the_books_is_called():
    class Draws(OfTheBook):
        def plot(self, key, value, train, color="red"):
            drawn.append(key)

        def validation_step(self, batch):
            super().validation_step(batch)
            return F.cross_entropy(self(*batch[:-1]), batch[-1])

    drawn = []
    mh.Trainer(max_epochs=1, batch_size=48, quiet=True).fit(Draws(), (X, Y), (X, Y))
    assert drawn == ["loss", "loss", "acc"]


def test_the_batch_size_of_a_model_of_the_book_is_found():
    assert mh.Trainer(max_epochs=1).find_batch_size(OfTheBook(), (X, Y), maximum=8) == 8


def test_a_lazy_batch_norm_gets_its_shape():
    class Lazy(Steps, Book):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

        def forward(self, x):
            return self.net(x)

    model = Lazy()
    mh.Trainer(max_epochs=1, quiet=True).fit(model, (X, Y), (X, Y))
    assert model.net[1].running_mean.shape == (8,)
    assert model.net[1].num_batches_tracked == 1


class Scratch(Book):
    def __init__(self):
        super().__init__()
        self.w, self.b = torch.zeros(6, 3, requires_grad=True), torch.zeros(3, requires_grad=True)

    def forward(self, x):
        return x @ self.w + self.b


class Listed(Scratch):
    def parameters(self):
        return [self.w, self.b]


@pytest.mark.parametrize("kind", [Scratch, Listed])
def test_weights_that_are_plain_tensors_are_refused(kind):
    with pytest.raises(mh.errors.BadSettings, match=r"make weights of your own torch\.nn\.Parameter"):
        mh.Trainer(max_epochs=1).fit(kind(), (X, Y))
