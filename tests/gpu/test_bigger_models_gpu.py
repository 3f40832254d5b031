"""fp16 with a scaled loss, blocks that are computed again, and sharded parameters, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import training_gpu_cases  # noqa: E402
from training_gpu_cases import captured  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.errors import BadSettings, LossIsNotANumber  # noqa: E402
from manyhands.training.options import Step, Workers  # noqa: E402

X = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (320,), generator=torch.Generator().manual_seed(1))


class Block(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        linear = torch.nn.Linear(16, 16)
        self.layers = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(dropout))

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


def net(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Sequential(*blocks), torch.nn.Linear(16, 5))


def trained(model: Any, epochs: int = 3, **options: Any) -> Any:
    options = {"devices": "gpu:0", "batch_size": 32, "quiet": True, "precision": "fp32", "lr": 0.05, **options}
    return mh.Trainer(epochs, **options).fit(model, (X, Y))


def difference(one: Any, other: Any) -> float:
    return training_gpu_cases.difference(one.state_dict(), other.state_dict())


def test_blocks_are_computed_again_in_a_captured_step() -> None:
    plain, checkpointed = net(), net()
    trained(plain, step=Step(optimize="off"))
    result = trained(checkpointed, step=Step(activation_checkpointing=True))
    assert captured(result)
    assert not any(note.startswith("the step: plain") for note in result.notes)
    assert difference(checkpointed, plain) < 1e-5


def test_blocks_with_dropout_are_not_captured() -> None:
    model, again = net(0.3), net(0.3)
    how: dict[str, Any] = {"step": Step(activation_checkpointing=lambda module: isinstance(module, Block))}
    result = trained(model, **how)
    assert any("draw random numbers" in note for note in result.notes)
    trained(again, step=Step(optimize="off"))
    assert difference(model, again) < 1e-5


@pytest.mark.parametrize("optimize", ["auto", "off"])
def test_half_precision_in_the_captured_step_and_in_plain_ones(optimize: Any) -> None:
    exact, half = net(), net()
    trained(exact)
    result = trained(half, precision="fp16", step=Step(optimize=optimize))
    assert captured(result) is (optimize == "auto")
    assert difference(half, exact) < 0.05
    assert any(note.startswith("fp16: the loss scale is") for note in result.notes)


@pytest.mark.parametrize("optimize", ["auto", "off"])
def test_a_scale_that_collapses_ends_the_job(optimize: Any) -> None:
    def huge(scores: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores, y) * 1e15

    with pytest.raises(LossIsNotANumber, match="steps were all skipped"):
        trained(net(), precision="fp16", loss=huge, epochs=20, step=Step(optimize=optimize))


@pytest.mark.parametrize("optimize", ["auto", "off"])
def test_updates_with_infinite_gradients_are_taken_back(optimize: Any) -> None:
    def large(scores: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores, y) * 1000

    model = net()
    result = trained(model, precision="fp16", loss=large, lr=5e-5, step=Step(optimize=optimize))
    assert all(bool(one.isfinite().all()) for one in model.state_dict().values())
    (note,) = [note for note in result.notes if note.startswith("fp16")]
    assert " 0 steps" not in note


def test_two_ranks_on_one_gpu_are_not_sharded() -> None:
    """NCCL refuses two ranks on one GPU, and Gloo does not gather CUDA tensors."""
    with pytest.raises(BadSettings, match="every rank needs its own GPU"):
        trained(net(), workers=Workers(per_device=2), step=Step(shard=True))


def test_parameters_are_sharded_over_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    alone, together = net().double(), net().double()
    how: dict[str, Any] = {"batch_size": 32, "quiet": True, "precision": "fp64", "lr": 0.05}
    mh.Trainer(2, devices="gpu:0", **how).fit(alone[1], (X.double(), Y))
    mh.Trainer(2, devices=2, step=Step(shard=True), **how).fit(together[1], (X.double(), Y))
    assert difference(together, alone) < 1e-10
