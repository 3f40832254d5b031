"""Batch normalisation in one go, in the trainer on a real GPU: as exact, the same every time, and within its memory."""

from __future__ import annotations

import copy
import gc
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from training_gpu_cases import samples  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch.kernels import batch_norm  # noqa: E402
from manyhands.book import torch as models  # noqa: E402
from manyhands.training.torch.fast import build  # noqa: E402
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms  # noqa: E402

pytestmark = pytest.mark.usefixtures("same_kernels")
DEVICE = torch.device("cuda", 0)
IMAGES, LABELS = samples(320, 28, 10)
NETS = {"small resnet": models.small_resnet, "resnet-18": models.resnet18}


@pytest.mark.parametrize("name", NETS)
def test_gradients_and_statistics_are_as_exact(name: str) -> None:
    """As those of PyTorch's operations: as near to float64, whatever the bits."""
    net = models.initialise(NETS[name](), seed=0).to(DEVICE, memory_format=torch.channels_last)
    wide = copy.deepcopy(net).double()
    x, y = IMAGES[:64].to(DEVICE).as_strided((64, 1, 28, 28), (784, 1, 28, 1)), LABELS[:64].to(DEVICE)
    batch_norm.ready(DEVICE)

    def stepped(norms: FusedBatchNorms | None) -> Any:
        own = copy.deepcopy(net)
        if norms is not None:
            norms.begin(poison=True)
            norms.__enter__()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = cross_entropy(own(x).float(), y)
        loss.backward()
        if norms is not None:
            norms.__exit__(None, None, None)
        return flat([parameter.grad for parameter in own.parameters()]), flat(list(own.buffers()))

    def flat(values: list[Any]) -> Any:
        return torch.cat([value.double().flatten() for value in values])

    cross_entropy(wide(x.double()), y).backward()
    exact = flat([parameter.grad for parameter in wide.parameters()]), flat(list(wide.buffers()))
    norms = FusedBatchNorms()
    plain, result = stepped(None), stepped(norms)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert norms.counts["batch normalisations"] == count
    for value, other, right in zip(result, plain, exact, strict=True):
        assert bool(value.isfinite().all())
        assert float((value - right).norm()) < 1.05 * float((other - right).norm()) + 1e-6 * float(right.norm())


def test_a_result_that_a_stream_of_the_model_reads_first() -> None:
    """It is written on the stream of the pass: that stream reads it, too, and does not wait for the other."""
    batch_norm.ready(DEVICE)
    norm = nn.BatchNorm2d(64).to(DEVICE)
    x = torch.rand(64, 64, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    other = torch.cuda.Stream(DEVICE)
    expected = copy.deepcopy(norm)(x).detach()
    norms = FusedBatchNorms()
    norms.begin(poison=True)
    with norms, torch.no_grad():
        y = norm(x)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            there = y * 2
        here = y * 3
        copied = here.clone()  # long before the other stream wakes up
    torch.cuda.synchronize()
    torch.testing.assert_close(copied, expected * 3)
    torch.testing.assert_close(there, expected * 2)


def trained(run: Path | None = None, fused: bool = True) -> tuple[dict[str, Any], Any]:
    net = models.initialise(models.small_resnet(), seed=0)
    trainer = mh.Trainer(3, devices=["gpu:0"], batch_size=32, lr=0.05, precision="bf16", quiet=True, run=run)
    with nullcontext() if fused else build.without("fused norms"):
        result = trainer.fit(net, (IMAGES, LABELS))
    assert "one CUDA graph" in result.notes[0], result.notes
    assert len(result.notes) == 1, result.notes
    return net.state_dict(), result


def test_training_with_and_without(tmp_path: Path) -> None:
    ours, told = trained(tmp_path / "run")
    again, _ = trained()
    theirs, told_too = trained(tmp_path / "other", fused=False)
    assert all(torch.equal(ours[key], again[key]) for key in ours), "not the same every time"
    assert told.rows[-1]["train_loss"] == pytest.approx(told_too.rows[-1]["train_loss"], rel=0.1)
    assert int(ours["1.num_batches_tracked"]) == int(theirs["1.num_batches_tracked"]) == 30
    words = (tmp_path / "run" / "step.txt").read_text()
    assert "fused: 7 batch normalisations" in words
    assert re.search(r"in one kernel each: \d+ casts of weights, 7 counts of batches", words)
    assert "fused: " not in (tmp_path / "other" / "step.txt").read_text()


def test_a_kernel_that_reads_past_pytorch_is_found() -> None:
    """A model with a compiled part: what is only noted would be garbage there. The step is made without notes then."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)
            self.part = torch.compile(lambda y: torch.relu(y) + torch.tanh(y))

        def forward(self, x: Any) -> Any:
            return self.head(self.part(self.norm(self.conv(x))).mean((2, 3)))

    results = []
    for own in (True, False):
        torch.manual_seed(0)
        net = Partly()
        trainer = mh.Trainer(2, devices=["gpu:0"], batch_size=32, lr=0.05, quiet=True)
        with nullcontext() if own else build.without("fused norms"):
            results.append(trainer.fit(net, (IMAGES, LABELS)).rows[-1]["train_loss"])
    assert results[0] == pytest.approx(results[1], rel=0.05)


def test_memory_is_within_one_copy_of_the_gradients_over_plain_ddp(tmp_path: Path) -> None:
    images, labels = torch.rand(1024, 1, 28, 28), torch.randint(10, (1024,))
    net = models.resnet18()
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())

    def clean() -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    clean()
    before = torch.cuda.memory_allocated()
    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        own = copy.deepcopy(net).to(DEVICE, memory_format=torch.channels_last)
        ddp = nn.parallel.DistributedDataParallel(own, device_ids=[0])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, fused=True)
        for start in range(0, 1024, 256):
            x = images[start : start + 256].to(DEVICE, memory_format=torch.channels_last)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(ddp(x), labels[start : start + 256].to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        plain = torch.cuda.max_memory_allocated() - before
    finally:
        torch.distributed.destroy_process_group()
    del own, ddp, optimizer, loss, x
    clean()
    before = torch.cuda.memory_allocated()
    mh.Trainer(2, devices=["gpu:0"], batch_size=256, lr=0.1, quiet=True).fit(net, (images, labels))
    ours = torch.cuda.max_memory_allocated() - before
    print(f"DistributedDataParallel {plain / 1e6:.0f} MB, manyhands {ours / 1e6:.0f} MB")
    assert ours <= plain + gradients
