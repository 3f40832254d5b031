"""What `benchmarks/parallel.py` runs: plain functions, and what people write by hand instead of them.

A case has a plain function and its arguments, and as far as they make sense: the same with hand-written streams, as
one batched operation, compiled. All give the same tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from manyhands.training.torch import models

Work = Callable[..., Any]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Case:
    """One row: the plain function, and the other ways to the same results."""

    name: str
    function: Work
    arguments: tuple[Any, ...]
    # Ways that are run as they are, and ways that are captured in a CUDA graph first.
    others: dict[str, Work] = field(default_factory=dict)
    captured: dict[str, Work] = field(default_factory=dict)
    compiled: Callable[[], Work] | None = None
    # What bounds the row from below: timed in the same run, not compared.
    bounds: dict[str, Work] = field(default_factory=dict)
    close: float = 1e-4
    graph: bool = True  # whether the plain function can be captured as it is
    naive: str = "eager"  # what people write first; the table's column "eager" is of it


def _streams(count: int, device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []


def spread(works: Sequence[Callable[[], Any]], streams: Sequence[Any]) -> list[Any]:
    """By hand: each piece of work on the next stream, all behind and before the current one."""
    if not streams:
        return [work() for work in works]
    current = torch.cuda.current_stream()
    results = []
    for stream in streams:
        stream.wait_stream(current)
    for number, work in enumerate(works):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(work())
    for stream in streams:
        current.wait_stream(stream)
    return results


# --- inference


def chains(size: int, device: torch.device, *, count: int = 8, length: int = 50) -> Case:
    """Independent chains of products: nothing to wait for between them."""
    torch.manual_seed(0)
    starts = [torch.randn(size, size, device=device) for _ in range(count)]
    factors = [torch.randn(size, size, device=device) / size**0.5 for _ in range(count)]
    streams = _streams(count, device)

    def one(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(length):
            x = x @ w
        return x

    def plain(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return [one(x, w) for x, w in zip(xs, ws, strict=True)]

    def by_hand(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return spread([lambda x=x, w=w: one(x, w) for x, w in zip(xs, ws, strict=True)], streams)

    def batched(xs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        return list(one(torch.stack(xs), torch.stack(ws)))

    captured = {"streams in a graph": by_hand, "bmm in a graph": batched}
    return Case(f"chains {size}", plain, (starts, factors), captured=captured)


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
    streams = _streams(6, device)

    def plain(x: Tensor) -> Tensor:
        return net(x)

    captured = {"streams in a graph": lambda x: net(x, streams)}
    return Case(f"branchy CNN batch {batch}", plain, (image,), captured=captured, close=2e-2)


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
    streams = _streams(members, device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([cross_entropy(net(x), y) for net in nets]).sum()

    def by_hand(x: Tensor, y: Tensor) -> list[Tensor]:
        steps = [_step_of(lambda x, y, net=net: cross_entropy(net(x), y), list(net.parameters())) for net in nets]
        parts = spread([lambda step=step: step(x, y) for step in steps], streams)
        return [torch.stack([part[0] for part in parts]).sum(), *(one for part in parts for one in part[1:])]

    stacked, buffers = torch.func.stack_module_state(nets)  # type: ignore[arg-type]
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def one_loss(own: Any, rest: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(skeleton, (own, rest), (x,)), y)

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
    parameters = list(net.parameters())
    side = 12 if small else 28
    x = torch.randn(batch, 1, side, side, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return cross_entropy(net(x), y)

    in_graph = _compiled_step(forward, parameters, None)
    captured = {"compile in a graph": in_graph} if device.type == "cuda" else {}
    return Case(
        f"{'small ' if small else ''}ResNet-18 training step, batch {batch}",
        _step_of(forward, parameters),
        (x, y),
        captured=captured,
        compiled=lambda: _compiled_step(forward, parameters, "reduce-overhead"),
        close=5e-2,
    )


# --- copies to and from the host


def products_to_host(device: torch.device, *, size: int = 4000, count: int = 50) -> Case:
    """The book's: products on the GPU, every result to the host."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device=device)
    copying = _streams(1, device)

    def plain(x: Tensor) -> list[Tensor]:
        return [(x @ x).to("cpu") for _ in range(count)]

    def non_blocking(x: Tensor) -> list[Tensor]:
        results = [(x @ x).to("cpu", non_blocking=True) for _ in range(count)]
        synchronize(device)
        return results

    def by_hand(x: Tensor) -> list[Tensor]:
        current = torch.cuda.current_stream()
        results, kept = [], []
        for _ in range(count):
            y = x @ x
            kept.append(y)
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
    lanes = _streams(3, device)

    def work(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = x @ weight
        return x

    def plain(batches: list[Tensor]) -> list[Tensor]:
        return [work(batch.to(device)).to("cpu") for batch in batches]

    def by_hand(batches: list[Tensor]) -> list[Tensor]:
        incoming, computing, outgoing = lanes
        results, kept = [], []
        for batch in batches:
            with torch.cuda.stream(incoming):
                x = batch.to(device, non_blocking=True)
            computing.wait_stream(incoming)
            with torch.cuda.stream(computing):
                y = work(x)
            outgoing.wait_stream(computing)
            with torch.cuda.stream(outgoing):
                results.append(torch.empty(y.shape, pin_memory=True).copy_(y, non_blocking=True))
            kept += [x, y]
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


# --- all of them


def cases(device: torch.device, *, tiny: bool) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names for ``--rows``, and what makes each case (a case is made when its turn comes, and thrown away after)."""
    if tiny:
        yield "chains-16", lambda: chains(16, device, count=3, length=4)
        yield "branchy-1", lambda: branchy(1, device, channels=8, side=6, blocks=2)
        yield "ensemble", lambda: ensemble(device, members=3, width=16, batch=8)
        yield "resnet-4", lambda: resnet(4, device, small=True)
        yield "to-host", lambda: products_to_host(device, size=64, count=4)
        yield "norms", lambda: logged_norms(device, size=10, count=12)
        yield "pipeline", lambda: pipeline(device, size=64, count=3, depth=2)
        return
    for size in (256, 512, 1024):
        yield f"chains-{size}", lambda size=size: chains(size, device)  # type: ignore[misc]
    for batch in (1, 8, 64):
        yield f"branchy-{batch}", lambda batch=batch: branchy(batch, device)  # type: ignore[misc]
    yield "ensemble", lambda: ensemble(device)
    for batch in (64, 256, 512):
        yield f"resnet-{batch}", lambda batch=batch: resnet(batch, device)  # type: ignore[misc]
    yield "to-host", lambda: products_to_host(device)
    yield "norms", lambda: logged_norms(device)
    yield "pipeline", lambda: pipeline(device)
