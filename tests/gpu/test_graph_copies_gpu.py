"""Copies inside of a captured run: arguments from anywhere, results to memory of the caller's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, Forced, assert_same, graph_run_of  # noqa: E402

from manyhands.backends.torch.run import copies as graph_copies  # noqa: E402
from manyhands.errors import CannotCompile  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402


def of_all_kinds(x: Any, y: Any) -> list[Any]:
    """Results of many number types and sizes, in whole words and not, at round addresses and not."""
    total = x @ y
    flat = total.flatten()
    return [
        total,
        total > 0,
        total.sum(),
        flat.half()[1:],
        (flat * 100).to(torch.int8)[3:10],
        (flat * 2)[1:],
        total.double().t(),
        torch.complex(x, y),
        (x * 3)[:0],
        flat.to(torch.int64)[:5],
    ]


def arguments(number: int, offset: int = 0) -> list[Any]:
    """Two matrices, somewhere else for each number; ``offset`` moves them off a round address."""
    made = torch.Generator(GPU).manual_seed(number)
    memories = [torch.randn(33 * 33 + offset, device=GPU, generator=made) for _ in range(2)]
    return [memory[offset:].view(33, 33) for memory in memories]


def copies_of(forced: Forced) -> tuple[bool, bool]:
    """Whether the graph copies its arguments, and its results, itself."""
    captured = forced.made[1]._graph
    return captured.copies_in is not None, captured.copies_out is not None


def copies_beside_calls(inputs: list[Any]) -> tuple[bool, bool]:
    """Who copies in calls one after the other, whose results are looked at when all have been made."""
    fast = Forced(of_all_kinds, 4, "graph")
    results = [fast(*value) for value in inputs]
    for result, value in zip(results, inputs, strict=True):
        assert_same(result, of_all_kinds(*value))
    return copies_of(fast)


def with_gaps(x: Any, y: Any) -> list[Any]:
    total = x @ y
    return [total[:, ::2], total.half()[3:7, 5], total.sum(0).expand(3, 33), total + 1]


def test_results_with_gaps_are_copied_by_the_graph() -> None:
    fast = Forced(with_gaps, 2, "graph")
    inputs = [arguments(number) for number in range(50)]
    results = [fast(*value) for value in inputs]
    for result, value in zip(results, inputs, strict=True):
        assert all(map(torch.equal, result, with_gaps(*value)))  # values alone: the caller's are without gaps
    assert copies_of(fast) == (True, True)


@pytest.mark.parametrize("offset", [0, 1])
def test_every_call_has_results_of_its_own(offset: int) -> None:
    """Nothing is waited for: a replay under way keeps the addresses that it was launched with."""
    assert copies_beside_calls([arguments(number, offset) for number in range(200)]) == (True, True)


def test_arguments_that_stay_and_results_that_do_not() -> None:
    fast = Forced(of_all_kinds, 4, "graph")
    x, y = arguments(0)
    expected = of_all_kinds(x, y)
    results = [fast(x, y) for _ in range(64)]
    for result in results:
        assert_same(result, expected)
    memories = {result[0].data_ptr() for result in results}
    assert len(memories) == len(results)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x * number for number in range(500)],  # more than a kernel takes
        lambda x, y: (lambda z: [z, z.t(), z[1:]])(x @ y),  # that share memory
        lambda x, y: [x @ y, 3, (x * 2).conj(), torch.complex(x, y).conj()],
    ],
    ids=["many", "sharing", "numbers"],
)
def test_results_that_the_graph_does_not_copy_itself(function: Any) -> None:
    fast = Forced(function, 2, "graph")
    inputs = [arguments(number) for number in range(5)]
    results = [fast(*value) for value in inputs]
    for result, value in zip(results, inputs, strict=True):
        for a, b in zip(result, function(*value), strict=True):  # copies of results with gaps have none
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
    assert not copies_of(fast)[1]


def test_arguments_with_gaps_are_copied_before_the_graph() -> None:
    fast = Forced(lambda x: x @ x, 1, "graph")
    for number in range(5):
        x = torch.randn(64, 128, device=GPU, generator=torch.Generator(GPU).manual_seed(number))[:, ::2]
        assert_same(fast(x), x @ x)
    assert not copies_of(fast)[0]


def test_large_results_and_channels_last() -> None:
    """Many blocks for one result, and an order of numbers that is not that of the dimensions."""

    def function(x: Any) -> Any:
        return x * 2, (x[:1] + 1).sin()

    fast = Forced(function, 2, "graph")
    for size in (3, 4):
        x = torch.randn(16, 64, 257, 128 + size, device=GPU).to(memory_format=torch.channels_last)
        fast.made = None
        assert_same(fast(x), function(x))
        assert copies_of(fast) == (True, True)


def test_a_thread_that_has_never_used_the_gpu() -> None:
    fast = Forced(of_all_kinds, 4, "graph")
    fast(*arguments(0))
    run = fast.made[1]
    for number in range(3):  # a new one may have the number of one that is gone
        inputs = arguments(number)
        results: list[Any] = []
        thread = threading.Thread(target=lambda given=inputs, found=results: found.append(run.replay(given)))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert_same(results[0], of_all_kinds(*inputs))


def test_on_several_streams_of_the_caller() -> None:
    fast = Forced(of_all_kinds, 4, "graph")
    inputs = [arguments(number) for number in range(30)]
    fast(*inputs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    results = []
    for number, value in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            results.append(fast(*value))
    torch.cuda.synchronize()
    for result, value in zip(results, inputs, strict=True):
        assert_same(result, of_all_kinds(*value))


def test_without_a_compiler_pytorch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise CannotCompile("the library is not there")

    monkeypatch.setattr(graph_copies, "compile_file", refused)
    assert copies_beside_calls([arguments(number) for number in range(20)]) == (False, False)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_result_that_is_there_twice_is_one_tensor(lanes: int) -> None:
    """A gradient that is given back, too: who changes it in place changes the parameter's."""
    net = torch.nn.Linear(33, 33, device=GPU)

    def function(x: Any, y: Any) -> Any:
        net.zero_grad(set_to_none=True)
        loss = (net(x) * y).square().mean()
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in net.parameters()]

    fast = Forced(function, lanes, "graph")
    before = None
    for number in range(5):
        _, gradients = fast(*arguments(number))
        assert all(gradient is parameter.grad for gradient, parameter in zip(gradients, net.parameters(), strict=True))
        assert before is None or before[0].data_ptr() != gradients[0].data_ptr()
        before = gradients
        results = [gradient.clone() for gradient in gradients]
        assert_same(results, function(*arguments(number))[1])
    assert copies_of(fast) == (True, False)


def test_no_memory_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has run by then, so that plain execution can, whatever the function writes to."""
    weight = torch.randn(33, 33, device=GPU)
    plain = weight.clone()

    def step(weight: Any, x: Any) -> Any:
        weight.sub_(0.01 * x)
        return weight @ x, weight.sum()

    fast = Parallel(lambda x: step(weight, x), pure=True)
    for number in range(6):
        x, _ = arguments(number)
        if number == 3:
            run = graph_run_of(fast)

            def none_left() -> Any:
                raise torch.OutOfMemoryError("none left")

            monkeypatch.setattr(run, "_fresh", none_left)
        assert_same(fast(x), step(plain, x))
        assert torch.equal(weight, plain)
    assert "ran out of memory" in fast.explain()
