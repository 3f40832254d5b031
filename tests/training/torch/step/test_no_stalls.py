"""In the steady state a step asks a device for nothing that the host would have to wait for."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from training_cases import convnet, images, mlp, vectors

from manyhands.training.callbacks import events
from manyhands.training.callbacks.callback import Averaging, CallbackPlan
from manyhands.training.data.order import Window
from manyhands.training.options import Settings, Step
from manyhands.training.schedules import one_cycle
from manyhands.training.torch.data import feed
from manyhands.training.torch.data.sources import Arrays, source
from manyhands.training.torch.job import Job
from manyhands.training.torch.learner import loop_of
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.step import running_sums
from manyhands.training.torch.step.plain import PlainStep

WARM = 3  # steps
# Operations whose result the host has to know, in its value or in its shape.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "unique",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount", "histc", "allclose",
    "argwhere", "combinations", "linalg_eigvals",
}  # fmt: skip
# What asks for a value by name; on a CPU most of these are no operation at all.
ASKING = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__repr__"}


class Waits(TorchDispatchMode):
    """Writes down the operations that would make the host wait if the tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0
        self.on_host: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.seen += 1
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if (name in WAITING or masks) and args[0].data_ptr() not in self.on_host:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


class Asks(TorchFunctionMode):
    """Writes down the calls that ask for a value or for a copy on the host."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        where = [*args[1:], *(kwargs or {}).values()]
        # PyTorch's clipping names the device of the gradients, which is the CPU only here.
        clipping = sys._getframe(1).f_code.co_filename.endswith("clip_grad.py")
        to_host = name == "to" and any(str(one) == "cpu" for one in where) and not clipping
        digest = sys._getframe(1).f_code.co_name == "_pieces"  # of a loader's batch, while it is on the host
        if (name in ASKING or to_host) and not digest and args[0].data_ptr() not in self.waits.on_host:
            self.waits.found.append(name)
        return function(*args, **(kwargs or {}))


class Arrived:
    """The metrics as they come from a device: on the host, where reading them waits for nothing."""

    def __init__(self, waits: Waits, tensor: torch.Tensor) -> None:
        self.tensor = tensor.clone()
        waits.on_host.add(self.tensor.data_ptr())

    def ready(self) -> bool:
        return True

    def result(self) -> torch.Tensor:
        return self.tensor


class WatchedStep(PlainStep):
    waits: Waits

    def __call__(self, batch: Any, whole: int, step: int, batch_idx: int = 0) -> None:
        super().__call__(batch, whole, step, batch_idx)
        if step == WARM:
            # Adam counts its steps on the host, also for parameters on a GPU.
            self.waits.on_host |= {one["step"].data_ptr() for one in self.optimizer.state.values() if "step" in one}
            self.waits.found.clear()


def waits(job: Job, monkeypatch: pytest.MonkeyPatch, looks: int = 10) -> Waits:
    """What happens between the first few steps and the end of the epoch: steps, rates, metrics and the feed."""
    found = Waits()
    kept: list[Arrived] = []  # an address that is used again would hide something

    def start_move(tensor: torch.Tensor, device: torch.device) -> Arrived:
        kept.append(Arrived(found, tensor))
        return kept[-1]

    monkeypatch.setattr(events, "_SHOW_EVERY", 0.0)  # so that the metrics are looked at after every step
    monkeypatch.setattr(running_sums.backend, "start_move", start_move)
    said: list[Any] = []
    loop, rank = loop_of(job, World(0, 1, torch.device("cpu")), said.append)
    rank.steps.plain.__class__ = WatchedStep
    watched: Any = rank.steps.plain
    watched.waits = found
    with found, Asks(found):
        assert loop._make_steps()
    assert (loop.cursor.epoch, loop.cursor.sample, loop.cursor.batch, loop.cursor.step) == (0, 80, 10, 10)
    assert found.seen > 100
    assert len(kept) == looks
    shown = [event for event in said if event["kind"] == "progress"]
    assert len(shown) == 10
    assert shown[-1]["loss"] is not None
    assert len(said) == 10 + (looks - 10 if job.callbacks.every else 0)
    return found


def test_the_hooks_find_what_they_look_for() -> None:
    x = torch.arange(4.0)
    for wait in (
        lambda: x.sum().item(), lambda: bool(x[0]), lambda: x[x > 1], lambda: x.nonzero(), lambda: x.unique(),
        lambda: x.to("cpu"), lambda: x.cpu(), lambda: x.tolist(), lambda: float(x[0]), lambda: x.numpy(),
        lambda: x.to(device=torch.device("cpu"), non_blocking=True), lambda: x.masked_select(x > 1),
    ):  # fmt: skip
        found = Waits()
        with found, Asks(found):
            wait()
        assert found.found


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.1},
    "accumulate": {"step": Step(accumulate=3)},
    "bf16": {"precision": "bf16"},
    "go on after a bad loss": {"step": Step(on_nan="continue")},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_a_steady_step_waits_for_nothing(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**{"max_epochs": 1, "batch_size": 8, "precision": "fp32", **CASES[name]})
    X, y = images(80)
    model = convnet().float()
    data = source((X.float(), y))
    job = Job(model, objective_for(model, None), data, None, settings, OPTIMIZERS[optimizer], schedule=one_cycle)
    assert waits(job, monkeypatch).found == []


def test_an_average_and_figures_of_steps_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What callbacks ask for: metrics of every second step, the learning rate, an average of the weights."""
    model = mlp(norm=True)
    settings = Settings(1, 8, step=Step(on_nan="continue"))
    job = Job(
        model, objective_for(model, None), source(vectors(80)), None, settings, OPTIMIZERS["AdamW"], schedule=one_cycle
    )
    job.callbacks = CallbackPlan(every=(2,), rates=True, average=Averaging(0.9))
    assert waits(job, monkeypatch, looks=15).found == []


def test_steps_from_a_loader_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = vectors(80)
    dataset = TensorDataset(X, y)
    model = mlp(dropout=0.5, norm=True)
    for data in (DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8, drop_last=True)):
        job = Job(model, objective_for(model, None), source(data), None, Settings(1, 8), OPTIMIZERS["momentum"])
        assert waits(job, monkeypatch).found == []


def test_what_is_read_ahead_for_a_gpu_is_pinned_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: pinned is what went through a stand-in. What a dataset keeps elsewhere is left alone."""
    pinned: list[tuple[str, Any]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append((threading.current_thread().name, tensor.clone()))
        return tensor

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    homes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", homes.append)
    X, elsewhere, gpu = torch.rand(3, 2), torch.empty(3, device="meta"), torch.device("cuda", 1)
    windows = [(Window(0, 0, 3, 0), (X, elsewhere, ["a", "b", "c"])), (Window(0, 3, 3, 1), None)]
    assert [window for window, _ in feed.ahead(iter(windows), gpu)] == [window for window, _ in windows]
    assert [(name, torch.equal(tensor, X)) for name, tensor in pinned] == [("manyhands-feed_0", True)]
    assert homes == [gpu]


def test_arrays_that_lie_elsewhere_come_to_the_device() -> None:
    other = torch.device("meta")
    for place in (other, torch.device("cpu")):
        mixed = Arrays((torch.rand(4, 2).to(place), torch.zeros(4, device="cpu")))
        found = feed.resident(mixed, other)
        assert isinstance(found, Arrays)
        assert {tensor.device for tensor in found.tensors} == {other}
    here = Arrays((torch.rand(4, 2),))
    assert feed.resident(here, torch.device("cpu")) is here


def test_a_look_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = vectors(80)
    model = mlp()
    job = Job(model, objective_for(model, None), source((X, y)), None, Settings(1, 8), OPTIMIZERS["momentum"])
    monkeypatch.setattr(running_sums.RunningSums, "peek", running_sums.RunningSums.read)
    assert "tolist" in waits(job, monkeypatch, looks=0).found
