"""What cannot be trained is refused with the reason; what only looks odd is trained."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import CLASSES, Batches, Chunks, OneHot, Rows, difference, fit, mlp, same, vectors

from manyhands.errors import (
    BadBatch,
    BadLabels,
    BadSettings,
    LossIsNotANumber,
    NotATensor,
    NotSendable,
    WorkerFailed,
)
from manyhands.training.data.order import epoch_order
from manyhands.training.options import Step, Workers
from manyhands.training.torch.trainer import Trainer

BATCH = 8


def spoilt(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors(40)
    X[number] = torch.nan
    return X, y


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_no_number(ranks: int) -> None:
    """The step and its samples are named, the same on any number of ranks, whichever rank had the sample."""
    for number in (17, 18, 19):
        position = epoch_order(0, 0, 40).tolist().index(number)
        step = position // BATCH
        with pytest.raises(LossIsNotANumber, match=rf"step {step} is not a number .*samples .*\b{number}\b"):
            fit(mlp(), spoilt(number), ranks, batch_size=BATCH, max_epochs=1)
        if ranks == 2:
            break  # each failure ends the workers; the next job gets new ones
    with pytest.raises(LossIsNotANumber, match=r"step 2 is not a number .*batch 2 of the loader"):
        fit(mlp(), Chunks(*spoilt(17), BATCH), ranks, batch_size=BATCH)
    assert difference(fit(mlp(), vectors(), ranks)[0], fit(mlp(), vectors(), 1)[0]) <= 1e-12


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "nadam": torch.optim.NAdam,
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [("momentum", (0, 1)), ("momentum", (3,)), ("adam", (0, 1)), ("adam", (2, 9)), ("nadam", (0, 1)), ("nadam", (3,))],
)
def test_a_batch_that_is_left_out_leaves_no_trace(name: str, bad: tuple[int, ...]) -> None:
    """As if the loader had not had it: weights, statistics and optimizer, in the first steps and later ones."""
    X, y = vectors()
    batches = list(zip(X.split(9), y.split(9), strict=True))
    spoilt = [(X * torch.nan if number in bad else X, y) for number, (X, y) in enumerate(batches)]
    without = [batch for number, batch in enumerate(batches) if number not in bad]
    cases: list[dict[str, Any]] = [{}, {"ranks": 2, "step": Step(batch_stats="global")}, {"gradient_clip_val": 100.0}]
    for options in cases:
        options |= {"optimizer": OPTIMIZERS[name]}
        expected, _ = fit(mlp(norm=True), Batches(without), **options)
        options["step"] = replace(options.get("step", Step()), on_nan="continue")
        with pytest.warns(UserWarning, match="continuing"):
            found, _ = fit(mlp(norm=True), Batches(spoilt), **options)
        assert same(expected, found)


def test_data_that_are_not_numbers_are_to_blame() -> None:
    """Also those of a dataset; then nothing is said of the learning rate."""
    X, y = spoilt(17)
    X[17] = 1
    X[17, 2] = torch.nan
    for data, of in (((X, y), "40 samples"), (list(zip(X, y, strict=True)), f"{BATCH} samples of the batch")):
        said = (
            rf"The data are the cause: X has 1 number that is NaN or infinite, in 1 of {of} \(the first is sample 17\)"
        )
        with pytest.raises(LossIsNotANumber, match=said) as raised:
            fit(mlp(), data, batch_size=BATCH)
        assert "learning rate" not in str(raised.value)


def test_a_model_without_parameters() -> None:
    with pytest.raises(BadSettings, match="no parameters that could be trained"):
        fit(nn.Flatten(), vectors())
    with pytest.raises(BadSettings, match="no parameters that could be trained"):
        fit(mlp().requires_grad_(False), vectors())


def test_labels_out_of_range() -> None:
    (X, y), rows = vectors(), Rows()
    below = y.clone()
    y[5], rows.y[5], below[5] = CLASSES, CLASSES, -1
    loader = DataLoader(TensorDataset(X, below), batch_size=8, sampler=range(len(y)))
    for data, ranks in (((X, y), 1), ((X, below), 1), (rows, 1), (rows, 2), ((vectors(), (X, y)), 1), (loader, 1)):
        with pytest.raises(BadLabels, match=f"the model has {CLASSES} outputs"):
            fit(mlp(), data, ranks)


def test_labels_that_are_left_out_and_targets_that_are_no_labels() -> None:
    X, y = vectors()
    y[5] = -100
    fit(mlp(), (X, y), max_epochs=1)
    counts = nn.Sequential(nn.Linear(6, 1)).double()
    fit(counts, (X, y), max_epochs=1, lr=0.001, loss=lambda output, target: ((output[:, 0] - target) ** 2).mean())
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, CLASSES))
    fit(tokens, (torch.randint(9, (30, 3)), torch.randint(CLASSES, (30,))), max_epochs=1)


def test_numbers_need_a_loss_that_the_user_chooses() -> None:
    """With the default they gave a loss of 0 that nothing was learnt from, or a negative one."""
    X, y = vectors()
    for outputs in (1, 2):
        numbers = torch.randn(len(X), outputs).double()
        for ranks in (1, 2):
            with pytest.raises(BadLabels, match=r"the targets are numbers, .* give loss='mse'"):
                fit(nn.Linear(6, outputs).double(), (X, numbers), ranks)
        fit(nn.Linear(6, outputs).double(), (X, numbers), max_epochs=1, loss="mse")
    for labels in (y * 0, (y > 0).double()):
        with pytest.raises(BadLabels, match=r"the model has one output, .* loss='bce_with_logits' for yes and no"):
            fit(nn.Linear(6, 1).double(), (X, labels))
    soft = torch.randn(len(X), CLASSES).softmax(1)
    fit(mlp(), (X, soft.double()), max_epochs=1)
    fit(mlp().bfloat16(), (X.bfloat16(), soft.bfloat16()), max_epochs=1)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device must not be there")
def test_a_device_that_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(1, devices=["cpu"], workers=Workers(per_device=2), quiet=True)
    # As if it had been there when the trainer was made.
    monkeypatch.setattr(Trainer, "ranks", [torch.device("cpu"), torch.device("cuda", 0)])
    with pytest.raises(WorkerFailed, match=r"rank 1 \(cuda:0\)"):
        trainer.fit(mlp(), vectors())


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(BadSettings, match="parameters of another model"):
        fit(mlp(), vectors(), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))


def test_empty_data() -> None:
    X, y = vectors()
    empty = (X[:0], y[:0])
    for data in (empty, TensorDataset(*empty), OneHot(0), DataLoader(TensorDataset(*empty)), Chunks(*empty, 4)):
        with pytest.raises(BadBatch, match="it has no samples"):
            fit(mlp(), data)
    for wrong in (None, 3, object()):
        with pytest.raises(NotATensor):
            fit(mlp(), wrong)
    with pytest.raises(BadBatch, match="same number"):
        fit(mlp(), (X, y[:5]))


def test_what_cannot_be_sent_is_named() -> None:
    model = mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(NotSendable, match="the model of this job"):
        fit(model, vectors(), 2)
    lock = threading.Lock()
    with pytest.raises(NotSendable, match="the objective of this job"):
        fit(mlp(), vectors(), 2, loss=lambda a, b: nn.functional.cross_entropy(a, b) * bool(lock))
    fit(model, vectors(), 1)


def test_a_loss_that_reads_settings_of_cudnn_can_be_sent() -> None:
    cudnn = torch.backends.cudnn  # a module that is an object of its own class
    fit(mlp(), vectors(), 2, loss=lambda a, b: nn.functional.cross_entropy(a, b) * (2 - cudnn.enabled), max_epochs=1)


SCRIPT = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from training_cases import fit, mlp, vectors

factor = 2.0

class Doubled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, X):
        return factor * self.net(X)

loss = lambda answer, target: torch.nn.functional.cross_entropy(answer, target)
weights, result = fit(Doubled(), vectors(), 2, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
alone, _ = fit(Doubled(), vectors(), 1, loss=loss)
print(max(float((weights[n] - alone[n]).abs().max()) for n in alone), len(result.rows))
"""


def test_a_script_without_a_main_guard() -> None:
    """Its classes, lambdas and globals are sent along; the script itself is not run again in the workers."""
    done = run_python(SCRIPT)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert float(line.split()[0]) <= 1e-14
    assert line.split()[1] == "2"


def test_data_that_a_worker_refuses() -> None:
    X, y = vectors(40)
    with pytest.raises(BadBatch, match="samples are float64"):
        Trainer(1, batch_size=8, quiet=True, devices=["cpu"], workers=Workers(per_device=2)).fit(mlp().float(), (X, y))


def test_an_error_that_is_not_of_the_data_stays_as_it_is() -> None:
    X, y = vectors(40)
    X, y = X.float(), y[:, None].int()  # what is odd about these is what the model wants
    own: Any = nn.Sequential(mlp().float())

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = own, 0

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 3:
                raise ValueError("something else")
            return self.net(X)

    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, y.squeeze(1).long())

    with pytest.raises(ValueError, match="something else"):
        Trainer(1, batch_size=8, quiet=True, loss=loss).fit(Late(), (X, y))


def test_a_part_of_a_dict_that_is_no_array() -> None:
    data = {"X": vectors()[0], "return_loss": True}
    with pytest.raises(NotATensor, match=r"'return_loss' of the dict is a bool.*: give a dict of arrays"):
        Trainer(1, quiet=True).fit(mlp(), data)
