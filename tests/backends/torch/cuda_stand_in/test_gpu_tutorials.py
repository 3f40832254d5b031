"""Programs of the kind that tutorials for GPUs show, none of them written for virtual devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("two_gpus")


def test_layers_on_two_devices() -> None:
    """Model parallelism: the halves of a net on two devices, and what goes between them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16).to("cuda:0")
            self.second = nn.Linear(16, 3).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.first(x.to("cuda:0")))
            return self.second(x.to("cuda:1"))

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    inputs, labels = torch.randn(12, 8), torch.randint(3, (12,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = nn.CrossEntropyLoss()(outputs, labels.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert str(net.first.weight.grad.device) == "cuda:0"


def test_a_pipeline_of_chunks() -> None:
    first, second = nn.Linear(8, 16).double().to("cuda:0"), nn.Linear(16, 3).double().to("cuda:1")
    batch = torch.randn(10, 8, dtype=torch.float64)
    chunks = iter(batch.to("cuda:0").split(4))
    previous, results = first(next(chunks)).to("cuda:1"), []
    for chunk in chunks:
        results.append(second(previous))
        previous = first(chunk).to("cuda:1")
    results.append(second(previous))
    whole = torch.cat(results)
    expected = second(first(batch.cuda(0)).to("cuda:1"))
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_mixed_precision_with_a_scaler_and_pinned_batches() -> None:
    data = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
    net = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    for workers in (0, 1):
        for inputs, labels in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
            assert inputs.is_pinned()
            inputs, labels = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                outputs = net(inputs)
                assert outputs.dtype == torch.float16
                with torch.autocast("cuda", enabled=False):
                    assert (inputs @ inputs.T).dtype == torch.float32
                loss = F.cross_entropy(outputs, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.is_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_around_replicas(dtype: torch.dtype) -> None:
    """The replicas' threads use float16, whatever the caller's precision is: so do PyTorch's on GPUs."""
    net = nn.DataParallel(nn.Linear(3, 2).cuda(), device_ids=[0, 1])
    x = torch.randn(4, 3, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        y = net(x)
    assert y.dtype == torch.float16
    assert torch.allclose(y.float(), net(x), atol=0.01)
    y.float().sum().backward()
    assert net.module.weight.grad.dtype == torch.float32


def test_the_older_names_of_mixed_precision() -> None:
    with torch.cuda.amp.autocast():
        assert torch.mm(torch.ones(2, 2).cuda(), torch.ones(2, 2).cuda()).dtype == torch.float16
    assert torch.cuda.amp.GradScaler().is_enabled()


def test_a_device_agnostic_program() -> None:
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    assert device == "cuda"
    net = nn.LSTM(4, 5, batch_first=True).to(device)
    out, _ = net(torch.randn(2, 3, 4, device=device))
    out.sum().backward()
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device)
    x = torch.randn(2, 3, 8, device=device, requires_grad=True)
    checkpoint(attention, x, use_reentrant=False).sum().backward()
    assert x.grad.device == x.device
    print(f"{torch.cuda.get_device_name(0)}: {torch.cuda.memory_allocated(0) / 2**20:.1f} MiB")


def test_inference_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    expected = net(torch.ones(4, 2)).detach()
    net.cuda(1)
    with torch.inference_mode():
        x = torch.ones(4, 2).cuda(1)
        assert (x.cuda(1) is x, x.to(x) is x) == (True, True)
        assert (x.to("cuda:0").get_device(), x.half().get_device()) == (0, 1)
        y = net(x)
        assert torch.equal(y.cpu(), expected)
        y.view(-1)[0] = 5.0
        assert y[0, 0].item() == 5.0
    assert (y + 1)[0, 0].item() == 6.0


def test_what_gpus_take_from_the_host() -> None:
    """Indices and lengths; and PyTorch's functions in Python, which name the device of their argument again."""
    x = torch.arange(6.0, device="cuda:1").view(3, 2)
    assert x[torch.tensor([0, 2])].tolist() == x[[0, 2]].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    x[torch.tensor([True, False, False])] = 7.0
    assert x[0].tolist() == [7.0, 7.0]
    with pytest.raises(RuntimeError, match="same device"):
        x[torch.tensor([0])] = torch.ones(1, 2)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4, device="cuda:1"), torch.tensor([3, 2]))
    assert nn.LSTM(4, 2).cuda(1)(packed)[0].data.get_device() == 1
    assert nn.EmbeddingBag(5, 3).cuda(1)(torch.tensor([[1, 2]], device="cuda:1")).get_device() == 1
    double = torch.randn(2, dtype=torch.double, device="cuda").requires_grad_()
    assert torch.autograd.gradcheck(torch.sin, (double,))  # it writes to x.data


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"mh\.Trainer"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])
    with torch.cuda.nvtx.range("nothing to mark"):
        pass


def test_the_profiler_shows_the_host_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.randn(8, 8, device="cuda:1")
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        x @ x
    averages = profile.key_averages()
    assert any(event.key == "aten::mm" for event in averages)
    assert averages.table(sort_by="self_cuda_time_total")
    printed = capfd.readouterr()
    assert "frame #" not in printed.out + printed.err
    assert torch.cuda.nccl.version() == (0, 0, 0)
