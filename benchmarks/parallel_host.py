"""Rows of `benchmarks/parallel.py` that copy to and from the host."""

from __future__ import annotations

import torch
from parallel_case import Case, Work, streams_on, synchronize
from torch import Tensor


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
