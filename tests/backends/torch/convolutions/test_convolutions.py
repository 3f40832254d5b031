"""Convolutions in other ways than PyTorch's: the same results, chosen once, used by operations, modes and passes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.backends.torch.convolutions import choice, products
from manyhands.backends.torch.convolutions.choice import Chosen
from manyhands.backends.torch.convolutions.operations import (
    ChosenConvolutions,
    convolution_backward,
    may_choose,
    problems_of,
)
from manyhands.backends.torch.convolutions.problems import Form, Kind, Problem

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    choice.forget()
    yield
    choice.forget()


def _tensors(
    channels: int, kernel: int, stride: int, padding: int, dilation: int = 1, last: bool = True
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(3, channels, 9, 11).to(memory_format=layout)
    weight = torch.randn(5, channels, kernel, kernel).to(memory_format=layout)
    return x, weight, ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)


CASES = [
    (6, 1, 1, 0, 1),  # 1x1
    (6, 1, 2, 0, 1),  # and strided
    (1, 3, 1, 1, 1),  # the first layer of a net for grey images
    (3, 7, 2, 3, 1),  # and for coloured ones
    (2, 3, 1, 2, 2),  # dilated
]


@pytest.mark.parametrize(("case", "last"), list(itertools.product(CASES, (True, False))))
def test_a_product_gives_the_results_of_the_convolution(case: tuple[int, ...], last: bool) -> None:
    x, weight, how = _tensors(*case, last=last)
    y = aten.convolution(x, weight, None, *how)
    gradient = torch.randn_like(y)
    for_input, for_weight, _ = aten.convolution_backward(gradient, x, weight, None, *how, [True, True, False])
    expected = {Kind.FORWARD: y, Kind.INPUT_GRADIENT: for_input, Kind.WEIGHT_GRADIENT: for_weight}
    given = {Kind.FORWARD: (x, weight), Kind.INPUT_GRADIENT: (gradient, weight), Kind.WEIGHT_GRADIENT: (gradient, x)}
    found = problems_of(aten.convolution.default, (x, weight, None, *how))
    found += problems_of(aten.convolution_backward.default, (gradient, x, weight, None, *how, [True, True, False]))
    tried = set()
    for problem in found:
        right = expected[problem.kind]
        for way in products.candidates(problem, Form.of(right)):
            result = way(*given[problem.kind])
            assert Form.of(result) == Form.of(right)
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)
            tried.add(problem.kind)
    of_one = case[1] == 1
    assert tried == (set(Kind) if of_one else {Kind.FORWARD, Kind.WEIGHT_GRADIENT})


def test_the_work_of_a_problem() -> None:
    x, weight, how = _tensors(2, 3, 2, 1)
    y = aten.convolution(x, weight, None, *how)
    found = problems_of(aten.convolution.default, (x, weight, None, *how))
    found += problems_of(aten.convolution_backward.default, (y, x, weight, None, *how, [True, True, False]))
    bytes_moved = 4.0 * sum(tensor.numel() for tensor in (x, weight, y))
    assert {problem.work for problem in found} == {(2.0 * y.numel() * 2 * 9, bytes_moved)}


def test_what_is_no_problem_of_ours_is_left_to_pytorch() -> None:
    x, weight, how = _tensors(6, 1, 1, 0)
    assert not problems_of(aten.convolution.default, (x[..., ::2], weight, None, *how))  # not dense
    assert not problems_of(aten.convolution.default, (x, weight, None, *how[:3], True, [0, 0], 1))  # transposed
    assert not problems_of(aten.convolution.default, (x[:0], weight, None, *how))
    assert not problems_of(aten.mm.default, (x, weight))


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.down = torch.nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.last = torch.nn.Conv2d(16, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.stem(x).relu())).mean((2, 3))


def _gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _all_by_products(noted: Counter[Problem]) -> None:
    """As if products had won wherever there are some."""
    for problem in noted:
        trial = choice._Trial(problem)
        for way in products.candidates(problem, trial.result):
            choice._table[problem] = Chosen(way, trial.result, 1.0, 2.0)


def test_a_mode_solves_noted_problems_in_their_ways() -> None:
    torch.manual_seed(0)
    model, x = _Net(), torch.randn(4, 1, 12, 12)
    plain = _gradients(model, x)
    mode = ChosenConvolutions(steps=10)
    mode.recording = True
    with mode:
        noted = _gradients(model, x)
    assert all(map(torch.equal, plain, noted)), "recording changes nothing"
    assert len(mode.problems) == 8  # three layers forward, three weights, two inputs
    _all_by_products(mode.problems)
    mode.recording = False
    with mode:
        other = _gradients(model, x)
    torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-4)
    assert not all(map(torch.equal, plain, other)), "another way has other roundings"
    assert choice.way_of(next(iter(mode.problems))) is not None


def test_ways_are_compared_timed_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, how = _tensors(6, 1, 2, 0)
    problems = Counter(problems_of(aten.convolution.default, (x, weight, None, *how)))
    (problem,) = problems
    times = {"theirs": 2.0, "product": 1.0}
    monkeypatch.setattr(
        choice, "_seconds", lambda run, device, count: times["product" if "lambda" in run.__qualname__ else "theirs"]
    )
    report = choice.choose(problems, steps=10)
    assert (report.faster, report.all, report.gained) == ({"product": 1}, 1, 1.0)
    assert "1 of 1 faster by matrix products" in report.explain()
    choice.forget()
    times["product"] = 3.0  # it would lose now: but what is remembered is not timed again
    assert choice.choose(problems, steps=10).faster == {"product": 1}
    torch.testing.assert_close(choice.way_of(problem)(x, weight), aten.convolution(x, weight, None, *how))  # type: ignore[misc]


def test_a_way_that_is_wrong_or_slower_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", "off")
    x, weight, how = _tensors(6, 1, 1, 0)
    problems = Counter(problems_of(aten.convolution.default, (x, weight, None, *how)))
    right = products.Product.__call__
    with monkeypatch.context() as patched:
        patched.setattr(products.Product, "__call__", lambda self, *given: right(self, *given) * 1.01)
        patched.setattr(choice, "_seconds", lambda run, device, count: float("lambda" not in run.__qualname__))
        assert not choice.choose(problems, steps=10).faster
    choice.forget()
    monkeypatch.setattr(choice, "_seconds", lambda run, device, count: 1.0)
    report = choice.choose(problems, steps=10)
    assert not report.faster
    assert "0 of 1 faster in another way" in report.explain()


def test_a_job_spends_no_more_than_it_has_won(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are still to be tried are left to the next job."""
    x, weight, how = _tensors(6, 1, 1, 0)
    problems = Counter(
        problem
        for size in (1, 2, 3)
        for problem in problems_of(aten.convolution.default, (x[:size], weight, None, *how))
    )
    by_products, plans = choice._Trial.by_products, []
    monkeypatch.setattr(
        choice._Trial, "by_products", lambda trial: dataclasses.replace(by_products(trial), is_complete=False)
    )

    def by_plans(trial: choice._Trial, before: Chosen) -> Chosen:
        plans.append(trial.problem)
        return dataclasses.replace(before, is_complete=True)

    monkeypatch.setattr(choice._Trial, "by_plans", by_plans)
    monkeypatch.setattr(choice, "_STAKE", -1.0)
    report = choice.choose(problems, steps=0)
    assert (report.left, plans) == (3, [])
    assert "3 left for the next job" in report.explain()
    choice.forget()  # another process
    monkeypatch.setattr(choice, "_STAKE", 60.0)
    assert choice.choose(problems, steps=0).left == 0
    assert len(plans) == 3
    assert choice.choose(problems, steps=0).left == 0
    assert len(plans) == 3, "what is complete is not tried again"


def test_a_broken_file_is_no_error(tmp_path: Path) -> None:
    x, weight, how = _tensors(6, 1, 1, 0)
    (problem,) = problems = Counter(problems_of(aten.convolution.default, (x, weight, None, *how)))
    choice._file(problem.device).add({problem.key: [["cudnn", 1, "rubbish"], "x"]})
    assert choice.choose(problems, steps=10).all == 1
    assert choice.chosen_for(problem) is not None


def test_the_kernel_of_a_remembered_product_is_loaded_before_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot load kernels."""
    asked = []
    monkeypatch.setattr(products, "_has_patches", lambda device: asked.append(device) is None)
    x, weight, how = _tensors(6, 1, 2, 0)
    (problem,) = problems_of(aten.convolution.default, (x, weight, None, *how))
    result = Form.of(aten.convolution(x, weight, None, *how))
    chosen = choice.Chosen(products.Product(problem, result), result, 1e-6, 1e-5)
    assert choice._remembered(problem, choice._as_data(chosen)) is not None
    assert asked == [problem.device]


def test_a_bias_and_a_mask_are_pytorchs() -> None:
    x, weight, how = _tensors(6, 1, 1, 0)
    bias = torch.randn(5)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *how))
    arguments = gradient, x, weight, [5], *how
    whole = aten.convolution_backward(*arguments, [True, True, True])
    _all_by_products(Counter(problems_of(aten.convolution_backward.default, (*arguments, [True, True, True]))))
    with_bias, without = (problems_of(aten.convolution.default, (x, weight, added, *how)) for added in (bias, None))
    _all_by_products(Counter(with_bias))
    assert choice.way_of(with_bias[0]) is not None
    assert choice.way_of(without[0]) is None
    assert with_bias[0].key != without[0].key
    for mask in itertools.product((True, False), repeat=3):
        for wanted, ours, theirs in zip(mask, convolution_backward(*arguments, list(mask)), whole, strict=True):
            if wanted:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ours = torch.ops.manyhands.convolution(x, weight, bias, *how)
    torch.testing.assert_close(ours, aten.convolution(x, weight, bias, *how), rtol=1e-4, atol=1e-4)


def test_nothing_is_chosen_where_every_run_has_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_choose()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert not may_choose()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.use_deterministic_algorithms(True)
    try:
        assert not may_choose()
    finally:
        torch.use_deterministic_algorithms(False)
