"""Measured timelines and `explain` on real GPUs, and two GPUs in one function."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, chains, scheduled  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch import planning  # noqa: E402
from manyhands.backends.torch.run.streams import StreamRun  # noqa: E402


def test_a_measured_timeline_keeps_every_need() -> None:
    torch.manual_seed(0)
    w, xs = torch.randn(256, 256, device=GPU) / 16, [torch.randn(256, 256, device=GPU) for _ in range(4)]
    before = [x.clone() for x in xs]
    found, made = scheduled(chains, 4, xs, w)
    moments = planning.task_moments(found, made, planning.device_of(found), 1)
    assert all(0 <= start <= stop for start, stop in moments)
    for task, needs in enumerate(made.graph.needs):
        assert all(moments[need][1] <= moments[task][0] + 1e-6 for need in needs)
    for lane in made.per_lane():
        assert all(moments[a][1] <= moments[b][0] + 1e-6 for a, b in itertools.pairwise(lane))
    assert all(map(torch.equal, xs, before))


def test_the_host_takes_part_in_a_measured_timeline() -> None:
    def function(x: Any) -> Any:
        return ((x @ x).cpu().sum() * 2).to(GPU) * x

    fast = mh.parallel(function)
    x = torch.randn(300, 300, device=GPU)
    assert torch.allclose(fast(x), function(x))
    line = fast.measure()
    assert {"cpu compute 0", "gpu:0 copy out 0"} <= set(line.lanes())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("count", [1, 3])
def test_two_gpus_in_one_function(count: int) -> None:
    def function(x: Any, first: Any, second: Any) -> Any:
        y = x
        for _ in range(5):
            y = (y @ first).relu()
        z = (y.to("cuda:1") @ second).tanh()
        for _ in range(5):
            z = (z @ second).relu()
        return z, (z.to("cuda:0") + y), (second @ second).cpu()

    torch.manual_seed(0)
    made = None
    for _ in range(5):
        given = [torch.randn(512, 512, device=device) / 20 for device in ("cuda:0", "cuda:0", "cuda:1")]
        if made is None:
            found, plan = scheduled(function, count, *given)
            made = StreamRun(found, plan, planning.device_of(found))
        before = [torch.cuda.current_stream(number) for number in (0, 1)]
        for one, other in zip(made.replay(given), function(*given), strict=True):
            assert one.device == other.device
            assert torch.equal(one, other)
        assert [torch.cuda.current_stream(number) for number in (0, 1)] == before
