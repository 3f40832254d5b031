"""Kernels of our own against PyTorch's operations, on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch.kernels import batch_norm as kernels  # noqa: E402

aten = torch.ops.aten
SHAPES = [
    (256, 64, 28, 28), (256, 512, 4, 4), (3, 24, 5, 7), (2, 8, 1, 1), (7, 1000, 3, 3), (4096, 64), (2, 16, 3, 4, 5),
    (3, 8000, 2, 2), (129, 8, 31, 33), (96, 64, 28, 28), (96, 64, 56, 56),
]  # fmt: skip
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # one bit, where two roundings fall apart


def layer(shape: tuple[int, ...], dtype: Any, *, shift: float = 3.0) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)

    def numbers() -> Any:
        made = torch.randn(shape, device=device).movedim(1, -1).contiguous().movedim(-1, 1)
        return made.to(dtype)

    count = shape[1]
    return {
        "x": numbers() * 2 + shift,
        "gradient": numbers(),
        "added": numbers(),
        "weight": torch.rand(count, device=device) + 0.5,
        "bias": torch.randn(count, device=device) / 2,
        "mean": torch.randn(count, device=device),
        "variance": torch.rand(count, device=device) + 0.5,
    }


def statistics(x: Any, running_mean: Any, running_variance: Any, momentum: float, epsilon: float) -> tuple[Any, Any]:
    mean, rstd = kernels.per_channel(x, running_mean), kernels.per_channel(x, running_mean)
    running = running_mean, running_variance, momentum, epsilon
    kernels.forward_(None, mean, rstd, x, *running, None, None, None, False)
    return mean, rstd


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_statistics(shape: tuple[int, ...], dtype: Any, shift: float) -> None:
    """Against float64, also where numbers are far from zero: squares must not eat the digits."""
    one = layer(shape, dtype, shift=shift)
    running = one["mean"].clone(), one["variance"].clone()
    assert kernels.fits(one["x"], one["weight"], one["bias"], *running)
    mean, rstd = statistics(one["x"], *running, 0.1, 1e-5)
    wide = one["x"].double().movedim(1, -1).reshape(-1, shape[1])
    torch.testing.assert_close(mean, wide.mean(0).float(), rtol=1e-5, atol=1e-5)
    variance = wide.var(0, unbiased=False)
    torch.testing.assert_close(rstd, (variance + 1e-5).rsqrt().float(), rtol=1e-4, atol=1e-5)
    expected = one["mean"].double() * 0.9 + wide.mean(0) * 0.1, one["variance"].double() * 0.9 + wide.var(0) * 0.1
    for ours, theirs in zip(running, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)
    repeated = statistics(one["x"], None, None, 0.1, 1e-5)
    assert torch.equal(repeated[0], mean), "the order of additions has changed"
    assert torch.equal(repeated[1], rstd)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(bad: float) -> None:
    """Mean and rstd of its channel are none, and the running variance is none, as in PyTorch; others are."""
    one = layer((64, 8, 6, 6), torch.float32)
    one["x"][33, 2, 3, 3] = bad
    running = one["mean"].clone(), one["variance"].clone()
    _, rstd = statistics(one["x"], *running, 0.1, 1e-5)
    expected = torch.zeros(8, dtype=torch.bool, device=rstd.device)
    expected[2] = True
    assert torch.equal(rstd.isnan(), expected)
    assert torch.equal(running[1].isnan(), expected)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape: tuple[int, ...], dtype: Any, added: bool, relu: bool) -> None:
    one = layer(shape, dtype)
    x, weight, bias = one["x"], one["weight"], one["bias"]
    shortcut = one["added"] if added else None
    plain, mean, rstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    plain = plain + shortcut if added else plain
    plain = torch.relu(plain) if relu else plain
    ours = torch.full_like(x, float("nan"))
    kernels.apply_(ours, x, mean, rstd, weight, bias, shortcut, relu)
    torch.testing.assert_close(ours, plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    let_through = aten.threshold_backward(one["gradient"], ours, 0) if relu else one["gradient"]
    expected = aten.native_batch_norm_backward(
        let_through.double(), x.double(), weight.double(), None, None, mean.double(), rstd.double(), True, 1e-5,
        [True, True, True],
    )  # fmt: skip
    zeros = torch.zeros_like(x)
    results = [ours] if added or not relu else [ours, None]  # from the result, or made again
    for result in results:
        for kept in (None, torch.full_like(x, float("nan"))) if relu else (None,):
            for more in (None, zeros) if relu else (None,):
                found = kernels.backward(one["gradient"], more, x, mean, rstd, weight, bias, result, relu, kept)
                for got, wanted in zip(found, expected, strict=True):
                    scale = float(wanted.abs().max()) + 1e-3
                    torch.testing.assert_close(got.double() / scale, wanted / scale, rtol=0, atol=CLOSE[dtype])
                if kept is not None:
                    assert torch.equal(kept, let_through)


def in_one(one: dict[str, Any], shortcut: Any, relu: bool, *, momentum: float = 0.1) -> list[Any]:
    """Result, mean, rstd and running statistics of the operation that does it all."""
    made = [torch.full_like(one["x"], float("nan")), torch.empty_like(one["mean"]), torch.empty_like(one["mean"])]
    running = [one["mean"].clone(), one["variance"].clone()]
    kernels.forward_(*made, one["x"], *running, momentum, 1e-5, one["weight"], one["bias"], shortcut, relu)
    return made + running


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_kernel_does_what_two_do(
    shape: tuple[int, ...], dtype: Any, added: bool, relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; and so it is where the blocks cannot run at the same time, and there are two kernels after all."""
    one = layer(shape, dtype)
    shortcut = one["added"] if added else None
    running = [one["mean"].clone(), one["variance"].clone()]
    mean, rstd = statistics(one["x"], *running, 0.1, 1e-5)
    y = torch.full_like(one["x"], float("nan"))
    kernels.apply_(y, one["x"], mean, rstd, one["weight"], one["bias"], shortcut, relu)
    expected = [y, mean, rstd, *running]
    assert all(map(torch.equal, in_one(one, shortcut, relu), expected))
    monkeypatch.setattr(kernels, "_run_together", lambda *_: False)
    assert all(map(torch.equal, in_one(one, shortcut, relu), expected))


@pytest.mark.parametrize("shape", [(256, 512, 4, 4), (256, 64, 28, 28), (7, 1000, 3, 3)], ids=str)
def test_in_a_graph(shape: tuple[int, ...]) -> None:
    """Captured, and replayed many times: blocks that wait for each other find their counters as they left them."""
    one = layer(shape, torch.bfloat16)

    def step() -> list[Any]:
        y, mean, rstd, *running = in_one(one, one["added"], True)
        kept = torch.empty_like(y)
        normal = one["x"], mean, rstd, one["weight"], one["bias"]
        return [y, *running, kept, *kernels.backward(one["gradient"], one["added"], *normal, y, True, kept)]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(25):
        for tensor in result:
            tensor.zero_()
        graph.replay()
        assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_whose_blocks_wait_run_beside_others(captured: bool) -> None:
    """Two streams of them, and one of products that fill the GPU: all come to an end, and to the same results."""
    layers = [layer(shape, torch.bfloat16) for shape in ((256, 64, 28, 28), (256, 512, 4, 4))]
    expected = [in_one(value, None, True) for value in layers]
    streams = [torch.cuda.Stream() for _ in range(3)]
    full = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def work() -> list[list[Any]]:
        results, main = [], torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for _ in range(8):
            with torch.cuda.stream(streams[2]):
                full @ full
            for value, stream in zip(layers, streams, strict=False):
                with torch.cuda.stream(stream):
                    results.append(in_one(value, None, True))
        for stream in streams:
            main.wait_stream(stream)
        return results

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = work()
        for _ in range(5):
            graph.replay()
    else:
        result = work()
    torch.cuda.synchronize()
    for number, results in enumerate(result):
        assert all(map(torch.equal, results, expected[number % 2]))


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_a_gradient_that_is_a_sum(dtype: Any) -> None:
    one = layer((16, 64, 9, 9), dtype)
    x, weight, bias = one["x"], one["weight"], one["bias"]
    mean, rstd = statistics(x, None, None, 0.1, 1e-5)
    result = torch.empty_like(x)
    kernels.apply_(result, x, mean, rstd, weight, bias, None, True)
    both = one["gradient"] + one["added"]
    for given in (None, result):
        kept = torch.empty_like(x)
        sums = kernels.backward(one["gradient"], one["added"], x, mean, rstd, weight, bias, given, True, kept)
        plain = kernels.backward(both, None, x, mean, rstd, weight, bias, given, True, None)
        assert torch.equal(kept, aten.threshold_backward(both, result, 0))
        repeated = torch.empty_like(kept)
        halves = kernels.reduce_(repeated, one["gradient"], one["added"], x, mean, rstd, weight, bias, given)
        for_x = kernels.input_gradient(repeated, x, mean, rstd, weight, *halves)
        assert all(map(torch.equal, (repeated, for_x, *halves), (kept, *sums)))
        for ours, theirs in zip(sums, plain, strict=True):
            assert torch.equal(ours, theirs)


def test_without_weight_and_bias() -> None:
    one = layer((8, 16, 4, 4), torch.bfloat16)
    mean, rstd = statistics(one["x"], None, None, 0.1, 1e-5)
    result = torch.empty_like(one["x"])
    kernels.apply_(result, one["x"], mean, rstd, None, None, None, False)
    plain = aten.native_batch_norm(one["x"], None, None, None, None, True, 0.1, 1e-5)[0]
    torch.testing.assert_close(result, plain, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.contiguous(),  # channels apart
        lambda x: x.double(),
        lambda x: x[:, :, :2],  # rows that do not follow each other
        lambda x: x[:, :4].movedim(1, -1).contiguous().movedim(-1, 1),  # half a vector
    ],
    ids=["channels apart", "float64", "a part of it", "four channels"],
)
def test_what_does_not_fit(spoil: Callable[[Any], Any]) -> None:
    assert not kernels.fits(spoil(layer((4, 16, 4, 4), torch.bfloat16)["x"]))


def test_memory_that_begins_in_between_does_not_fit() -> None:
    """Sixteen bytes are read at once: from an address that they divide, whatever the storage says of its beginning."""
    numbers = torch.zeros(8 * 16 + 1, dtype=torch.bfloat16, device="cuda")
    moved = torch.from_dlpack(torch.utils.dlpack.to_dlpack(numbers[1:])).view(8, 16)
    assert not kernels.fits(moved)
    assert kernels.fits(moved.clone())


def test_weights_on_another_device_do_not_fit() -> None:
    one = layer((4, 16, 4, 4), torch.bfloat16)
    assert not kernels.fits(one["x"], one["weight"].cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(256, 128, 14, 14), (3, 8, 5, 7), (2, 1000, 1, 3), (64, 512, 4, 4), (100, 64)], ids=str
)
def test_channel_sums(shape: tuple[int, ...], dtype: Any) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    exact = x.double().movedim(1, 0).flatten(1).sum(1)
    result = kernels.channel_sums(x)
    assert result.dtype is dtype
    off = (result.double() - exact).abs().max() / exact.abs().max()
    assert float(off) <= max(2 * torch.finfo(dtype).eps, 1e-5)
    assert torch.equal(result, kernels.channel_sums(x))
