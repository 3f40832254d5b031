"""``torch.compile(model, backend="manyhands")`` on a GPU: what the forward graph keeps for the backward graph.

Kept tensors lie in the memory of the forward pass's CUDA graph. Whatever order a program calls its passes in, its
gradients are those of plain execution.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch.dynamo import backend  # noqa: E402

pytestmark = pytest.mark.usefixtures("whole_float32")
nn = torch.nn
DEVICE = "cuda:0"


class Branchy(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(4))
        self.out = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).relu()
        return self.out(sum(branch(x).relu() for branch in self.branches).mean((2, 3)))


def batch(seed: int, size: int = 16) -> Any:
    return torch.randn(size, 3, 16, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def nets() -> tuple[Any, Any, Callable[..., Any]]:
    """A net, its twin, and the twin compiled and planned (three steps)."""
    torch.manual_seed(0)
    plain = Branchy().to(DEVICE)
    twin = copy.deepcopy(plain)
    fast = torch.compile(twin, backend=mh.compile_backend, options={"fuse": False})
    for number in range(3):
        for call in (plain, fast):
            call(batch(number)).square().mean().backward()
    return plain, twin, fast


def assert_same(plain: Any, twin: Any) -> None:
    for (name, one), other in zip(plain.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for one, other in zip(plain.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def two_forwards_then_two_backwards(call: Callable[..., Any]) -> None:
    first, second = call(batch(10)), call(batch(11))
    first.square().mean().backward()
    second.abs().mean().backward()


def backwards_in_the_other_order(call: Callable[..., Any]) -> None:
    first, second = call(batch(10)), call(batch(11))
    second.square().mean().backward()
    first.abs().mean().backward()


def a_retained_graph(call: Callable[..., Any]) -> None:
    loss = call(batch(10)).square().mean()
    loss.backward(retain_graph=True)
    call(batch(11)).square().mean().backward()
    loss.backward()


def a_forward_that_nobody_uses(call: Callable[..., Any]) -> None:
    call(batch(12))
    call(batch(13))
    call(batch(10)).square().mean().backward()


def a_result_that_is_kept(call: Callable[..., Any]) -> None:
    first = call(batch(10))
    value = first.detach()
    first.square().mean().backward()
    call(batch(11)).sub(value).square().mean().backward()


def another_batch_size(call: Callable[..., Any]) -> None:
    for size in (16, 5, 16, 5):
        call(batch(size, size)).square().mean().backward()


def one_sum_of_both(call: Callable[..., Any]) -> None:
    (call(batch(10)) * call(batch(11))).mean().backward()


PROGRAMS = [
    two_forwards_then_two_backwards,
    backwards_in_the_other_order,
    a_retained_graph,
    a_forward_that_nobody_uses,
    a_result_that_is_kept,
    another_batch_size,
    one_sum_of_both,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_in_any_order_of_passes(program: Callable[..., Any]) -> None:
    plain, twin, fast = nets()
    for _ in range(2):
        for call in (plain, fast):
            program(call)
        assert_same(plain, twin)


def test_weights_that_are_moved_elsewhere() -> None:
    plain, twin, fast = nets()
    state = {key: value * 0.5 for key, value in plain.state_dict().items()}
    for net in (plain, twin):
        net.load_state_dict(state)
    for call in (plain, fast):
        call(batch(10)).square().mean().backward()
    for net in (plain, twin):
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    for call in (plain, fast):
        call(batch(11)).square().mean().backward()
    assert_same(plain, twin)


def test_a_loop_with_an_optimizer() -> None:
    plain, twin, fast = nets()
    losses = []
    for net, call in ((plain, plain), (twin, fast)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        seen = []
        for number in range(40):
            optimizer.zero_grad()
            loss = call(batch(number % 4)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        losses.append(torch.stack(seen))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)


def test_attention_has_a_plan_forward_and_backward() -> None:
    """Seeds of dropout that there is not are nobody's, and differ from call to call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(DEVICE)
    twin = copy.deepcopy(plain)
    fast = torch.compile(twin, backend=mh.compile_backend, options={"fuse": False})
    x = torch.randn(8, 32, 128, device=DEVICE)
    for _ in range(4):
        for call in (plain, fast):
            with torch.autocast("cuda", torch.bfloat16):
                call(x).square().mean().backward()
    graphs = [found for found in gc.get_objects() if type(found) is backend._PlannedGraph]
    plans = [bound.plan for graph in graphs for bound in graph._bound]
    assert len(plans) >= 2
    assert all(plan is not None and plan.in_graph for plan in plans)
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0.05, atol=1e-3)


def test_buffers_are_written_by_the_graph() -> None:
    """Also where the forward pass runs as it is, because the kept tensors of the one before are still needed."""
    plain, twin, fast = nets()
    addresses = [buffer.data_ptr() for buffer in twin.buffers()]
    for number in range(40):
        versions = [buffer._version for buffer in twin.buffers()]
        for call in (plain, fast):
            if number % 3:
                call(batch(number)).square().mean().backward()
            else:
                two_forwards_then_two_backwards(call)
        assert all(buffer._version > before for buffer, before in zip(twin.buffers(), versions, strict=True))
    assert_same(plain, twin)
    assert addresses == [buffer.data_ptr() for buffer in twin.buffers()]
    with torch.no_grad():
        for net in (plain, twin):
            net.eval()
        torch.testing.assert_close(fast(batch(1)), plain(batch(1)), rtol=1e-4, atol=1e-5)
    assert_same(plain, twin)


def bindings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every binding of a graph to arguments from now on."""
    made: list[Any] = []
    bind = backend._PlannedGraph._bind

    def noted(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        made.append(bind(graph, *arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(backend._PlannedGraph, "_bind", noted)
    return made


@pytest.mark.parametrize("fuse", [False, True])
def test_graphs_are_bound_once_for_all_batches(monkeypatch: pytest.MonkeyPatch, fuse: bool) -> None:
    made = bindings(monkeypatch)
    torch.manual_seed(0)
    net = Branchy().to(DEVICE)
    fast = torch.compile(net, backend=mh.compile_backend, options={"fuse": fuse})
    batches = [batch(number) for number in range(4)]
    for number in range(20):
        if number == 8:
            before = len(made)
        fast(batches[number % 4]).square().mean().backward()
        net.zero_grad()
    assert len(made) == before


def test_both_graphs_are_planned_in_the_second_step_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bindings(monkeypatch)
    torch.manual_seed(0)
    net = Branchy().to(DEVICE)
    fast = torch.compile(net, backend=mh.compile_backend, options={"fuse": False})
    counts = []
    for number in range(6):
        fast(batch(number)).square().mean().backward()
        net.zero_grad()
        counts.append(len(made))
    assert counts[1:] == [2, 2, 2, 2, 2]
