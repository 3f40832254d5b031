"""What is PyTorch's own: gradients, models, and moves of its kinds of tensors."""

from __future__ import annotations

import torch
from support import run_python

from manyhands import torch as mh


def test_devices_are_torch_devices() -> None:
    assert mh.cpu() == torch.device("cpu")
    assert isinstance(mh.try_gpu(), torch.device)
    assert isinstance(mh.gpu(3), torch.device)


def test_moving_keeps_gradients_and_leaves() -> None:
    x = torch.ones(3, requires_grad=True)
    assert mh.to(x, mh.cpu()) is x
    mh.copy(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_the_paths_of_a_model() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    from manyhands.backends import torch as backend

    names = [name for name, _ in backend.model_tensors(net)]
    assert names[:2] == ["0.weight", "0.bias"]
    assert "1.running_mean" in names


def test_a_model_without_tensors_is_left_as_it_is() -> None:
    net = torch.nn.ReLU()
    assert mh.to(net, mh.try_gpu()) is net


def test_importing_the_door_imports_only_torch_and_starts_nothing() -> None:
    code = (
        "import sys; from manyhands import torch as mh; import torch;"
        "print(sorted({'jax', 'tensorflow', 'mxnet'} & set(sys.modules)), torch.cuda.is_initialized())"
    )
    assert run_python(code, MANYHANDS_VIRTUAL_DEVICES="").stdout == "[] False\n"
