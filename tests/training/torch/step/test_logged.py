"""``self.log(name, value)``: the mean over all samples, on any number of devices, captured or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_cases import assert_as_plain, capturing
from torch.nn import functional as F

from manyhands import torch as mh
from manyhands.errors import BadSettings

SAMPLES = 52  # of the last batch of 16 only 4 are left


class Logs(torch.nn.Module):
    """Logs the mean of its inputs' first column, whose mean over an epoch is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.layer(X).squeeze(1)

    def training_step(self, batch: Any) -> torch.Tensor:
        X, y = batch
        self.log("column", X[:, 0].mean(), prog_bar=True, on_step=True)  # options of Lightning
        self.log_dict({"largest": X.amax(), "ones": torch.ones((), dtype=torch.bfloat16)})
        return F.mse_loss(self(X), y)

    def validation_step(self, batch: Any) -> torch.Tensor:
        X, y = batch
        self.log("constant", X.new_ones(()))
        self.log("val_column", X[:, 0].mean())
        return F.mse_loss(self(X), y)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return X, X.sum(1)


def fit(model: torch.nn.Module, **options: Any) -> Any:
    options = {"max_epochs": 2, "batch_size": 16, "lr": 0.01, "devices": ["cpu"], "quiet": True, **options}
    return mh.Trainer(**options).fit(model, data(), data())


@pytest.mark.parametrize("options", [{}, {"devices": "cpu:2"}, {"step": mh.Step(accumulate=3)}, {"devices": "cpu:3"}])
def test_rows_have_the_mean_over_all_samples(options: dict[str, Any]) -> None:
    model = Logs()
    rows = fit(model, **options).rows
    expected = data()[0][:, 0].mean().item()
    for row in rows:
        assert row["column"] == pytest.approx(expected, abs=1e-7)
        assert row["val_column"] == pytest.approx(expected, abs=1e-7)
        assert row["ones"] == 1
    assert not hasattr(model, "log")  # it belongs to the job


def test_evaluate_gives_what_validation_steps_log() -> None:
    found = mh.Trainer(devices=["cpu"], quiet=True).evaluate(Logs(), data())
    assert found["val_column"] == pytest.approx(data()[0][:, 0].mean().item(), abs=1e-7)


class OnlyLogs(Logs):
    name = "val_loss"

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log(self.name, F.mse_loss(self(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        raise AssertionError("the trainer calls no hooks")


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_validation_step_may_only_log(devices: str) -> None:
    expected, model = Logs(), OnlyLogs()
    model.load_state_dict(expected.state_dict())
    with pytest.warns(UserWarning, match="on_train_epoch_end: the trainer calls no hooks"):
        row = fit(model, devices=devices).rows[-1]
    assert row["val_loss"] == pytest.approx(fit(expected).rows[-1]["val_loss"], rel=1e-5)
    model.name = "error"
    found = mh.Trainer(devices="cpu", quiet=True).evaluate(model, data())
    assert found["loss"] is None
    assert found["error"] > 0


def test_a_metric_of_validation_steps_may_have_any_name() -> None:
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    schedule, stop = mh.PerEpoch(plateau, monitor="constant"), mh.EarlyStopping("constant", patience=3)
    assert len(fit(Logs(), max_epochs=9, schedule=schedule, callbacks=[stop]).rows) == 4
    stop, limits = mh.EarlyStopping("constant", patience=3), mh.Limits(evaluate_every="2 epochs")
    assert len(fit(Logs(), max_epochs=9, limits=limits, callbacks=[stop]).rows) == 8
    with pytest.raises(BadSettings, match="no metric 'constants'"):
        fit(Logs(), schedule=mh.PerEpoch(plateau, monitor="constants"))


def test_captured_steps_log_the_same() -> None:
    samples = tuple(part.double() for part in data())
    captured, result = assert_as_plain(Logs().double(), (samples, samples), max_epochs=4)
    assert captured.replays > 0
    assert {"column", "largest", "val_column"} <= result.rows[-1].keys()


def test_a_plain_number_is_not_frozen_in_a_graph() -> None:
    class Counts(Logs):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.log("share", len(batch[0]) / 16)
            return super().training_step(batch)

    with capturing() as captured:
        result = fit(Counts())
    assert captured.replays == 0 or not any("one CUDA graph" in note for note in result.notes)
    assert any("'share'" in note for note in result.notes)
    sizes = torch.tensor([16.0, 16, 16, 4])
    assert result.rows[0]["share"] == pytest.approx(((sizes / 16 * sizes).sum() / SAMPLES).item())


def test_callbacks_and_loggers_get_it(tmp_path: Path) -> None:
    class Seen(mh.Callback):
        every = 2

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def on_steps(self, training: Any, values: dict[str, float]) -> None:
            self.steps.append(dict(values))

    seen = Seen()
    stop = mh.EarlyStopping("val_column", patience=1)
    result = fit(Logs(), max_epochs=5, callbacks=[seen, stop], loggers=[mh.loggers.CSVLogger(tmp_path)])
    assert len(result.rows) == 2  # it does not change
    assert all(values["ones"] == 1 for values in seen.steps)
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "val_column" in written


def test_a_resumed_job_continues_its_means(tmp_path: Path) -> None:
    """From a checkpoint within an epoch: what was logged before it is in the epoch's row."""
    options: dict[str, Any] = {"max_epochs": 1, "seed": 1, "checkpoints": mh.Checkpoints(every=1, keep=9)}
    straight = fit(Logs(), **options, run=tmp_path / "run").rows[0]
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*00002*")
    resumed = fit(Logs(), **options, resume=saved, run=tmp_path / "other").rows[-1]
    assert resumed["samples"] == SAMPLES
    assert resumed["column"] == pytest.approx(straight["column"], abs=1e-7)


@pytest.mark.parametrize(
    ("log", "lesson"),
    [
        (lambda model: model.log("X", torch.ones(3)), "value.mean()"),
        (lambda model: model.log("X", "much"), "give one number"),
        (lambda model: model.log("X", 1.0, reduce_fx="sum"), "means over samples"),
    ],
)
def test_what_cannot_be_logged_is_said(log: Any, lesson: str) -> None:
    class Wrong(Logs):
        def training_step(self, batch: Any) -> torch.Tensor:
            log(self)
            return super().training_step(batch)

    with pytest.raises(BadSettings, match=lesson.replace("(", r"\(").replace(")", r"\)")):
        fit(Wrong())


def test_a_log_method_of_the_model_stays() -> None:
    class Own(Logs):
        def log(self, name: str, value: torch.Tensor, **_: Any) -> None:
            self.seen = name

    model = Own()
    assert "column" not in fit(model).rows[0]
    assert model.seen == "val_column"
