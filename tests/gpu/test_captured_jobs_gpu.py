"""Captured steps on a real GPU: from loaders, accumulated, on several ranks. They compute what plain steps compute."""

from __future__ import annotations

import copy
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path += [str(Path(__file__).parents[1] / "training" / "torch" / folder) for folder in (".", "fast")]

import torch.distributed as dist  # noqa: E402
from support import free_port  # noqa: E402
from test_captured_jobs import JOBS, SGD, Lengths, sequences  # noqa: E402
from training_cases import Rows, convnet, difference, images, mlp, vectors  # noqa: E402

from manyhands.training.data.order import Window  # noqa: E402
from manyhands.training.options import Limits, Settings, Step, Workers  # noqa: E402
from manyhands.training.torch.data.batches import Shard  # noqa: E402
from manyhands.training.torch.data.sources import Arrays, source  # noqa: E402
from manyhands.training.torch.fast.build import captured_step  # noqa: E402
from manyhands.training.torch.fast.inputs import ResidentInputs  # noqa: E402
from manyhands.training.torch.fast.recorder import CudaRecorder  # noqa: E402
from manyhands.training.torch.job import Job, NumberFormat  # noqa: E402
from manyhands.training.torch.learner import loop_of  # noqa: E402
from manyhands.training.torch.objective import Supervised  # noqa: E402
from manyhands.training.torch.ranks.gradient_sum import GradientSum  # noqa: E402
from manyhands.training.torch.ranks.world import World  # noqa: E402
from manyhands.training.torch.step.plain import PlainStep  # noqa: E402
from manyhands.training.torch.step.running_sums import RunningSums  # noqa: E402
from manyhands.training.torch.trainer import Trainer  # noqa: E402


class WithHead(torch.nn.Module):
    """Takes the number of the batch, which it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


MORE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (mlp, Rows, {"optimizer": partial(torch.optim.AdamW, lr=0.01)}),
    "AdamW, accumulated": (mlp, Rows, {"optimizer": partial(torch.optim.AdamW, lr=0.01), "step": Step(accumulate=2)}),
    "bfloat16": (convnet, images(120), {"precision": "bf16"}),
    "fp16": (convnet, images(120), {"precision": "fp16", "optimizer": SGD}),
    "fp16, accumulated": (mlp, vectors(), {"precision": "fp16", "step": Step(accumulate=2)}),
    "activation checkpoints": (convnet, images(120), {"step": Step(activation_checkpointing=lambda m: m is not None)}),
    "a number": (WithHead, Rows, {}),
    "compiled": (mlp, Rows, {"step": Step(optimize="max")}),
}


def trained(make: Any, data: Any, **options: Any) -> tuple[dict[str, Any], Any]:
    settings = {"max_epochs": 4, "batch_size": 16, "devices": ["gpu:0"], "precision": "fp64", "quiet": True, **options}
    model = make()
    model = model if settings["precision"] == "fp64" else model.float()
    if "optimizer" not in settings and not hasattr(model, "configure_optimizers"):
        settings["lr"] = 0.05
    torch.manual_seed(0)
    given = data() if callable(data) else data
    if settings["precision"] != "fp64":
        given = tuple(part.float() if part.is_floating_point() else part for part in given)
    result = Trainer(**settings).fit(model, given)
    return model.state_dict(), result


def compare(make: Any, data: Any, options: dict[str, Any]) -> Any:
    """Captured and plain; the captured job's result. In half precision both are compared with float64."""
    plain = {**options, "step": dataclasses.replace(options.get("step", Step()), optimize="off")}
    captured, result = trained(make, data, **options)
    expected, other = trained(make, data, **plain)
    limit = 1e-5  # a learning rate on the device is a float32
    if options.get("precision", "fp64") != "fp64":
        rounded, (expected, _) = expected, trained(make, data, **{**plain, "precision": "fp64"})
        limit = 2 * apart(rounded, expected) + 1e-3
    assert apart(captured, expected) < limit
    for row, plain_row in zip(result.rows, other.rows, strict=True):
        assert row["train_loss"] is None or row["train_loss"] == pytest.approx(plain_row["train_loss"], rel=limit)
    return result


def apart(weights: dict[str, Any], expected: dict[str, Any]) -> float:
    """The distance of all weights together, relative to the expected ones."""
    both = [(weights[name].double(), value.double()) for name, value in expected.items()]
    distance = sum(float((weight - value).square().sum()) for weight, value in both)
    return (distance / sum(float(value.square().sum()) for _, value in both)) ** 0.5


@pytest.mark.parametrize("job", [*JOBS, *MORE])
def test_a_captured_job_is_the_plain_one(job: str) -> None:
    make, data, options = {**JOBS, **MORE}[job]
    result = compare(make, data, options)
    (note,) = [note for note in result.notes if note.startswith("the step: ")]
    assert "plain" not in note, result.notes


@pytest.mark.parametrize(
    "job",
    ["arrays", "a data set", "clip", "accumulation of sums", "a sum and a count", "an average", "several lengths"],
)
def test_two_ranks_on_one_gpu(job: str) -> None:
    """Gloo; BatchNorm apart, whose statistics are of each device."""
    make, data, options = JOBS[job]
    make = mlp if job in ("arrays", "a data set") else make
    options = {**options, "workers": Workers(per_device=2)}
    result = compare(make, data, options)
    assert any("gradients summed over 2 devices" in note for note in result.notes), result.notes
    alone, _ = trained(make, data, **{**JOBS[job][2]})
    both, _ = trained(make, data, **options)
    assert difference(both, alone) < 1e-5


def test_shares_and_a_batch_that_is_left_out_on_two_ranks() -> None:
    X, y = vectors()
    X[20] = torch.nan
    step = Step(shares=[0.7, 0.3], on_nan="continue")
    with pytest.warns(UserWarning, match="continuing"):
        result = compare(mlp, (X, y), {"step": step, "optimizer": SGD, "workers": Workers(per_device=2)})
    assert any("gradients summed over 2 devices" in note for note in result.notes), result.notes


def test_a_captured_job_from_a_loader_is_resumed(tmp_path: Path) -> None:
    whole, _ = trained(partial(mlp, norm=True), Rows, optimizer=SGD, max_epochs=6)
    trained(partial(mlp, norm=True), Rows, optimizer=SGD, max_epochs=6, limits=Limits(max_steps=15), run=tmp_path / "r")
    resumed, _ = trained(partial(mlp, norm=True), Rows, optimizer=SGD, max_epochs=6, run=tmp_path / "r", resume="auto")
    assert difference(resumed, whole) < 1e-10


def test_nccl_in_a_world_of_one_for_a_thousand_steps() -> None:
    """Graphs, signals and collectives of NCCL together; of speed it says nothing."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{free_port()}", rank=0, world_size=1)
    try:
        weights = []
        for captured in (True, False):
            net = mlp().to(device)
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)
            step = PlainStep(
                net, optimizer, Supervised(torch.nn.functional.cross_entropy), RunningSums(device), device,
                NumberFormat(), gradients=GradientSum(net.parameters()),
            )  # fmt: skip
            step.objective.sums = False
            data = Arrays(tuple(part.to(device) for part in vectors(64)))
            inputs = ResidentInputs(data, device, lambda window: [(window.start, window.stop)])
            inputs.begin_epoch(torch.arange(64).numpy())
            graphs = captured_step(step, inputs, CudaRecorder(device), 16)
            for number in range(1000):
                window = Window(0, number % 4 * 16, number % 4 * 16 + 16, number)
                if not (captured and graphs(window, None)):
                    place = torch.arange(window.start, window.stop, device=device)
                    step(Shard((data.take(place),), (16,)), 16, number)
            assert not captured or graphs.steps["replayed"] > 990, graphs.ended
            weights.append(copy.deepcopy(net.state_dict()))
            step.close()
        assert difference(*weights) < 1e-12
    finally:
        dist.destroy_process_group()


def test_an_epoch_from_a_loader_makes_no_host_wait() -> None:
    job = Job(
        mlp(), Supervised(torch.nn.functional.cross_entropy), source(Rows(96)), None, Settings(batch_size=16),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    loop, rank = loop_of(job, World(0, 1, torch.device("cuda", 0)), lambda event: None)
    for _ in range(2):
        loop._make_steps()
        loop.position.cursor = loop.cursor.next_epoch()
        rank.metrics.peek()
    assert rank.steps.captured is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop._make_steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rank.steps.captured.steps["replayed"] > 6


def test_lengths_share_the_memory_of_their_graphs() -> None:
    def peak(lengths: list[int]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trained(partial(Wide), lambda: sequences(lengths), optimizer=SGD, batch_size=8)
        return torch.cuda.max_memory_reserved()

    class Wide(Lengths):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = torch.nn.GRU(4, 512, batch_first=True), torch.nn.Linear(512, 3)
            self.double()

    one, several = peak([2048] * 10), peak([2048, 1500, 1024, 800, 600] * 5)
    assert several < 2.2 * one, "apart they would take 3 times as much"
