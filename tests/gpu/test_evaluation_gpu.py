"""Evaluation and prediction on a GPU: beside a captured step, of a model on the host or there, in half precision."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training_gpu_cases import captured, net, samples  # noqa: E402

from manyhands import torch as mh  # noqa: E402

IMAGES, LABELS = samples(1300, 12, 5)


def trainer(**options: Any) -> mh.Trainer:
    return mh.Trainer(2, **{"devices": ["gpu:0"], "quiet": True, "precision": "fp32", "batch_size": 64, **options})


def seen(outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    assert outputs.device.type == targets.device.type == "cpu"
    return [len(outputs), float((targets * torch.arange(len(targets))).sum())]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_predictions_come_to_the_host_and_the_model_stays(where: str) -> None:
    model = net().train().to(where)
    expected = net().eval()(IMAGES).detach()
    outputs = trainer().predict(model, IMAGES)
    assert outputs.device.type == "cpu"
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4)
    assert next(model.parameters()).device.type == where
    assert model.training


def test_bfloat16_gives_float32() -> None:
    outputs = trainer(precision="bf16").predict(net(), IMAGES)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, net().eval()(IMAGES).detach(), atol=0.05, rtol=0.05)


def test_metrics_beside_a_captured_step() -> None:
    """The graph goes on after an evaluation that looks into the model; the figures are those of an evaluation alone."""
    data, validation = (IMAGES[:640], LABELS[:640]), (IMAGES[640:], LABELS[640:])
    model, plain = net(), net()
    result = trainer(lr=0.05, metrics=[seen]).fit(model, data, validation)
    assert captured(result), result.notes
    trainer(lr=0.05).fit(plain, data, validation)
    for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other), "metrics change nothing of the training"
    assert result.rows[-1]["val_seen"][0] == 660
    figures = trainer(metrics=[seen]).evaluate(model, validation)
    assert figures["seen"] == result.rows[-1]["val_seen"]
    assert figures["loss"] == pytest.approx(result.rows[-1]["val_loss"], rel=1e-3)
