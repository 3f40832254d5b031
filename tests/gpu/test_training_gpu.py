"""Training on a real GPU: the graph computes what plain steps compute, and nothing makes the host wait."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training_gpu_cases import captured, difference, net, samples  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.book import torch as models  # noqa: E402
from manyhands.errors import BadLabels  # noqa: E402
from manyhands.training.callbacks.callback import NO_CALLBACKS, Averaging, CallbackPlan  # noqa: E402
from manyhands.training.loop import Loop  # noqa: E402
from manyhands.training.options import Settings, Step, Workers  # noqa: E402
from manyhands.training.torch.data.sources import Arrays  # noqa: E402
from manyhands.training.torch.job import Job  # noqa: E402
from manyhands.training.torch.learner import Rank, loop_of  # noqa: E402
from manyhands.training.torch.objective import Supervised  # noqa: E402
from manyhands.training.torch.ranks import world  # noqa: E402

IMAGES, LABELS = samples(330, 12, 5)


def trained(**settings: Any) -> tuple[dict[str, Any], mh.Result]:
    model = net()
    settings = {"devices": ["gpu:0"], "batch_size": 32, "quiet": True, "precision": "fp64", **settings}
    settings = settings if "optimizer" in settings else {"lr": 0.05, **settings}
    result = mh.Trainer(3, **settings).fit(model.double(), ((IMAGES, LABELS), (IMAGES[:77], LABELS[:77])))
    return model.state_dict(), result


# A learning rate or a step count that is a tensor on the device is a float32 there, whatever the model's numbers are.
@pytest.mark.parametrize(
    ("extra", "limit"),
    [
        ({}, 1e-10),
        ({"gradient_clip_val": 0.1}, 1e-10),
        ({"schedule": mh.one_cycle}, 1e-6),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3)}, 1e-4),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "schedule": mh.one_cycle}, 1e-6),
    ],
    ids=["sgd", "clip", "schedule", "adamw", "momentum and schedule"],
)
def test_the_graph_computes_what_plain_steps_compute(extra: dict[str, Any], limit: float) -> None:
    plain, plain_result = trained(step=Step(optimize="off"), **extra)
    graph, graph_result = trained(**extra)
    assert captured(graph_result), graph_result.notes
    assert difference(graph, plain) < limit
    for one, other in zip(graph_result.rows, plain_result.rows, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=limit)
        assert one["train_acc"] == other["train_acc"]
        assert one["val_acc"] == other["val_acc"]
        assert one["samples"] == 330


@pytest.mark.parametrize("options", [{}, {"step": Step(optimize="max")}, {"gradient_clip_val": 0.1}], ids=str)
def test_biases_before_a_batch_norm_are_left_out(options: dict[str, Any], tmp_path: Path) -> None:
    """Those of seven convolutions of a small ResNet; those around its blocks and the last layer keep theirs."""
    found = []
    clip = {name: value for name, value in options.items() if name == "gradient_clip_val"}
    for extra in ({"step": Step(optimize="off"), **clip}, {"run": tmp_path / "run", **options}):
        model = models.initialise(models.small_resnet(), seed=0).double()
        settings: Any = {"devices": ["gpu:0"], "batch_size": 32, "lr": 0.01, "precision": "fp64", "quiet": True}
        result = mh.Trainer(2, **settings, **extra).fit(model, (IMAGES[:320], LABELS[:320]))
        found.append(model.state_dict())
    assert captured(result), result.notes
    assert len(result.notes) == 1, result.notes
    told = (tmp_path / "run" / "step.txt").read_text()
    assert "biases left out because a BatchNorm cancels them: 7" in told
    assert found[0].keys() == found[1].keys()
    assert difference(found[1], found[0]) < 1e-9


def test_one_gpu_is_the_cpu() -> None:
    assert difference(trained()[0], trained(devices=["cpu"])[0]) < 1e-10


def test_two_ranks_on_one_gpu_are_one() -> None:
    """Gloo, as NCCL refuses two ranks on one GPU; started after this process has used CUDA."""
    alone, _ = trained(step=Step(batch_stats="global"))
    for shares in (None, [0.7, 0.3]):
        both, result = trained(step=Step(batch_stats="global", shares=shares), workers=Workers(per_device=2))
        assert result.devices == ["gpu:0", "gpu:0"]
        assert difference(both, alone) < 1e-10


def overlap(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One ratio over the whole batch."""
    chosen = scores.softmax(1).gather(1, y[:, None])
    return 1 - 2 * chosen.sum() / (scores.softmax(1).square().sum() + len(y))


def test_two_ranks_gather_what_a_loss_of_the_whole_batch_needs() -> None:
    alone, _ = trained(step=Step(batch_stats="global"), loss=overlap)
    both, result = trained(step=Step(batch_stats="global"), loss=overlap, workers=Workers(per_device=2))
    assert any("gathered" in note for note in result.notes)
    assert difference(both, alone) < 1e-10


def test_a_cpu_and_a_gpu_in_one_job() -> None:
    alone, _ = trained(step=Step(batch_stats="global"))
    both, result = trained(step=Step(batch_stats="global", shares="measured"), devices=["gpu:0", "cpu"])
    assert difference(both, alone) < 1e-10
    assert any("shares measured" in note for note in result.notes)
    assert sum(result.shares) == pytest.approx(1)


def _loop(callbacks: CallbackPlan = NO_CALLBACKS, **settings: Any) -> tuple[Loop, Rank]:
    job = Job(
        model=net(),
        objective=Supervised(torch.nn.functional.cross_entropy),
        train=Arrays((IMAGES, LABELS)),
        test=None,
        settings=Settings(batch_size=32, **settings),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        callbacks=callbacks,
    )
    return loop_of(job, world.World(0, 1, torch.device("cuda", 0)), lambda event: None)


@pytest.mark.parametrize("callbacks", [NO_CALLBACKS, CallbackPlan(every=(2,), rates=True, average=Averaging(0.9))])
@pytest.mark.parametrize("optimize", ["auto", "off"])
def test_no_step_makes_the_host_wait(optimize: Any, callbacks: CallbackPlan) -> None:
    """The strictest check that torch has: an error for every synchronising operation it knows.

    Neither do figures of steps and an average of the weights, which callbacks ask for.
    """
    loop, rank = _loop(callbacks, step=Step(optimize=optimize), max_epochs=6, gradient_clip_val=1.0)
    for _ in range(5):  # warm up: kernels, redundant biases, graphs of both sizes
        loop._make_steps()
        loop.position.cursor = loop.cursor.next_epoch()
        rank.metrics.peek()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.report._shown = 0.0  # a look at the figures is due
        loop._make_steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rank.metrics.read().count == 6 * 330


def test_samples_that_are_on_the_gpu_already() -> None:
    """They cannot be pinned, and need not be moved; and arrays on a GPU are trained on by a CPU, too."""
    samples = [(image.cuda(), int(label)) for image, label in zip(IMAGES[:64], LABELS[:64], strict=True)]
    result = mh.Trainer(1, devices=["gpu:0"], batch_size=32, quiet=True).fit(net(), samples)
    assert result.rows[-1]["samples"] == 64
    for device in ("gpu:0", "cpu"):
        result = mh.Trainer(1, devices=[device], batch_size=32, quiet=True).fit(net(), (IMAGES.cuda(), LABELS))
        assert result.rows[-1]["samples"] == 330


class AsksForCapture(torch.nn.Module):
    """As models of transformers do: it reads values on the host, except in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing() and bool((x > 1e6).all()):
            return self.head(x * 0)
        return self.head(x)


def test_code_that_waits_only_outside_of_a_capture_is_captured() -> None:
    x, y = torch.randn(256, 8), torch.arange(256) % 10
    result = mh.Trainer(3, devices=["gpu:0"], batch_size=32, quiet=True).fit(AsksForCapture(), (x, y))
    assert captured(result), result.notes
    assert not any("could not be made" in note for note in result.notes), result.notes
    assert not torch.cuda.is_current_stream_capturing()


def test_random_numbers_are_drawn_after_a_fallback() -> None:
    """Dropout in a model that reads a value: a capture that failed would have taken the GPU's random numbers along."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.dropout = net(), torch.nn.Dropout(0.2)

        def forward(self, x: Any) -> Any:
            output = self.inner(self.dropout(x))
            return output * (1.0 if float(output.detach().sum()) > 0 else 2.0)

    before = torch.cuda.get_sync_debug_mode()
    result = mh.Trainer(2, devices=["gpu:0"], batch_size=32, quiet=True).fit(Reads(), (IMAGES, LABELS))
    assert any("could not be made" in note for note in result.notes)
    assert result.rows[-1]["samples"] == 330
    assert torch.rand(3, device="cuda").shape == (3,)
    assert torch.cuda.get_sync_debug_mode() == before
    told = mh.Trainer(2, devices=["gpu:0"], batch_size=32, quiet=True).fit(net(), (IMAGES, LABELS))
    assert captured(told)
    assert len([note for note in told.notes if not note.startswith("precision")]) == 1


def test_the_model_comes_back_where_it_was() -> None:
    model = net()
    before = copy.deepcopy(model)
    mh.Trainer(1, num_gpus=1, batch_size=32, quiet=True).fit(model, (IMAGES, LABELS))
    assert mh.device_of(model) == mh.cpu()
    assert next(model.parameters()).dtype == torch.float32
    assert not torch.equal(next(model.parameters()), next(before.parameters()))


def test_labels_out_of_range_do_not_reach_the_gpu() -> None:
    labels = torch.arange(330) % 10
    for data in ((IMAGES, labels), torch.utils.data.DataLoader(list(zip(IMAGES, labels, strict=True)), 32)):
        with pytest.raises(BadLabels, match="0 to 9"):
            mh.Trainer(1, num_gpus=1, quiet=True).fit(net(), data)
    assert float(torch.ones(2, device="cuda").sum()) == 2


def test_adam_goes_on_in_the_graph(tmp_path: Path) -> None:
    """The count of steps of a resumed optimizer must be on the GPU before the graph is captured."""

    def going_on(epochs: int, **where: Any) -> dict[str, Any]:
        model = net().double()
        settings: dict[str, Any] = {"optimizer": lambda p: torch.optim.Adam(p, lr=1e-3), "precision": "fp64", **where}
        trainer = mh.Trainer(epochs, devices=["gpu:0"], batch_size=32, quiet=True, **settings)
        assert captured(trainer.fit(model, (IMAGES, LABELS)))
        return model.state_dict()

    straight = going_on(4)
    going_on(2, run=tmp_path / "run")
    assert difference(going_on(4, run=tmp_path / "run", resume="auto"), straight) < 1e-6


def test_an_optimizer_comes_back_as_it_was() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = mh.Trainer(2, devices=["gpu:0"], optimizer=optimizer, schedule=mh.one_cycle, batch_size=32, quiet=True)
    trainer.fit(model, (IMAGES, LABELS))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["capturable"]) == (0.01, False)
    assert {one.device.type for values in optimizer.state.values() for one in values.values()} == {"cpu"}
    model(IMAGES).sum().backward()
    optimizer.step()


def test_a_cpu_and_a_gpu_save_their_random_numbers(tmp_path: Path) -> None:
    trained(devices=["gpu:0", "cpu"], run=tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_batch_that_is_left_out_in_a_graph(kind: Any) -> None:
    spoilt = IMAGES.clone()
    spoilt[100] = torch.nan
    weights = []
    for optimize in ("auto", "off"):
        model = net().double()
        options: Any = {"optimizer": lambda p: kind(p, lr=0.01), "step": Step(on_nan="continue", optimize=optimize)}
        trainer = mh.Trainer(3, devices=["gpu:0"], batch_size=32, quiet=True, precision="fp64", **options)
        with pytest.warns(UserWarning, match="continuing"):
            trainer.fit(model, (spoilt, LABELS))
        weights.append(model.state_dict())
        assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    assert difference(*weights) < 1e-4


def test_a_resumed_optimizer_has_the_memory_format_of_its_model(tmp_path: Path) -> None:
    """channels_last weights beside a state that was read from a file: a fused kernel would mix them up."""

    def run(epochs: int, **options: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten())
        model.append(torch.nn.Linear(512, 5))
        given: Any = {"precision": "fp32", "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3), **options}
        mh.Trainer(epochs, devices=["gpu:0"], batch_size=32, quiet=True, **given).fit(model, (IMAGES, LABELS))
        return model.state_dict()

    run(1, run=tmp_path / "run")
    assert difference(run(2, run=tmp_path / "run", resume="auto"), run(2)) < 1e-3
