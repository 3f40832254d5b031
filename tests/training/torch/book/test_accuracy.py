"""Accuracy: every sample once, on one device or many, and the net left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands import torch as mh
from manyhands.book.torch import accuracy, evaluate_accuracy_gpu, evaluate_accuracy_gpus, lenet
from manyhands.errors import BadBatch

SIZES = [5, 1, 8, 3]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        yield torch.randn(size, 2, 3, generator=generator), torch.randint(3, (size,), generator=generator)


def expected() -> float:
    net = make_net().eval()
    right = sum(int((net(X).argmax(1) == y).sum()) for X, y in batches())
    assert 0 < right < sum(SIZES)
    return right / sum(SIZES)


def test_accuracy_counts() -> None:
    scores = torch.tensor([[0.1, 0.3, 0.6], [0.3, 0.2, 0.5]])
    y = torch.tensor([0, 2])
    assert accuracy(scores, y) == 1.0
    assert isinstance(accuracy(scores, y), float)
    assert accuracy(torch.tensor([0.0, 1.0]), y) == 1.0
    assert accuracy(torch.tensor([[0], [2]]), y) == 2.0
    assert accuracy(scores.T.reshape(1, 3, 2), y.reshape(1, 2)) == 1.0  # a label per position


@pytest.mark.parametrize("device", [None, "cpu"])
def test_one_device(device: str | None) -> None:
    assert evaluate_accuracy_gpu(make_net(), batches(), device) == expected()


def test_all_devices() -> None:
    net = make_net()
    assert evaluate_accuracy_gpus(net, batches()) == expected()
    assert mh.device_of(net) == mh.cpu()
    assert evaluate_accuracy_gpus(mh.to(net, mh.try_gpu()), batches()) == expected()
    assert mh.device_of(net) == mh.try_gpu()


def test_all_devices_with_a_split_of_ones_own() -> None:
    seen: list[Any] = []

    def split(X: Any, y: Any, devices: Any) -> Any:
        seen.append(list(devices))
        return mh.split_batch(X, y, devices)

    assert evaluate_accuracy_gpus(make_net(), batches(), split) == expected()
    assert seen == [mh.try_all_gpus()] * len(SIZES)


@pytest.mark.parametrize("evaluate", [evaluate_accuracy_gpu, evaluate_accuracy_gpus])
def test_the_net_is_left_as_it_was(evaluate: Any) -> None:
    net = make_net()
    net[2].eval()  # a frozen batch norm in a net that trains
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    evaluate(net, batches())
    assert [layer.training for layer in net] == [True, True, False, True, True]
    assert net.training
    assert torch.is_grad_enabled()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(BadBatch, match="no sample"):
        evaluate(net, [])
    assert net.training
    evaluate(net.eval(), batches())
    assert not net.training


@pytest.mark.parametrize("evaluate", [evaluate_accuracy_gpu, evaluate_accuracy_gpus])
def test_a_function_is_a_net_too(evaluate: Any) -> None:
    data = [(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))]
    assert evaluate(lambda X: torch.eye(3, device=X.device)[X], data) == 2 / 3


class Reads(TorchDispatchMode):
    """Records when a number is given to the host: on a GPU each waits."""

    def __init__(self) -> None:
        super().__init__()
        self.when: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.when.append(self.batches)
        return func(*args, **kwargs or {})

    def counted(self, data: Iterator[Any]) -> Iterator[Any]:
        for self.batches, batch in enumerate(data, start=1):
            yield batch


@pytest.mark.parametrize("evaluate", [evaluate_accuracy_gpu, evaluate_accuracy_gpus])
def test_numbers_are_read_after_the_last_batch(evaluate: Any) -> None:
    net = make_net()
    with Reads() as reads:
        evaluate(net, reads.counted(batches()))
    assert set(reads.when) == {len(SIZES)}


@pytest.mark.skipif(mh.num_gpus() < 2, reason="needs two devices (MANYHANDS_VIRTUAL_DEVICES=2)")
def test_several_devices() -> None:
    net = mh.to(make_net(), mh.gpu(1))
    assert evaluate_accuracy_gpu(net, batches()) == expected()
    assert evaluate_accuracy_gpu(net, batches(), "gpu:1") == expected()
    assert evaluate_accuracy_gpus(net, batches()) == expected()
    assert mh.device_of(net) == mh.gpu(1)
    images = [(torch.randn(3, 1, 28, 28), torch.tensor([0, 1, 2]))]
    convolutions = lenet()
    assert evaluate_accuracy_gpus(convolutions, images) == evaluate_accuracy_gpu(convolutions, images)
