"""Virtual devices in a process that has a GPU: they leave it alone, unless they are asked to stand in for it."""

from __future__ import annotations

import torch
from torch import nn

from manyhands import torch as mh


def test_the_gpu_is_left_alone() -> None:
    count = torch.cuda.device_count
    with mh.virtual_devices(2) as devices:
        assert [str(device) for device in devices] == ["cpu:0", "cpu:1"]
        assert torch.cuda.device_count is count
        x = torch.ones(2, device="cuda:0")
        assert type(x) is torch.Tensor
        assert mh.to(x, mh.gpu(1)).tolist() == [1.0, 1.0]
        assert mh.to(mh.to(x, mh.gpu(1)), torch.device("cuda:0")).device.type == "cuda"


def test_they_stand_in_for_it_where_asked() -> None:
    real = torch.arange(3.0, device="cuda:0")
    with mh.virtual_devices(2, as_cuda=True):
        assert torch.cuda.device_count() == 2
        assert "virtual" in torch.cuda.get_device_name(0)
        x = torch.ones(3, device="cuda:1")
        assert (type(x).__name__, str(x.device), x.is_cuda) == ("VirtualTensor", "cuda:1", True)
        assert real.cuda(1).tolist() == mh.to(real, mh.gpu(1)).tolist() == [0.0, 1.0, 2.0]
        net = nn.DataParallel(nn.Linear(3, 2).cuda(), device_ids=[0, 1])
        net(torch.ones(4, 3, device="cuda")).sum().backward()
        assert net.module.weight.grad.tolist() == [[4.0] * 3] * 2
        torch.cuda.synchronize()
    assert "virtual" not in torch.cuda.get_device_name(0)
    assert (real + torch.ones(3, device="cuda:0")).sum().item() == 6.0
    torch.cuda.synchronize()
