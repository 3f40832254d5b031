"""Functions that cannot be captured as one graph: planned in pieces, equal to plain execution, called directly if that
is faster."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.planning import Times
from manyhands.backends.torch import compat, planning
from manyhands.backends.torch.dynamo import pieces
from manyhands.parallel import function
from manyhands.parallel import pieces as stages
from manyhands.parallel.function import Parallel
from manyhands.parallel.way import AS_WRITTEN, IN_PIECES

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="beside a dispatch mode Dynamo captures nothing"
)

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def in_pieces(called: Callable[..., Any]) -> Parallel:
    """In pieces from the first call on; each graph is always run by its plan, in the caller's thread."""
    return Parallel(called, planning, synchronous=True)


def printed(call: Callable[[], Any]) -> tuple[Any, str]:
    with redirect_stdout(io.StringIO()) as text:
        result = call()
    return result, text.getvalue()


def breaks_thrice(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() + 1
    print("largest", round(y.max().item(), 4))
    if y.sum() > 0:
        y = y * 2
    return y @ y


def test_each_piece_is_planned_and_each_break_is_told(tmp_path: Path) -> None:
    fast = in_pieces(breaks_thrice)
    for number in range(3):
        result, expected = (printed(lambda call=call, n=number: call(X - n)) for call in (fast, breaks_thrice))
        assert torch.equal(result[0], expected[0])
        assert result[1] == expected[1]
    explanation = fast.explain()
    first = breaks_thrice.__code__.co_firstlineno
    assert "in 3 pieces, with Python between them" in explanation
    assert f"test_pieces.py:{first + 2}, in breaks_thrice: print(" in explanation
    assert "(a tensor's value is read in Python)" in explanation
    assert (
        f"test_pieces.py:{first + 3}, in breaks_thrice: if y.sum() > 0:  (a branch depends on a tensor's val"
        in explanation
    )
    assert f"piece 1 (test_pieces.py:{first + 1}-{first + 2}): run as the schedule's order" in explanation
    # What is drawn are all pieces.
    assert "then piece 2" in fast.draw(tmp_path / "graph.svg").read_text()
    spans = [span.name for span in fast.measured().spans]
    assert [name for name in spans if name.startswith("Python")] == ["Python, then piece 2", "Python, then piece 3"]
    assert sum("mm" in name for name in spans) == 1
    assert len(fast.simulated().spans) == len(spans)
    assert fast.forecast(2).seconds > 0


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.parts[0](x) + nn.functional.dropout(self.parts[1](x), 0.3, self.training)


def test_a_model_with_gradients_has_a_planned_forward_and_a_planned_backward() -> None:
    torch.manual_seed(0)
    nets = [Branches()]
    nets.append(copy.deepcopy(nets[0]))
    fast = in_pieces(nets[1])
    for net, call in zip(nets, (nets[0], fast), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            torch.manual_seed(number)
            optimizer.zero_grad()
            call(X).square().sum().backward()
            optimizer.step()
    for (name, one), other in zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    explanation = fast.explain()
    assert "Branches: run in one piece" in explanation
    assert "piece 1, forward" in explanation
    assert "piece 1, backward" in explanation
    assert explanation.count("run as the schedule's order") == 2


def test_gradients_can_be_derived_again() -> None:
    """A gradient penalty: PyTorch's compiled backward passes refuse a second derivative."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    fast = in_pieces(net)
    gradients = []
    for call in (net, fast, fast, fast):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        net.zero_grad()
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (slope.square().sum() + call(x).mean()).backward()
        gradients.append([value.grad.clone() for value in (x, *net.parameters())])
    for gradient in gradients[1:]:
        for result, other in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(result, other)
    assert "piece 1, backward" in fast.explain()


@pytest.mark.parametrize(
    ("way", "works"),
    [
        (lambda x, w: (x + w).sum(), True),
        (lambda x, w: [(x + w).sum(), (x * w).sum()][0], True),
        (lambda x, w: (x * w).sum(), False),
        (lambda x, w: torch.nn.functional.dropout(x + w, 0.5).sum(), False),
    ],
    ids=["nothing is saved", "only for another result", "arguments are saved", "a mask is saved"],
)
def test_a_second_backward_pass_is_refused_where_plain_execution_refuses_it(
    way: Callable[..., Any], works: bool
) -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def called(x: torch.Tensor) -> Any:
        print("called")
        return way(x, weight)

    fast = in_pieces(called)
    results = []
    for call in (called, fast, fast, fast):
        weight.grad = None
        loss, _ = printed(lambda call=call: call(X))
        loss.backward()
        if works:
            loss.backward()
            loss.backward()
            results.append(weight.grad)
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
    assert all(torch.equal(result, results[0]) for result in results)
    assert "run in one piece" in fast.explain()


def test_passes_through_different_results_do_not_disturb_each_other() -> None:
    """Plain execution lets go of what a pass has reached, no more."""
    weight = torch.ones(4, 4, requires_grad=True)

    def called(x: torch.Tensor) -> Any:
        print("called")
        return (x * weight).sum(), (x + weight).sin().sum()

    fast = in_pieces(called)
    results = []
    for call in (called, fast, fast, fast):
        weight.grad = None
        (one, other), _ = printed(lambda call=call: call(X))
        one.backward()
        other.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            one.backward()
        results.append(weight.grad)
    assert all(torch.equal(result, results[0]) for result in results)


def test_second_derivatives_are_those_of_the_arguments_as_they_were() -> None:
    weight = torch.full((4,), 2.0, requires_grad=True)

    def adds(x: torch.Tensor) -> torch.Tensor:
        print("called")
        x.add_(1)
        return (x * weight * weight).sum()

    def keeps(x: torch.Tensor) -> torch.Tensor:
        print("called")
        return ((x + 1) * weight * weight).sum()

    def second(value: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(value, weight, create_graph=True)
        return torch.autograd.grad(slope.sum(), weight)[0]

    for plain in (adds, keeps):
        fast = in_pieces(plain)
        for _ in range(3):
            result, expected = (second(printed(lambda call=call: call(torch.ones(4)))[0]) for call in (fast, plain))
            assert torch.equal(result, expected)
    x = torch.ones(4)
    value, _ = printed(lambda: fast(x))
    x.fill_(100.0)
    with pytest.raises(RuntimeError, match="Write to a copy"):
        second(value)


def test_a_weight_that_a_loss_does_not_reach_has_no_gradient() -> None:
    weights = [torch.ones(4, requires_grad=True) for _ in range(2)]

    def both(x: torch.Tensor) -> Any:
        print("called")
        return [(x * weight).sin().sum() for weight in weights]

    fast = in_pieces(both)
    for number in (0, 1, 0, 1, 0):
        for call in (both, fast):
            weights[0].grad = weights[1].grad = None
            printed(lambda call=call: call(X[0]))[0][number].backward()
            assert weights[1 - number].grad is None
            expected = X[0] * X[0].cos()
            assert torch.equal(weights[number].grad, expected)  # type: ignore[arg-type]
    results, _ = printed(lambda: fast(X[0]))
    sum(results).backward()
    assert all(weight.grad is not None for weight in weights)


def changes_state() -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    state: dict[str, Any] = {"calls": 0, "sums": [], "weight": torch.ones(4, 4)}

    def counts(x: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        state["weight"].mul_(0.5)
        x.add_(1)
        state["sums"].append(float((x @ state["weight"]).sum()))
        return x.sin() * state["calls"] + torch.rand(4, 4)

    return counts, state


@pytest.mark.parametrize("between", [lambda encoded: encoded + 1.0, lambda encoded: encoded.exp()], ids=["sum", "exp"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_an_argument_that_was_computed_from_another_one(between: Callable[..., Any], again: bool) -> None:
    """A decoder's layer gets hidden states and what they were computed from; the cache that it returns is not used."""

    def layer(hidden: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.sin() * encoded.square(), encoded.cos()

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        start = X.clone().requires_grad_()
        encoded = start.tanh()
        used, _ = call(between(encoded), encoded)
        derivative = torch.autograd.grad(used.sum(), start, create_graph=again)
        return [*derivative, *(torch.autograd.grad(derivative[0].square().sum(), start) if again else ())]

    fast = in_pieces(layer)
    for _ in range(3):
        for ours, plain in zip(gradients(fast), gradients(layer), strict=True):
            torch.testing.assert_close(ours, plain)
    assert "backward" in fast.explain()


def test_a_backward_pass_that_is_done_as_written_is_not_captured_again() -> None:
    """A GAN's step: the generator's graph and the first loss are one piece, and each has its own backward pass."""

    def trained(wrap: Callable[..., Any]) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        generator, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 1)

        def step(real: torch.Tensor) -> torch.Tensor:
            made = generator(torch.randn(6, 4))
            loss = critic(made.detach()).square().mean() - critic(real).mean()
            loss.backward()
            print("loss", loss.item())
            judged = critic(made).sigmoid().mean()
            judged.backward()
            return judged.detach()

        fast = wrap(step)
        losses, _ = printed(lambda: [fast(torch.randn(6, 4)).clone() for _ in range(3)])
        weights = (*generator.parameters(), *critic.parameters())
        return fast, [*losses, *(weight.grad for weight in weights if weight.grad is not None)]

    fast, results = trained(in_pieces)
    torch.testing.assert_close(results, trained(lambda step: step)[1], rtol=0, atol=0)
    explained = fast.explain()
    assert "pieces, with Python between them" in explained
    assert "eval_with_key" not in explained, "a graph of Dynamo's own"


def test_state_arguments_and_random_numbers_are_those_of_plain_execution() -> None:
    outcomes = []
    for wrap in (lambda one: one, in_pieces):
        counts, state = changes_state()
        call = wrap(counts)
        torch.manual_seed(3)
        x = X.clone()
        results = [call(x) for _ in range(4)]
        outcomes.append((results, x, state["calls"], state["sums"], state["weight"], torch.get_rng_state()))
    for value, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


def inverse_or_nothing(x: torch.Tensor) -> Any:
    print("asked")
    try:
        return torch.linalg.cholesky(x) + 1
    except RuntimeError:
        return None


LOG: list[str] = []


def fails_later(x: torch.Tensor) -> torch.Tensor:
    LOG.append("before")
    y = torch.linalg.cholesky(x)
    print("still positive")
    return y


def test_errors_are_caught_where_plain_execution_catches_them() -> None:
    positive, negative = X @ X.t() + 4 * torch.eye(4), -torch.eye(4)
    fast = in_pieces(inverse_or_nothing)
    for x in (positive, negative, positive, negative):
        result, expected = (printed(lambda call=call, x=x: call(x)) for call in (fast, inverse_or_nothing))
        assert result[1] == expected[1]
        torch.testing.assert_close(result[0], expected[0], rtol=0, atol=0)
    assert "handles errors (try)" in fast.explain()
    # The graph that a call begins with fails: what comes before the error in the program has happened.
    fast = in_pieces(fails_later)
    for x in (positive, positive, negative):
        LOG.clear()
        for call in (fails_later, fast):
            if x is negative:
                with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
                    call(x)
            else:
                printed(lambda call=call, x=x: call(x))
        assert LOG == ["before", "before"]


def test_arguments_that_share_memory_are_written_to_once() -> None:
    """PyTorch's wrapper of such a graph raises an error when the graph has written already."""

    def halves(a: torch.Tensor, b: torch.Tensor) -> Any:
        b.mul_(0.5)
        return a + 1, b

    fast = in_pieces(halves)
    for _ in range(2):
        whole, plain = X.clone(), X.clone()
        result, expected = fast(whole[:, :3], whole[:, 1:]), halves(plain[:, :3], plain[:, 1:])
        for value, other in zip((*result, whole), (*expected, plain), strict=True):
            assert torch.equal(value, other)


def test_a_value_that_is_needed_is_not_taken_for_an_error_that_is_caught() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        try:
            y = x * int(x.sum() > 0)
        except RuntimeError:
            y = x * 3
        try:
            return y + 1 if torch.equal(x, x.t()) else y
        except RuntimeError:
            return y + 5

    fast = in_pieces(scaled)
    for number in range(3):
        assert torch.equal(fast(X - number), scaled(X - number))


def test_autocast_casts_a_weight_once_however_often_it_is_used() -> None:
    """Compiled, it would be cast at each use, and its gradient be rounded in another way."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4)]
    nets.append(copy.deepcopy(nets[0]))

    def step_of(net: nn.Module) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(net(net(x))).sin().sum().backward()
            return x  # an argument: not one graph of ours

        return step

    calls = step_of(nets[0]), in_pieces(step_of(nets[1]))
    for number in range(3):
        for call in calls:
            call(X - number)
        assert torch.equal(*(net.weight.grad for net in nets))  # type: ignore[arg-type]


def test_what_nobody_uses_is_done() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        print("drawn")
        torch.rand(3)
        return x + 1

    fast = in_pieces(draws)
    for _ in range(3):
        states = []
        for call in (draws, fast):
            torch.manual_seed(0)
            printed(lambda call=call: call(X))
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


def test_an_error_of_dynamo_or_ours_means_plain_execution_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_down(*_: Any) -> Any:
        raise AssertionError("out of order")

    monkeypatch.setattr(pieces, "compile_with", breaks_down)
    fast = in_pieces(breaks_thrice)
    for _ in range(2):
        result, expected = (printed(lambda call=call: call(X)) for call in (fast, breaks_thrice))
        assert torch.equal(result[0], expected[0])
        assert result[1] == expected[1]
    assert "runs without a plan: it cannot be planned (AssertionError: out of order)" in fast.explain()
    monkeypatch.setattr(compat.dynamo._Frames, "_listening", breaks_down)
    fast = in_pieces(breaks_thrice)
    assert torch.equal(printed(lambda: fast(X))[0], printed(lambda: breaks_thrice(X))[0])
    assert "Dynamo failed, so a part runs without a plan (AssertionError: out of order)" in fast.explain()
    monkeypatch.setattr(compat, "compile_in_pieces", breaks_down)
    fast = in_pieces(breaks_thrice)
    assert torch.equal(printed(lambda: fast(X))[0], printed(lambda: breaks_thrice(X))[0])
    assert "it cannot be captured in pieces (AssertionError: out of order)" in fast.explain()


# Which way is taken


def stepwise(monkeypatch: pytest.MonkeyPatch, *, seconds: dict[bool, float]) -> tuple[Parallel, list[bool]]:
    """A function whose calls are noted (True: in pieces) and take so long, as the planner sees it."""
    taken: list[bool] = []
    monkeypatch.setattr(stages, "_TOO_SHORT", 0.0)

    def timed_call(call: Callable[[], Any]) -> tuple[Any, Times]:
        before = len(taken)
        result = call()
        return result, Times(seconds[taken[before]], 1.0)

    monkeypatch.setattr(planning, "timed_call", timed_call)
    fast = mh.parallel(breaks_thrice)
    real = pieces.InPieces.call

    def call(self: Any, arguments: Any, keywords: Any) -> Any:
        taken.append(True)
        return real(self, arguments, keywords)

    monkeypatch.setattr(pieces.InPieces, "call", call)
    plainly = fast._plainly
    monkeypatch.setattr(fast, "_plainly", lambda *arguments: (taken.append(False), plainly(*arguments))[1])
    # One plan of a piece is faster than its graph as it is.
    monkeypatch.setattr(stages.Captured, "plans", lambda self, last: [("", _Lanes())] if last else [])
    return fast, taken


class _Lanes:
    way = IN_PIECES


@pytest.mark.parametrize("wins", [True, False])
def test_the_faster_way_is_kept(monkeypatch: pytest.MonkeyPatch, wins: bool) -> None:
    fast, taken = stepwise(monkeypatch, seconds={True: 1.0 if wins else 2.0, False: 1.9})
    for _ in range(25):
        printed(lambda: fast(X))
    assert not any(taken[: stages._PLAIN_CALLS])
    turns = taken.count(True)
    assert turns >= stages._TURNS
    for _ in range(5):
        printed(lambda: fast(X))
    assert taken.count(True) - turns == (5 if wins else 0)
    assert fast.planned.way == (IN_PIECES if wins else AS_WRITTEN)
    assert fast.planned.seconds[AS_WRITTEN] == 2.9
    if not wins:
        assert fast.planned.run == fast._plainly  # nothing stands between a call and the function
        message = "Dynamo's guards before each piece cost more than the pieces gain"
        assert any(message in note for note in fast.planned.notes)


def test_a_short_function_never_meets_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_TOO_SHORT", 1e9)
    monkeypatch.setattr(compat, "compile_in_pieces", lambda *_: pytest.fail("captured"))
    fast = mh.parallel(breaks_thrice)
    for _ in range(4):
        printed(lambda: fast(X))
    assert "called directly: a call takes" in fast.explain()


def test_what_never_wins_is_called_directly_and_asked_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_DIRECT_CALLS", 5)
    monkeypatch.setattr(stages, "_TOO_SHORT", 1e9)
    asked = []
    fast = mh.parallel(lambda x: x + 1 if x.sum() > 0 else x - 1)
    for _ in range(4):
        fast(X)
    for planned in fast._recent:
        fits = planned.fits
        planned.fits = lambda *arguments, fits=fits: (asked.append(1), fits(*arguments))[1]
    for _ in range(12):
        assert torch.equal(fast(X), X + 1 if X.sum() > 0 else X - 1)
    assert len(asked) == 2
    with torch.no_grad():
        fast(X)  # another mode may have another plan
    assert len(asked) == 3


def test_a_function_that_is_never_the_same_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_TOO_SHORT", 0.0)
    monkeypatch.setattr(stages, "_UNTIL_SETTLED", 4)
    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        print("so far", len(calls))
        return x * len(calls)

    fast = mh.parallel(counts)
    for number in range(1, 12):
        assert torch.equal(printed(lambda: fast(X))[0], X * number)
    assert "called directly: what it depends on changes on every call" in fast.explain()


def test_a_backward_pass_is_timed_with_its_call() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    result, times = pieces.timed_call(lambda: (X @ weight).sum())
    assert times.forward > 0
    assert times.backward is None
    result.backward()
    assert times.backward is not None
    assert times.backward > 0
    assert pieces.timed_call(lambda: 3)[0] == 3


def test_an_error_of_ours_behind_other_pieces_is_no_error_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    planned: list[object] = []

    def make(piece: object, graph: Any, is_backward: bool, reuse: bool) -> Any:
        planned.append(piece)
        return graph.forward if len(planned) == 1 else lambda *arguments: None  # what a broken plan would give

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("between")
        return y + 1

    captured, x = pieces.in_pieces(function, make), torch.rand(3)
    assert torch.equal(captured.call((x,), {}), x * 2 + 1)
    assert len(planned) == 2
    assert capsys.readouterr().out == "between\n", "and nothing was done twice"
