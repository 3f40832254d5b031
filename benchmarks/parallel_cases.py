"""Rows of `benchmarks/parallel.py`: plain functions, and what people write by hand instead of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from parallel_ways import Case, Work, spread, streams_on, synchronize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from manyhands.book import torch as models

# --- inference


@contextmanager
def tf32() -> Iterator[None]:
    """Products of float32 with ten bits, as much faster."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def chains(size: int, device: torch.device, numbers: str = "", *, count: int = 8, length: int = 50) -> Case:
    """Independent chains of products: nothing to wait for between them. ``numbers`` are float32, "tf32" or "bf16"."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if numbers == "bf16" else torch.float32
    starts = [torch.randn(size, size, device=device).to(dtype) for _ in range(count)]
    factors = [(torch.randn(size, size, device=device) / size**0.5).to(dtype) for _ in range(count)]
    streams = streams_on(count, device)

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(length):
            x = x @ w
        return x

    def plain(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return [chain(x, w) for x, w in zip(xs, ws, strict=True)]

    def by_hand(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return spread([lambda x=x, w=w: chain(x, w) for x, w in zip(xs, ws, strict=True)], streams)

    def batched(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return list(chain(torch.stack(xs), torch.stack(ws)))

    def exact(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return plain([x.double() for x in xs], [w.double() for w in ws])

    case = Case(f"chains {size} {numbers}".strip(), plain, (starts, factors))
    case.captured = {"streams in a graph": by_hand, "bmm in a graph": batched}
    if numbers:  # one batched product may add in another order than eight
        case.exact, case.coarse = exact, torch.bfloat16 if numbers == "bf16" else torch.float16
        case.around = tf32 if numbers == "tf32" else nullcontext
    return case


class Branchy(nn.Module):
    """Blocks of parallel branches of convolutions, added up."""

    def __init__(self, channels: int, blocks: int, branches: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(self._branch(channels, number) for number in range(branches)) for _ in range(blocks)
        )

    @staticmethod
    def _branch(channels: int, number: int) -> nn.Sequential:
        size = (1, 3, 5)[number % 3]
        return nn.Sequential(
            nn.Conv2d(channels, channels // 2, 1),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, size, padding=size // 2),
        )

    def forward(self, x: Tensor, streams: Sequence[Any] = ()) -> Tensor:
        for block in self.blocks:
            total = x
            for part in spread([lambda b=b, x=x: b(x) for b in block], streams):  # type: ignore[attr-defined]
                total = total + part
            x = relu(total)
        return x


def branchy(batch: int, device: torch.device, *, channels: int = 64, side: int = 28, blocks: int = 8) -> Case:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    net = Branchy(channels, blocks, 6).to(device, dtype).eval().requires_grad_(False)
    net = net.to(memory_format=torch.channels_last)
    image = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
    image = image.to(memory_format=torch.channels_last)
    streams = streams_on(6, device)

    def plain(x: Tensor) -> Tensor:
        return net(x)

    wide = copy.deepcopy(net).double()
    return Case(
        f"branchy CNN batch {batch}",
        plain,
        (image,),
        captured={"streams in a graph": lambda x: net(x, streams)},
        close=2e-2,
        exact=lambda x: wide(x.double()),
        coarse=dtype,
    )


# --- training steps


def _step_of(forward: Callable[..., Tensor], parameters: list[nn.Parameter]) -> Work:
    def step(*arguments: Any) -> list[Tensor]:
        loss = forward(*arguments)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


def _compiled_step(forward: Callable[..., Tensor], parameters: list[nn.Parameter], mode: str | None) -> Work:
    """The forward pass compiled, and with it its backward pass."""
    step = _step_of(torch.compile(forward, mode=mode), parameters)

    def marked(*arguments: Any) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*arguments)

    return marked if mode else step


def ensemble(device: torch.device, *, members: int = 8, width: int = 256, batch: int = 128) -> Case:
    """One training step of small nets, each with its own parameters."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        for _ in range(members)
    ]
    nets = [net.to(device) for net in nets]
    parameters = [parameter for net in nets for parameter in net.parameters()]
    x, y = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)
    streams = streams_on(members, device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([cross_entropy(net(x), y) for net in nets]).sum()

    def one_step(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        # Leaves made here: a gradient is gathered on the stream that its leaf was first used on, outside of a capture.
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in net.named_parameters()}
        loss = cross_entropy(torch.func.functional_call(net, leaves, (x,)), y)
        return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))]

    def by_hand(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = spread([lambda net=net: one_step(net, x, y) for net in nets], streams)
        return [torch.stack([part[0] for part in parts]).sum(), *(gradient for part in parts for gradient in part[1:])]

    stacked, buffers = torch.func.stack_module_state(nets)  # type: ignore[arg-type]
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def one_loss(parameters: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(skeleton, (parameters, buffers), (x,)), y)

    def batched(x: Tensor, y: Tensor) -> list[Tensor]:
        losses = torch.vmap(one_loss, in_dims=(0, 0, None, None))(stacked, buffers, x, y)
        grads = torch.autograd.grad(losses.sum(), list(stacked.values()))
        return [losses.detach().sum(), *(grad[number] for number in range(members) for grad in grads)]

    return Case(
        "ensemble of 8, training step",
        _step_of(forward, parameters),
        (x, y),
        captured={"streams in a graph": by_hand, "vmap in a graph": batched},
        compiled=lambda: _compiled_step(forward, parameters, "reduce-overhead"),
    )


def resnet(batch: int, device: torch.device, *, small: bool = False) -> Case:
    """Forward and backward pass of ResNet-18 on Fashion-MNIST's images."""
    torch.manual_seed(0)
    net = (models.small_resnet() if small else models.resnet18()).to(device, memory_format=torch.channels_last).train()
    side = 12 if small else 28
    x = torch.randn(batch, 1, side, side, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def forward_of(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def forward(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                return cross_entropy(net(x), y)

        return forward

    @cache
    def in_graph() -> Work:
        # A net of its own, first used on the stream that is captured: the gradient of a parameter is gathered on the
        # stream of its first use, and the other ways use theirs on the default stream, which a capture cannot join.
        copied = copy.deepcopy(net)
        return _compiled_step(forward_of(copied), list(copied.parameters()), None)

    forward, parameters = forward_of(net), list(net.parameters())
    wide = copy.deepcopy(net).double()
    exact = _step_of(lambda x, y: cross_entropy(wide(x.double()), y), list(wide.parameters()))
    captured = {"compile in a graph": lambda x, y: in_graph()(x, y)} if device.type == "cuda" else {}
    return Case(
        f"{'small ' if small else ''}ResNet-18 training step, batch {batch}",
        _step_of(forward, parameters),
        (x, y),
        captured=captured,
        compiled=lambda: _compiled_step(forward, parameters, "reduce-overhead"),
        close=5e-2,
        exact=exact,
        coarse=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )


# --- all of them


def cases(device: torch.device, *, tiny: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names for ``--rows``, and what makes each case (a case is made when its turn comes, and thrown away after)."""
    if tiny:
        yield "chains-16", lambda: chains(16, device, count=3, length=4)
        yield "chains-16-tf32", lambda: chains(16, device, "tf32", count=3, length=4)
        yield "chains-16-bf16", lambda: chains(16, device, "bf16", count=3, length=4)
        yield "branchy-1", lambda: branchy(1, device, channels=8, side=6, blocks=2)
        yield "ensemble", lambda: ensemble(device, members=3, width=16, batch=8)
        yield "resnet-4", lambda: resnet(4, device, small=True)
        yield "to-host", lambda: products_to_host(device, size=64, count=4)
        yield "norms", lambda: logged_norms(device, size=10, count=12)
        yield "pipeline", lambda: pipeline(device, size=64, count=3, depth=2)
        return
    for size in (256, 512, 1024):
        yield f"chains-{size}", lambda size=size: chains(size, device)  # type: ignore[misc]
    for numbers in ("tf32", "bf16"):
        yield f"chains-256-{numbers}", lambda numbers=numbers: chains(256, device, numbers)  # type: ignore[misc]
    for batch in (1, 8, 64):
        yield f"branchy-{batch}", lambda batch=batch: branchy(batch, device)  # type: ignore[misc]
    yield "ensemble", lambda: ensemble(device)
    for batch in (64, 256, 512):
        yield f"resnet-{batch}", lambda batch=batch: resnet(batch, device)  # type: ignore[misc]
    yield "to-host", lambda: products_to_host(device)
    yield "norms", lambda: logged_norms(device)
    yield "pipeline", lambda: pipeline(device)


def products_to_host(device: torch.device, *, size: int = 4000, count: int = 50) -> Case:
    """The book's: products on the GPU, every result to the host."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device=device)
    copying = streams_on(1, device)

    def plain(x: Tensor) -> list[Tensor]:
        return [(x @ x).to("cpu") for _ in range(count)]

    def non_blocking(x: Tensor) -> list[Tensor]:
        results = [(x @ x).to("cpu", non_blocking=True) for _ in range(count)]
        synchronize(device)
        return results

    def by_hand(x: Tensor) -> list[Tensor]:
        current = torch.cuda.current_stream()
        results, alive = [], []
        for _ in range(count):
            y = x @ x
            alive.append(y)
            copying[0].wait_stream(current)
            with torch.cuda.stream(copying[0]):
                results.append(torch.empty(y.shape, pin_memory=True).copy_(y, non_blocking=True))
        copying[0].synchronize()
        return results

    others = {"non_blocking, as in the book": non_blocking}
    bounds: dict[str, Work] = {"compute alone": lambda x: [x @ x for _ in range(count)][-1]}
    if device.type == "cuda":
        others["copy stream by hand"] = by_hand
        pinned = torch.empty(size, size, pin_memory=True)
        bounds["copies alone"] = lambda x: [pinned.copy_(x, non_blocking=True) for _ in range(count)][-1]
    name = f"{count} products {size}x{size} to the host"
    return Case(name, plain, (x,), others=others, bounds=bounds, graph=False)


def logged_norms(device: torch.device, *, size: int = 100, count: int = 1000) -> Case:
    """Small products, the norm of each wanted on the host."""
    torch.manual_seed(0)
    left, right = torch.randn(count, size, size, device=device), torch.randn(count, size, size, device=device)

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([(a[i] @ b[i]).norm() for i in range(count)]).to("cpu")

    def item_each(a: Tensor, b: Tensor) -> Tensor:
        return torch.tensor([(a[i] @ b[i]).norm().item() for i in range(count)])

    def batched(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b).flatten(1).norm(dim=1).to("cpu")

    others = {".item() each": item_each, "bmm": batched}
    name = f"{count} products {size}x{size}, norms"
    return Case(name, plain, (left, right), others=others, graph=False, naive=".item() each")


def pipeline(device: torch.device, *, size: int = 2048, count: int = 16, depth: int = 6) -> Case:
    """Batches from the host, work on each, results to the host: three stages that can overlap."""
    torch.manual_seed(0)
    pin = device.type == "cuda"
    batches = [torch.randn(size, size, pin_memory=pin) for _ in range(count)]
    weight = torch.randn(size, size, device=device) / size**0.5
    lanes = streams_on(3, device)

    def work(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = x @ weight
        return x

    def plain(batches: list[Tensor]) -> list[Tensor]:
        return [work(batch.to(device)).to("cpu") for batch in batches]

    def by_hand(batches: list[Tensor]) -> list[Tensor]:
        incoming, computing, outgoing = lanes
        results, alive = [], []
        for batch in batches:
            with torch.cuda.stream(incoming):
                x = batch.to(device, non_blocking=True)
            computing.wait_stream(incoming)
            with torch.cuda.stream(computing):
                y = work(x)
            outgoing.wait_stream(computing)
            with torch.cuda.stream(outgoing):
                results.append(torch.empty(y.shape, pin_memory=True).copy_(y, non_blocking=True))
            alive += [x, y]
        outgoing.synchronize()
        return results

    case = Case(f"pipeline of {count} batches {size}x{size}", plain, (batches,), graph=False)
    if device.type == "cuda":
        there = [batch.to(device) for batch in batches]
        pinned = torch.empty(size, size, pin_memory=True)
        case.others["streams by hand"] = by_hand
        case.bounds = {
            "to the device alone": lambda batches: [there[0].copy_(b, non_blocking=True) for b in batches][-1],
            "compute alone": lambda batches: [work(x) for x in there[1:]] + [work(there[1])],
            "to the host alone": lambda batches: [pinned.copy_(there[1], non_blocking=True) for _ in batches][-1],
        }
    return case
