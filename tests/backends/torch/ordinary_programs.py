"""Ordinary programs around a parallel function: what people write first.

Each takes ``make``, which makes its function a parallel one (or leaves it as it is), and returns all that it leaves
behind: results, state, errors, what it wrote down, the next random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from support import at_once
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
X = torch.arange(24.0).reshape(6, 4) / 10
Y = torch.tensor([0, 1, 0, 1, 1, 0])


def error_of(run: Callable[[], Any]) -> Any:
    """What it gives, or the kind of its error."""
    try:
        return run()
    except Exception as error:
        return type(error).__name__


def _net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return net


def _state(net: nn.Module) -> list[Any]:
    return [value.detach().clone() for value in net.state_dict().values()]


def loop_over_a_loader(make: Make) -> Any:
    """The last batch is shorter; BatchNorm's statistics and dropout's draws go on."""
    net = _net(nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.25))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = make(step)
    data = TensorDataset(torch.cat([X, X[:5] + 1]), torch.cat([Y, Y[:5]]))
    losses = [fast(x, y) for _ in range(4) for x, y in DataLoader(data, batch_size=4, shuffle=True)]
    net.eval()
    return losses, _state(net), net(X), torch.rand(2)


def model_called_in_a_loop(make: Make) -> Any:
    """The model alone is parallel; loss, backward pass and update are the user's; training and evaluation alternate."""
    net = _net(nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    fast = make(net)
    losses = []
    for number in range(6):
        net.train(number % 3 != 2)
        optimizer.zero_grad()
        loss = functional.cross_entropy(fast(X + number), Y)
        loss.backward()
        if net.training:
            optimizer.step()
        losses.append(loss.item())
    return losses, _state(net), [parameter.grad for parameter in net.parameters()], torch.rand(2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Result:
    pair: Pair
    shape: torch.Size
    same: bool


def structured_results(make: Make) -> Any:
    def function(pair: Pair, options: dict[str, bool]) -> Result:
        left = pair.left.relu() if options.get("relu") else pair.left
        return Result(Pair(left @ left.t(), pair.right), left.shape, pair.left is pair.right)

    fast, found = make(function), []
    for options in ({}, {"relu": True}, {"relu": False}):
        for pair in (Pair(X - 1, X), Pair(X, X)):
            result = fast(pair, options)
            found += [tuple(result.pair), tuple(result.shape), result.same, result.pair.right is pair.right]
    return found


def updates_in_place(make: Make) -> Any:
    total, seen = torch.zeros(4), torch.zeros((), dtype=torch.int64)

    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        seen.add_(1)
        out[1:3].mul_(2)
        out[0] = total
        return out

    fast, outs = make(function), [torch.ones(6, 4) for _ in range(5)]
    results = [fast(X, out) for out in outs]
    return results, outs, [one is two for one, two in zip(results, outs, strict=True)], total, seen


def shared_memory(make: Make) -> Any:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    fast, found = make(function), []
    for number in range(4):
        base = X.clone()
        pair = [(base, base), (base[:3], base[3:]), (base[:4], base[2:]), (base, X)][number]
        found += [fast(*pair), base.clone(), fast(*pair), base]
    return found


def errors_and_after(make: Make) -> Any:
    seen: list[str] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        try:
            y = x @ w
        except RuntimeError:
            seen.append("no product")
            raise ValueError("shapes") from None
        finally:
            seen.append("done")
        if y.sum() > 100:
            raise OverflowError("too large")
        return y

    fast = make(function)
    calls = [(X, torch.eye(4)), (X, torch.eye(3)), (X * 100, torch.eye(4)), (X, torch.eye(4)), (X, X)]
    return [error_of(lambda pair=pair: fast(*pair)) for pair in [*calls, *calls]], seen


def autocast_toggles(make: Make) -> Any:
    net = _net(nn.GELU())
    fast, found = make(net), []
    for _ in range(2):
        found.append(fast(X).detach())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(fast(X).detach().float())
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            found.append(fast(X).float())
    return found


def scheduler_and_checkpoint(make: Make) -> Any:
    net = _net(nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    fast = make(step)
    saved: Any = None
    losses = []
    for number in range(8):
        losses.append(fast(X, Y).item())
        scheduler.step()
        if number == 3:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    losses += [fast(X, Y).item() for _ in range(3)]
    return losses, _state(net), optimizer.state_dict()["param_groups"][0]["lr"]


def several_threads(make: Make) -> Any:
    net = _net(nn.ReLU()).requires_grad_(False)
    fast = make(net)
    return at_once(lambda number: [fast(X + number) for _ in range(10)], 4)


def many_kinds_of_calls(make: Make) -> Any:
    """More than Dynamo's limit of captures."""

    def function(x: torch.Tensor, number: int, word: str) -> Any:
        return x * number + len(word), number

    fast = make(function)
    return [fast(X[: 1 + number % 5], number, "w" * (number % 3)) for number in range(24)]


def sizes_that_change(make: Make) -> Any:
    net = _net(nn.LayerNorm(4), nn.ReLU())
    fast, found = make(net), []
    for rows in (6, 3, 1, 2, 5, 0, 4, 6, 3, 3, 3, 3):
        y = fast(X[:rows])
        y.sum().backward()
        found.append(y.detach())
    return found, [parameter.grad for parameter in net.parameters()]


def hooks(make: Make) -> Any:
    net, seen = _net(nn.ReLU()), list[Any]()
    fast = make(net)
    fast(X)
    handle = net[0].register_forward_hook(lambda module, inputs, output: seen.append("forward") or output * 2)
    found = [fast(X).detach(), fast(X).detach()]
    handle.remove()
    found.append(fast(X).detach())
    net[2].weight.register_hook(lambda gradient: seen.append("gradient") or gradient * 3)
    fast(X).sum().backward()
    return found, seen, net[2].weight.grad


def printing_and_counting(make: Make) -> Any:
    lines: list[str] = []
    totals = {"calls": 0, "sum": 0.0}

    def function(x: torch.Tensor) -> torch.Tensor:
        totals["calls"] += 1
        y = x @ x.t()
        totals["sum"] += y.sum().item()
        lines.append(f"{y.mean():.3f}")
        for row in y.unbind():
            if row[0] > 2:
                break
            y = y + row
        return y

    fast = make(function)
    return [fast(X + number) for number in range(4)], lines, totals


def results_are_kept(make: Make) -> Any:
    """The caller owns results: a later call does not change them, and they may be written to."""

    def function(x: torch.Tensor) -> Any:
        y = x.exp()
        return y, y[0], y.t()

    fast = make(function)
    kept = [fast(X + number) for number in range(4)]
    kept[0][0].zero_()
    return kept, [one[0].data_ptr() == one[1].data_ptr() for one in kept], [one[2].stride() for one in kept]


def two_forward_passes_first(make: Make) -> Any:
    """Tensors that the first pass saved are needed after the second one."""
    net = _net(nn.Tanh())
    fast, found = make(net), []
    for number in range(4):
        one, other = fast(X + number), fast(X - number)
        (one * other.detach()).sum().backward()
        other.sum().backward()
        found += [one.detach(), other.detach()]
    return found, [parameter.grad for parameter in net.parameters()]


def devices_and_dtypes(make: Make) -> Any:
    def function(x: torch.Tensor) -> Any:
        y = x.to(torch.float64).cumsum(0).to("cpu")
        return y, (x > 1).long().bincount() if x.dim() == 1 else x.argmax(1), x.numpy().sum().item()

    fast = make(function)
    return [fast(x) for x in (X, X[:2], X[0], X.half().float(), X) for _ in range(2)]


def what_is_put_elsewhere(make: Make) -> Any:
    """Sums are left in an attribute, a list, a dict, a tensor's attribute and a gradient."""
    net, found, table = nn.Linear(4, 4), list[Any](), dict[str, Any]()
    weight = nn.Parameter(torch.ones(4))

    def function(x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * x.scale
        net.last, table["last"], weight.grad = total, total * 2, x[0] * total
        found.append(total)
        x.seen = total + 1
        return total

    fast, kept = make(function), list[Any]()
    for number in range(4):
        x = X + number
        x.scale = 1.0 + number
        kept += [fast(x), x.seen, net.last.clone(), table["last"].clone(), weight.grad.clone()]
    return kept, found


def results_that_get_gradients(make: Make) -> Any:
    def function(x: torch.Tensor) -> Any:
        return (x * 2).requires_grad_(), nn.Parameter(x + 1), isinstance(x, nn.Parameter)

    fast, found = make(function), list[Any]()
    for x in (X, nn.Parameter(X.clone(), requires_grad=False), X[1:], X):
        result, parameter, is_parameter = fast(x)
        (result * parameter).sum().backward()
        found += [result.grad, parameter.grad, type(parameter).__name__, is_parameter, result.is_leaf]
    return found


def gradients_through_one_result(make: Make) -> Any:
    """Passes through different results do not disturb each other; a second one is refused."""
    weight = nn.Parameter(torch.eye(4))

    def function(x: torch.Tensor) -> Any:
        y = (x @ weight).tanh()
        return y.sum(), (y * y).sum()

    fast, found = make(function), list[Any]()
    for _ in range(3):
        one, _ = fast(X)
        _, other = fast(X + 1)
        one.backward()
        other.backward()
        found += [weight.grad.clone(), error_of(one.backward)]  # type: ignore[union-attr]
    return found


PROGRAMS: list[Callable[[Make], Any]] = [
    loop_over_a_loader,
    model_called_in_a_loop,
    structured_results,
    updates_in_place,
    shared_memory,
    errors_and_after,
    autocast_toggles,
    scheduler_and_checkpoint,
    several_threads,
    many_kinds_of_calls,
    sizes_that_change,
    hooks,
    printing_and_counting,
    results_are_kept,
    two_forward_passes_first,
    devices_and_dtypes,
    what_is_put_elsewhere,
    results_that_get_gradients,
    gradients_through_one_result,
]
