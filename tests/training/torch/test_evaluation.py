"""Prediction, evaluation and metrics with PyTorch's models, data sets and torchmetrics."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from manyhands import torch as mh
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.options import Workers

torchmetrics = pytest.importorskip("torchmetrics")

X = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def quiet(**options: Any) -> mh.Trainer:
    return mh.Trainer(1, quiet=True, precision="fp32", **options)


class Both(torch.nn.Module):
    """Two outputs, in the structure that it is made with; dropout and normalisation show the mode."""

    def __init__(self, wrap: Any = dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.layer(x)
        return self.wrap(scores=scores, first=x[:, 0])


class Pair(NamedTuple):
    scores: torch.Tensor
    first: torch.Tensor


@dataclass
class Record:
    scores: torch.Tensor
    first: torch.Tensor


class Cache:
    """Keys and values that a model returns for its next call: no array, and no tree of arrays."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


@dataclass
class ByName(OrderedDict[str, Any]):
    """As the outputs of transformers: a dict and a dataclass."""

    scores: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        self.update({name: part for name, part in vars(self).items() if part is not None})


class Generator(torch.nn.Module):
    """Returns the loss of the batch and a cache beside its scores."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.wrap = torch.nn.Linear(4, 2), wrap

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.layer(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(scores, labels)
        return self.wrap(scores=scores, loss=loss, cache=Cache(x))


class Inputs(Dataset[torch.Tensor]):
    """Samples without targets."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> torch.Tensor:
        return X[number]


@pytest.mark.parametrize("wrap", [dict, Pair, Record])
def test_outputs_keep_their_structure(wrap: Any) -> None:
    model = Both(wrap).train()
    frozen = model.layer[1].eval()
    outputs = quiet().predict(model, X)
    assert type(outputs) is wrap
    first = outputs["first"] if wrap is dict else outputs.first
    assert torch.equal(first, X[:, 0])
    assert model.training
    assert model.layer[2].training
    assert not frozen.training


def test_outputs_of_several_devices_keep_their_structure_too() -> None:
    model = Both()
    trainer = quiet(devices=["cpu"], workers=Workers(per_device=2))
    alone, together = quiet().predict(model, X), trainer.predict(model, X)
    assert torch.equal(together["first"], X[:, 0])
    torch.testing.assert_close(together["scores"], alone["scores"])


@pytest.mark.parametrize(
    "data",
    [
        X.numpy(),
        (X, Y),
        TensorDataset(X, Y),
        Inputs(),
        DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
        DataLoader(Inputs(), batch_size=50),
    ],
    ids=["array", "pair", "dataset", "inputs", "shuffled loader", "loader of inputs"],
)
def test_any_data_is_predicted_in_its_order(data: Any) -> None:
    net = torch.nn.Linear(4, 2)
    torch.testing.assert_close(quiet().predict(net, data), net(X).detach())


def test_a_model_with_two_inputs() -> None:
    net = torch.nn.Bilinear(4, 4, 1)
    expected = net(X, X).detach()
    torch.testing.assert_close(quiet().predict(net, (X, X)), expected)
    torch.testing.assert_close(quiet().predict(net, (X, X, Y)), expected)


def test_an_optional_input_is_asked_for() -> None:
    class Masked(torch.nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if mask is None else x * mask)

    net, mask = Masked(4, 1), (X > 0).float()
    with pytest.raises(BadBatch, match=r"Masked takes 1 to 2 inputs: .* predict\(model, data, targets=True\)"):
        quiet().predict(net, (X, mask))
    torch.testing.assert_close(quiet().predict(net, (X, mask), targets=False), net(X, mask).detach())
    torch.testing.assert_close(quiet().predict(net, (X, Y), targets=True), net(X).detach())
    torch.testing.assert_close(quiet().predict(net, {"x": X, "mask": mask}), net(X, mask).detach())


def test_samples_of_another_dtype_are_a_lesson() -> None:
    for data in (X.double().numpy(), (X.double(), Y), DataLoader(X.double(), batch_size=200)):
        with pytest.raises(
            BadBatch, match=r"samples are float64, the model's weights float32: give X.to\(torch.float32"
        ):
            quiet().predict(torch.nn.Linear(4, 1), data)


def test_dict_batches() -> None:
    class Named(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = super().forward(inputs)
            loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
            return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}

    net, batch = Named(4, 2), {"inputs": X, "labels": Y}
    outputs = quiet().predict(net, batch)
    assert list(outputs) == ["logits"]
    torch.testing.assert_close(outputs["logits"], net(X)["logits"].detach())
    metrics = {"right": lambda outputs, targets: (outputs["logits"].argmax(1) == targets).float().mean()}
    metrics["own"] = torchmetrics.Accuracy("multiclass", num_classes=2, average="micro")  # of the logits
    values = quiet(metrics=metrics).evaluate(net, batch)
    assert values["right"] == values["own"] == pytest.approx(values["acc"])


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_parts_of_an_output_without_rows_are_left_out(devices: str) -> None:
    model = Generator(ByName)

    def accuracy(outputs: Any, targets: Any) -> Any:
        assert type(outputs) is ByName
        assert outputs.loss is None
        return (outputs.scores.argmax(1) == targets).double().mean()

    trainer = quiet(devices=devices, metrics={"accuracy": accuracy})
    for outputs in (trainer.predict(model, {"x": X}), trainer.predict(model, X)):
        assert type(outputs) is ByName
        assert torch.equal(outputs.scores, model.layer(X))
        assert outputs.cache is None
    metrics = trainer.evaluate(model, {"x": X, "labels": Y})
    assert metrics["accuracy"] == pytest.approx(float((model.layer(X).argmax(1) == Y).double().mean()))


def test_a_dict_without_its_cache() -> None:
    model = Generator(dict)
    outputs = quiet().predict(model, {"x": X})
    assert outputs.keys() - {"loss"} == {"scores"}
    assert torch.equal(outputs["scores"], model.layer(X))


def test_a_model_that_needs_its_labels() -> None:
    class Decoder(torch.nn.Linear):
        """As an encoder-decoder of transformers: without inputs of its own the decoder gets the labels."""

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if labels is None:
                raise ValueError("decoder_input_ids are missing")
            return {"scores": super().forward(x) + labels[:, None]}

    model, data = Decoder(4, 2), {"x": X, "labels": Y}
    with pytest.raises(BadBatch, match=r"Decoder needs 'labels', which .* leaves out: write predict\(.*targets=False"):
        quiet().predict(model, data)
    with pytest.raises(BadBatch, match=r"Decoder does not take it \(decoder_input_ids are missing\)"):
        quiet().predict(model, {"x": X})
    outputs = quiet().predict(model, data, targets=False)
    assert torch.equal(outputs["scores"], model(**data)["scores"])


class Flat(torch.nn.Linear):
    """One number for each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten()


def test_targets_in_dict_batches() -> None:
    def squared(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (output - batch["price"]).square().mean()

    metrics = {"mse": torchmetrics.MeanSquaredError()}
    batch = {"x": X, "price": Y.float()}
    values = quiet(loss=squared, metrics=metrics).evaluate(Flat(4, 1), batch)
    assert values["mse"] == pytest.approx(values["loss"], rel=1e-5), "what the model does not take is the target"
    with pytest.raises(BadBatch, match=r"a dict with 'x', 'price', 'area': call the targets 'labels' \(or 'label', "):
        quiet(loss=squared, metrics=metrics).evaluate(Flat(4, 1), {**batch, "area": Y.float()})


def test_the_model_is_left_as_it_was() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    mh.Trainer(1, precision="fp64").evaluate(net, (X, Y))
    quiet().predict(net, X)
    assert torch.equal(torch.rand(1), drawn), "the random numbers go on as if nothing had happened"
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [tensor.dtype for tensor in net.parameters()] == [torch.float32] * 4


def test_a_step_of_the_models_own_is_evaluated_with_metrics() -> None:
    class Own(Flat):
        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return ((self(x) - y) ** 2).mean() + 0 * self(x).mean()

    values = quiet(metrics={"mse": torchmetrics.MeanSquaredError()}).evaluate(Own(4, 1), (X, Y.float()))
    assert list(values) == ["loss", "mse"]
    assert values["mse"] == pytest.approx(values["loss"], rel=1e-5)


class Ranks(torch.nn.Module):
    """As in Lightning: ``predict_step`` says what a prediction is; it gets the whole batch and its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        inputs, labels = batch
        best = self.layer(inputs).argmax(1)
        return {"best": best, "right": best == labels, "batch": torch.full_like(best, batch_idx)}


class Validates(torch.nn.Module):
    """Draws random numbers and counts in its steps; validation fails where a batch has no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(4, 2), torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(self.drop(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.validated.append(batch_idx)
        self.seen.add_(torch.rand(()))
        return torch.nn.functional.cross_entropy(self.layer(x), y)


class Tensors(TensorDataset):
    """A dataset of our own: its samples are read one by one."""


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
@pytest.mark.parametrize("workers", [0, 1])
def test_validation_data_that_fail_are_found_before_the_first_step(devices: str, workers: int) -> None:
    class Fails(Validates):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise AssertionError("a step was made")

    bad = DataLoader(Tensors(X), batch_size=100, num_workers=workers)
    with pytest.raises(Exception, match="not enough values to unpack"):
        quiet(devices=devices).fit(Fails(), DataLoader(TensorDataset(X, Y), batch_size=100), bad)


def test_trying_validation_data_changes_nothing() -> None:
    """An epoch with validation data gives the weights of one without; the model has seen each batch once."""
    data, validated = DataLoader(TensorDataset(X, Y), batch_size=100), []
    weights = []
    for validation in (None, Tensors(X[:250], Y[:250])):
        torch.manual_seed(0)
        model = Validates()
        quiet().fit(model, data, None if validation is None else DataLoader(validation, batch_size=100))
        weights.append(model.layer.weight.detach().clone())
        validated.append(model.validated)
    assert torch.equal(*weights)
    assert validated == [[], [0, 1, 2]]


def test_predict_calls_a_predict_step_of_the_models_own() -> None:
    model, data = Ranks(), DataLoader(TensorDataset(X, Y), batch_size=100)
    best = model.layer(X).argmax(1)
    for devices in ("cpu", "cpu:2"):
        outputs = quiet(devices=devices).predict(model, data)
        assert torch.equal(outputs["best"], best)
        assert torch.equal(outputs["right"], best == Y)
        assert outputs["batch"][[0, -1]].tolist() == [0, 1], "of one batch of the trainer, 512 samples"


def test_lightnings_own_predict_step_is_the_forward_pass() -> None:
    class Base(torch.nn.Linear):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("of the package")

    Base.predict_step.__module__ = "lightning.pytorch.core.module"
    model = Base(4, 2)
    torch.testing.assert_close(quiet().predict(model, (X, Y)), model(X).detach())


def test_torchmetrics_of_several_values() -> None:
    both = torchmetrics.MetricCollection(
        {"precision": torchmetrics.Precision("binary"), "recall": torchmetrics.Recall("binary")}
    )
    net = Flat(4, 1)
    metrics = {"of": both, "matrix": torchmetrics.ConfusionMatrix("binary")}
    trainer = quiet(loss="bce_with_logits", metrics=metrics)
    row = trainer.fit(net, (X, Y.float()), (X, Y.float())).rows[-1]
    assert set(row) >= {"val_of_precision", "val_of_recall", "val_matrix"}
    assert np.sum(row["val_matrix"]) == len(X)
    assert both.precision._update_count == 0, "the caller's objects are not used"


def test_what_cannot_be_predicted() -> None:
    class Mean(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean()

    with pytest.raises(BadBatch, match=r"answers 512 samples with an array of shape \(\) \(output\): .* one row per"):
        quiet().predict(Mean(4, 1), X)
    with pytest.raises(BadSettings, match="layers without weights yet"):
        quiet().predict(torch.nn.LazyLinear(2), X)
    with pytest.raises(BadBatch, match=r"with a str \(output\['name'\]\[0\]\)"):
        quiet().predict(Both(lambda scores, first: {"scores": scores, "name": ["a"] * len(scores)}), X)
    with pytest.raises(BadSettings, match=r"cannot be trained: give a torch\.nn\.Module"):
        quiet().predict(3, X)
