"""Batches as dicts, outputs with a loss (Hugging Face's way), and Lightning's ``training_step(batch, batch_idx)``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from training_cases import difference, fit, mlp, rows, vectors

from manyhands.errors import BadBatch
from manyhands.training.loss.own_step import LossSum
from manyhands.training.options import Step
from manyhands.training.torch.trainer import Trainer

CLOSE = 1e-12
IGNORED = -100


@dataclass
class Output:
    loss: Any
    logits: torch.Tensor


class Classifier(nn.Module):
    """As the models of transformers: ``forward(input_ids, labels)`` gives an output with a loss."""

    def __init__(self, kind: str = "object") -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, X: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(X)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.kind == "dict" else Output(loss, logits)


class Tokens(nn.Module):
    """A language model: its loss is a mean over the tokens that are not padding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(7, 4).double(), nn.Linear(4, 7).double()
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Any:
        logits, flat = self.head(self.embedding(input_ids)).flatten(0, 1), labels.flatten()
        if self.kind == "known":
            return SimpleNamespace(loss=functional.cross_entropy(logits, flat))
        total = functional.cross_entropy(logits, flat, reduction="sum")
        return {"loss": LossSum(total, (flat != IGNORED).sum())}


def named(count: int = 90) -> dict[str, torch.Tensor]:
    X, y = vectors(count)
    return {"X": X, "labels": y}


def samples(data: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(data, one, strict=True)) for one in zip(*data.values(), strict=True)]


def texts(count: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(7, (count, 5), generator=generator)
    lengths = torch.randint(1, 6, (count, 1), generator=generator)
    return {"input_ids": ids, "labels": torch.where(torch.arange(5) < lengths, ids, IGNORED)}


@pytest.mark.parametrize("kind", ["object", "dict"])
def test_an_output_with_a_loss_is_the_loss_written_by_hand(kind: str) -> None:
    expected, metrics = fit(mlp(), vectors(), 1)
    for data in (named(), samples(named()), DataLoader(samples(named()), 16, drop_last=True, shuffle=False)):
        weights, found = fit(Classifier(kind), data, 1)
        if not isinstance(data, DataLoader):
            assert difference(expected, {n.removeprefix("net."): one for n, one in weights.items()}) == 0
            assert rows(found) == rows(metrics)  # the accuracy, too
    if kind == "object":
        of_both, _ = fit(Classifier(), named(), 1, loss=lambda output, batch: output.loss)
        assert difference(expected, {n.removeprefix("net."): one for n, one in of_both.items()}) == 0


@pytest.mark.parametrize("kind", ["known", "sum"])
def test_a_mean_over_tokens_is_exact_on_two_ranks(kind: str) -> None:
    """F.cross_entropy's mean is recognised within the model, and a LossSum says what it is."""
    alone, metrics = fit(Tokens(kind), texts(), 1)
    for data, options in (
        (samples(texts()), {"step": Step(shares=[0.7, 0.3])}),
        (texts(), {"step": Step(accumulate=3)}),
    ):
        together, shared = fit(Tokens(kind), data, 2, **options)
        assert difference(alone, together) <= CLOSE
        assert [row["train_loss"] for row in rows(shared)] == pytest.approx(
            [row["train_loss"] for row in rows(metrics)], rel=CLOSE
        )


def test_parts_that_the_model_does_not_take() -> None:
    both = [{**one, "file": f"{number}.png"} for number, one in enumerate(samples(named()))]
    expected, _ = fit(Classifier(), named(), 1)
    assert difference(expected, fit(Classifier(), both, 1)[0]) == 0
    wrong = [{"X": one["X"], "label": one["labels"]} for one in samples(named())]
    with pytest.raises(BadBatch, match=r"no loss in the output, an Output \('label' of the batch: forward has no arg"):
        fit(Classifier(), wrong, 1)
    with pytest.raises(BadBatch, match=r"a dict with 'x', and each part is given to the model by name: forward of Cl"):
        fit(Classifier(), {"x": vectors()[0]}, 1)


class Lightning(nn.Module):
    """``training_step(batch, batch_idx)``, and what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return {"loss": functional.cross_entropy(self.net(batch[0]), batch[1]) * (1 + batch_idx)}

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch_idx == 0
        return functional.cross_entropy(self.net(batch[0]), batch[1])


def test_the_number_of_the_batch_starts_anew_in_every_epoch(tmp_path: Any) -> None:
    model = Lightning()
    how: dict[str, Any] = {"batch_size": 32, "optimizer": "sgd", "quiet": True}
    Trainer(2, run=tmp_path / "whole", **how).fit(model, (vectors(), vectors(20)))
    assert model.seen == [0, 1, 2, 0, 1, 2]
    together, _ = fit(Lightning(), vectors(), 2, batch_size=32)
    assert difference(fit(Lightning(), vectors(), 1, batch_size=32)[0], together) <= CLOSE


def test_a_real_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 7, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).double()

    alone, _ = fit(model(), texts(), 1)
    together, _ = fit(model(), samples(texts()), 2)
    assert difference(alone, together) <= 1e-5  # its loss is computed in float32; a mean of means differs by 1e-2
