"""A training on the CPU keeps its memory from step to step."""

from __future__ import annotations

import itertools
import platform
import resource
import statistics

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.training.torch.step import host_heap

FAULTS: list[int] = []


class Counting(nn.Module):
    """Large activations, and how many page faults there were before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FAULTS.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        output = self.layer(x)
        for _ in range(4):
            output = torch.relu(output * 1.01)
        return output[:, :3] + output.mean()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="PyTorch's mimalloc frees memory by the clock")
def test_steps_reuse_the_memory_of_the_one_before() -> None:
    FAULTS.clear()
    X, y = torch.randn(512 * 20, 8), torch.randint(3, (512 * 20,))
    mh.Trainer(1, devices="cpu", batch_size=512, lr=0.1, precision="fp32", quiet=True).fit(Counting(), (X, y))
    # The heap grows in the first steps, by how much depends on what the process did before.
    later = [after - before for before, after in itertools.pairwise(FAULTS[8:])]
    assert len(later) >= 10
    # A step's activations are 9 tensors of 4 MB: 9000 pages of 4 kB.
    assert statistics.median(later) < 500
    assert host_heap._jobs == 0


def test_jobs_within_jobs_release_once() -> None:
    with host_heap.retained(), host_heap.retained():
        assert host_heap._jobs == 2
    assert host_heap._jobs == 0
