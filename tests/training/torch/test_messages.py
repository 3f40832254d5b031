"""What goes wrong most often is said in the user's words: what was given, why it cannot be, what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from training_cases import CLASSES, images, mlp, vectors

from manyhands import torch as mh
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.options import Workers
from manyhands.training.torch.trainer import Trainer


def train(model: nn.Module, data: Any, ranks: int = 1, **options: Any) -> Any:
    how = {"batch_size": 8, "quiet": True, "devices": ["cpu"], "workers": Workers(per_device=ranks), **options}
    return Trainer(1, **how).fit(model, data)


def data(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors(count)
    return X.float(), y


# The loss


class Several(nn.Module):
    """Gives what a function makes of the scores."""

    def __init__(self, gives: Callable[[torch.Tensor], Any], net: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.gives = net or mlp().float(), gives

    def forward(self, X: torch.Tensor) -> Any:
        return self.gives(self.net(X))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_gives_several_things(ranks: int) -> None:
    said = (
        r"the model gives a tuple of 2 parts \(\(4, 3\), \?\), and cross_entropy takes one tensor: give "
        r"loss=lambda output, y: torch\.nn\.functional\.cross_entropy\("
    )
    with pytest.raises(BadBatch, match=said) as raised:
        train(Several(lambda scores: (scores, None)), data(), ranks)
    assert raised.value.__cause__ is not None
    if ranks == 1:
        with pytest.raises(BadBatch, match=r"a dict of 'logits', and .*output\['logits'\], y\)"):
            train(Several(lambda scores: {"logits": scores}), data())
        train(Several(lambda scores: (scores, None)), data(), loss=lambda a, y: nn.functional.cross_entropy(a[0], y))


@pytest.mark.parametrize("options", [{}, {"ranks": 2}, {"step": mh.Step(accumulate=2)}])
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_and_one_sample(options: Any, tracks: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=tracks), nn.Linear(4, CLASSES))
    with pytest.raises(BadBatch, match=r"BatchNorm takes two samples or more.*drop_last=True"):
        train(model, data(9), **options)


def test_a_label_for_each_token() -> None:
    """Of a language model: the scores of each token's classes are last."""
    tokens, scores = torch.randint(9, (16, 5)), nn.Embedding(9, 9)
    cure = r"loss=lambda output, y: torch\.nn\.functional\.cross_entropy\(output%s\.flatten\(0, -2\), y\.flatten\(\)\)"
    with pytest.raises(BadBatch, match=r"the shape \(5, 9\) for a sample with \(5,\) labels, .*" + cure % ""):
        train(scores, (tokens, tokens))
    with pytest.raises(BadBatch, match=r"a tuple of 2 parts .*" + cure % r"\[0\]"):
        train(Several(lambda scores: (scores, None), scores), (tokens, tokens))
    cross_entropy = nn.functional.cross_entropy
    train(scores, (tokens, tokens), loss=lambda a, y: cross_entropy(a.flatten(0, -2), y.flatten()))


class Step(Several):
    def training_step(self, batch: Any) -> Any:
        return self.gives(nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none"))


def test_a_training_step_may_give_a_dict_with_the_loss() -> None:
    rows = [train(Step(gives), data()).rows for gives in (torch.mean, lambda losses: {"loss": losses.mean(), "n": 1})]
    assert rows[0][-1]["train_loss"] == rows[1][-1]["train_loss"]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda losses: {"value": losses.mean()}, "returned a dict of 'value': return the loss, or a dict with it as"),
        (lambda losses: None, "training_step of Step returned None: is a `return` missing"),
        (lambda losses: losses.mean().item(), r"returned a float: a plain number has no gradient. Without \.item\(\)"),
        (lambda losses: losses, r"returned a tensor of shape \(8,\): return one number, as loss\.mean\(\)"),
        (lambda losses: losses.mean().detach(), "the loss does not depend on the model's weights"),
    ],
)
def test_what_else_a_training_step_may_not_give(gives: Any, said: str) -> None:
    with pytest.raises((BadSettings, BadBatch), match=said):
        train(Step(gives), data())


def test_a_loss_that_gives_a_float() -> None:
    with pytest.raises(BadSettings, match=r"the loss returned a float: a plain number has no gradient"):
        train(mlp().float(), data(), loss=lambda output, y: nn.functional.cross_entropy(output, y).item())


# The data


def convolving(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), *layers)


def of_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, CLASSES), nn.Flatten(), nn.Linear(3 * CLASSES, CLASSES))


def columns(samples: list[Any]) -> Any:
    X, y = default_collate(samples)
    return X.T, y


def wrong_data() -> dict[str, tuple[nn.Module, Any, str]]:
    X, y = data()
    batches = list(DataLoader(TensorDataset(*data(40)), batch_size=16))
    pictures = images(16)[0].float()
    net = convolving(nn.Linear(32, CLASSES))
    return {
        "width": (
            mlp().float(),
            (X[:, :2], y),
            r"layer '0', Linear\(.*\), takes 6 numbers per sample, and the samples have 2 .*Linear\(2, 8\)",
        ),
        "inner width": (
            convolving(nn.Linear(33, CLASSES)),
            (pictures, y),
            r"layer '2', .* takes 33 numbers per sample, and it gets 32 .*: make it Linear\(32, 3\)",
        ),
        "not flattened": (
            nn.Sequential(nn.Linear(36, CLASSES)),
            (pictures, y),
            r"takes 36 numbers per sample, and the samples have 6 on their last axis .*torch\.nn\.Flatten\(\)",
        ),
        "no channels": (net, (pictures[:, 0], y), r"without the axis of channels.*X\.unsqueeze\(1\)"),
        "channels last": (net, (pictures.permute(0, 2, 3, 1), y), r"channels last.*X\.permute\(0, 3, 1, 2\)"),
        "other channels": (
            net,
            (pictures.expand(-1, 3, -1, -1), y),
            r"layer '0', Conv2d\(.*\), takes 1 channel, and the samples have 3 .*: make it Conv2d\(3, 2, \.\.\.\)",
        ),
        "words as numbers": (of_words(), (torch.ones(16, 3), y), r"an embedding takes whole numbers: give X\.long\(\)"),
        "words that are not there": (
            of_words(),
            (torch.full((16, 3), 9), y),
            "has entries 0 to 8, and the samples have numbers from 9 to 9",
        ),
        "another layer": (
            nn.Sequential(nn.BatchNorm1d(5), nn.Linear(6, CLASSES)),
            (X, y),
            r"the layer '0', BatchNorm1d\(.*\), does not take an input of the shape \(4, 6\): ",
        ),
        "names": (
            mlp().float(),
            DataLoader([(row, "cat") for row in X], batch_size=8),  # type: ignore[arg-type]
            r"the labels are text, as 'cat', and a loss takes numbers: names, y = np\.unique",
        ),
        "no channels for a lazy model": (
            nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(CLASSES)),
            (pictures[:, 0], y),
            r"without the axis of channels.*X\.unsqueeze\(1\)",
        ),
        "width of test data": (
            mlp().float(),
            ((X, y), (X[:, :4], y)),
            r"the test data are the cause: the layer '0', .* takes 6 .* the samples have 4",
        ),
        "width in a step of the user's own": (
            Step(torch.mean),
            (X[:, :2], y),
            r"the layer 'net\.0', Linear\(.*\), takes 6 numbers per sample",
        ),
        "turned by a loader": (
            mlp().float(),
            DataLoader(TensorDataset(X, y), batch_size=8, collate_fn=columns),
            r"takes 6 numbers per sample.*shape \(6, 4\)",
        ),
        "batches": (mlp().float(), batches, "list of 3 batches.*give the loader itself"),
        "even batches": (mlp().float(), batches[:2] * 2, "list of 4 batches"),
        "float64": (
            mlp().float(),
            (X.numpy().astype("float64"), y),
            r"samples are float64, the model's weights float32.*X\.to",
        ),
        "int32": (mlp().float(), (X, y.int()), r"labels are int32.*y\.long\(\)$"),
        "both": (mlp().float(), (X.double(), y.int()), r"samples are float64.*; the labels are int32"),
        "a column": (mlp().float(), (X, y[:, None]), r"y\.squeeze\(1\)"),
    }


@pytest.mark.parametrize("kind", wrong_data())
def test_data_that_a_model_does_not_take(kind: str) -> None:
    model, given, said = wrong_data()[kind]
    with pytest.raises(BadBatch, match=said) as raised:
        train(model, given)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_third_part_is_no_sample_weight(ranks: int) -> None:
    X, y = data()
    said = r"a batch has 3 parts, and the model's forward takes 1 input: .*training_step\(batch\) .*mh\.LossSum\("
    for model in (mlp().float(), nn.Linear(6, CLASSES))[:: -1 if ranks == 1 else 2]:
        with pytest.raises(BadBatch, match=said):
            train(model, (X, y, torch.ones(16)), ranks)


def test_a_layer_is_not_blamed_for_an_error_of_the_loss() -> None:
    X, y = data()
    with pytest.raises(RuntimeError, match=r"Float|dtype") as raised:
        train(mlp().float(), (X, y), loss=lambda scores, _: (scores @ torch.ones(3, 3)).mean(), precision="fp64")
    assert not isinstance(raised.value, BadBatch)


def test_binary_cross_entropy_with_labels_of_classes() -> None:
    X, y = data()
    with pytest.raises(
        BadBatch, match=r"shape \(3,\), and its target \(\): .* numbers of classes, give loss='cross_en"
    ):
        train(nn.Sequential(mlp().float(), nn.Sigmoid()), (X, y), loss=nn.BCELoss)
    with pytest.raises(BadBatch, match=r"give y\.reshape\(-1, 1\), as floating-point numbers"):
        train(nn.Linear(6, 1), (X, y % 2), loss="bce_with_logits")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (3, "optimizer=3 is of type int: "),
        ("sparseadam", "optimizer='sparseadam'"),
        ("lbfgs", "optimizer='lbfgs'"),
    ],
)
def test_what_is_no_optimizer_and_those_that_have_no_name(optimizer: Any, said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        Trainer(1, optimizer=optimizer)
