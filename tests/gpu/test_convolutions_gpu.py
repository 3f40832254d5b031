"""Other ways to compute convolutions on a GPU: PyTorch's results, the same in a CUDA graph, chosen and remembered."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands import torch as mh
from manyhands.backends.torch.convolutions import choice, cudnn_plans, products
from manyhands.backends.torch.convolutions.operations import ChosenConvolutions, problems_of
from manyhands.backends.torch.convolutions.problems import Kind
from manyhands.backends.torch.kernels import nvrtc
from manyhands.backends.torch.run.graphs.nodes import instantiate
from manyhands.backends.torch.run.streams import capturing
from manyhands.training.torch.book import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
aten = torch.ops.aten
CASES = [
    (1, 64, 28, 3, 1, 1),
    (3, 32, 33, 7, 2, 3),
    (64, 128, 28, 1, 2, 0),
    (128, 128, 14, 3, 1, 1),
    (96, 40, 9, 3, 2, 1),
]


@pytest.fixture(autouse=True)
def _own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    choice.forget()
    yield
    choice.forget()


def _problems(case: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Counter[Any]:
    channels, out, size, kernel, stride, padding = case
    x = torch.randn(32, channels, size, size, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(out, channels, kernel, kernel, device="cuda", dtype=dtype).to(
        memory_format=torch.channels_last
    )
    how = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
    y = aten.convolution(x, weight, None, *how)
    found = problems_of(aten.convolution.default, (x, weight, None, *how))
    found += problems_of(aten.convolution_backward.default, (y, x, weight, None, *how, [channels > 3, True, False]))
    return Counter(found)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ways_give_pytorchs_results_eagerly_and_in_a_graph(case: tuple[int, ...], dtype: torch.dtype) -> None:
    tried = 0
    for problem in _problems(case, dtype):
        trial = choice._Trial(problem)
        ways: list[Any] = products.candidates(problem, trial.result)
        ways += list(cudnn_plans.candidates(problem, trial.result, 4))
        for way in ways:
            assert trial.is_correct(way)
            eager = way(*trial._operands)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = way(*trial._operands)
            captured.zero_()
            graph.replay()
            assert torch.equal(eager, captured)
            tried += 1
    assert tried >= (2 if case[3] == 1 or case[0] <= 3 or cudnn_plans.missing() is None else 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ways_add_the_bias(case: tuple[int, ...]) -> None:
    (problem,) = [problem for problem in _problems(case) if problem.kind is Kind.FORWARD]
    trial = choice._Trial(dataclasses.replace(problem, has_bias=True))
    ways: list[Any] = products.candidates(trial.problem, trial.result)
    ways += list(cudnn_plans.candidates(trial.problem, trial.result, 4))
    for way in ways:
        assert trial.is_correct(way)
        assert not torch.equal(way(*trial._operands, trial._bias), way(*trial._operands))
    assert ways or (case[3] > 1 and case[0] > 4 and cudnn_plans.missing() is not None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_in_one_graph_do_not_disturb_each_others_workspaces(case: tuple[int, ...]) -> None:
    """Many plans one after the other, with memory in between that is written and freed."""
    if (why := cudnn_plans.missing()) is not None:
        pytest.skip(why)
    trials = [choice._Trial(problem) for problem in _problems(case)]
    ways = [(trial, way) for trial in trials for way in cudnn_plans.candidates(trial.problem, trial.result, 4)]
    eager = [way(*trial._operands) for trial, way in ways]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    captured = []
    with capturing(graph, torch.device("cuda", 0)):
        for trial, way in ways:
            torch.full((4096,), 7, device="cuda")
            captured.append(way(*trial._operands))
    instantiate(graph, torch.device("cuda", 0))
    for _ in range(5):
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(eager, captured, strict=True))


def test_a_remembered_product_can_be_captured() -> None:
    """In a new process nothing has loaded its kernel yet, and a capture cannot."""
    (problem,) = [problem for problem in _problems((64, 128, 28, 1, 2, 0)) if problem.kind is Kind.FORWARD]
    result = choice._Trial(problem).result
    chosen = choice.Chosen(products.Product(problem, result), result, 1e-6, 1e-5)
    products._has_patches.cache_clear()
    nvrtc._tried.cache_clear()
    remembered = choice._remembered(problem, choice._as_data(chosen))
    assert remembered is not None
    assert remembered.way is not None
    trial = choice._Trial(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = remembered.way(*trial._operands)
    graph.replay()
    assert torch.equal(captured, remembered.way(*trial._operands))


def test_a_strided_1x1_is_faster_in_another_way_and_that_is_remembered() -> None:
    problems = _problems((64, 128, 28, 1, 2, 0))
    report = choice.choose(problems, steps=1_000_000)
    assert sum(report.faster.values()) >= 1
    assert report.gained > 0
    ways = {problem: choice.way_of(problem) for problem in problems}
    choice.forget()
    again = choice.choose(problems, steps=0)
    assert again.faster == report.faster
    for problem, way in ways.items():
        revived = choice.way_of(problem)
        assert (way is None) == (revived is None)
        if way is not None and revived is not None:
            assert way.data() == revived.data()


def test_a_mode_around_a_net() -> None:
    torch.manual_seed(0)
    net = models.resnet18(10, 1).cuda().to(memory_format=torch.channels_last)
    x = torch.rand(64, 1, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    mode = ChosenConvolutions(steps=1_000_000)

    def gradients(autocast: bool = True) -> list[torch.Tensor]:
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = net(x).square().mean()
        loss.backward()
        return [parameter.grad.float() for parameter in net.parameters() if parameter.grad is not None]

    exact, plain = gradients(autocast=False), gradients()
    mode.recording = True
    with mode:
        gradients()
    mode.choose()
    with mode:
        other = gradients()
    assert mode.report is not None
    print(mode.report.explain())
    assert sum(mode.report.faster.values()) >= 5

    def error(values: list[torch.Tensor]) -> float:
        return sum(float((one - right).norm()) ** 2 for one, right in zip(values, exact, strict=True)) ** 0.5

    assert error(other) < 1.5 * error(plain)


@pytest.mark.parametrize("tuned", [True, False])
def test_the_trainer_says_what_it_chose(tuned: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = torch.rand(2048, 1, 28, 28), torch.arange(2048) % 10
    step = mh.Step(tuned_convolutions=tuned)
    trainer = mh.Trainer(3, 1, devices="gpu", batch_size=256, lr=0.05, step=step, run=tmp_path / "run", quiet=True)
    result = trainer.fit(models.resnet18(10, 1), data)
    assert all(row["train_loss"] < 3 for row in result.rows)
    told = (tmp_path / "run" / "step.txt").read_text()
    print(told)
    assert ("convolutions: " in told) == tuned


def test_a_compiled_step_has_them(tmp_path: Path) -> None:
    """Biases included, which Inductor adds: it trains as the step that is not compiled."""
    torch.manual_seed(0)
    data = torch.rand(2048, 3, 32, 32), torch.arange(2048) % 10
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 1, stride=2)]
        net = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(128 * 16 * 16, 10))
        trainer = mh.Trainer(
            *(3, 1),
            devices="gpu",
            batch_size=256,
            lr=0.01,
            step=mh.Step(compile=compiled),
            run=tmp_path / f"{compiled}",
        )
        losses.append(trainer.fit(net, data).rows[-1]["train_loss"])
        told = (tmp_path / f"{compiled}" / "step.txt").read_text()
        print(told)
        assert "convolutions: " in told
        assert ("kernels compiled" in told) == compiled
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_a_bias(case: tuple[int, ...]) -> None:
    """Forward, and its gradient, as close to float64 as PyTorch's."""
    channels, out, size, kernel, stride, padding = case
    x = torch.randn(32, channels, size, size, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    layer = torch.nn.Conv2d(channels, out, kernel, stride, padding, device="cuda", dtype=torch.bfloat16)
    layer = layer.to(memory_format=torch.channels_last)
    mode = ChosenConvolutions(1_000_000)

    def passes() -> tuple[Any, Any]:
        layer.zero_grad()
        y = layer(x)
        y.backward(y.detach())
        return y.detach(), layer.bias.grad

    mode.recording = True
    with mode:
        passes()
    mode.choose()
    theirs = passes()
    with mode:
        ours = passes()
    wide = torch.nn.functional.conv2d(x.double(), layer.weight.double(), layer.bias.double(), stride, padding)
    for ours_is, theirs_is, exact in zip(ours, theirs, (wide, wide.sum((0, 2, 3))), strict=True):
        error, limit = (ours_is - exact).norm(), (theirs_is - exact).norm()
        assert float(error) <= 1.1 * float(limit) + 1e-3 * float(exact.norm())
