"""A fast and a slow device: equal shares, measured shares, and the slow device left out."""

from __future__ import annotations

from typing import Any

from manyhands.book import recipes
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Times, Trial
from manyhands.training.data import fashion_mnist

_EXTRA_PASSES = 4  # extra forward passes on the slow device, which give it about a third of the speed
_EQUAL, _MEASURED, _ALONE = "equal shares", "measured shares", "the fast one alone"


@Experiment(
    "unequal-devices",
    "One of two devices is slow: equal shares, measured shares, or leave it out?",
    "Training on several GPUs, concise: GPU and CPU at the same time. How should we divide the work?",
    frameworks=("torch",),  # the others do not time each device separately
    devices=2,
)
def run(bench: Bench) -> Answer:
    framework_recipes = recipes.of(bench.framework)
    train = framework_recipes.data(fashion_mnist.load(), 256)[0].first(bench.size(gpu=8192, cpu=4096, quick=1536))
    has_gpu = bench.gpu() is not None
    both: Any = ["gpu:0", "cpu"] if has_gpu else bench.for_trainer(2)
    alone: Any = ["gpu:0"] if has_gpu else bench.for_trainer(1)
    methods = {
        _EQUAL: {"devices": both},
        _MEASURED: {"devices": both, "step": bench.mh.Step(shares="measured")},
        _ALONE: {"devices": alone},
    }
    times, losses, shares = Times(), dict[str, list[float]](), [0.5, 0.5]
    for name, options in methods.items():
        bench.say(name)
        net = framework_recipes.model("lenet", 0)
        if not has_gpu:
            net.register_forward_pre_hook(_slow_down)
        epochs = bench.size(gpu=7, cpu=7, quick=5)
        trainer = bench.mh.Trainer(max_epochs=epochs, batch_size=256, lr=0.05, precision="fp32", quiet=True, **options)
        result = trainer.fit(net, train)
        losses[name] = [row["train_loss"] for row in result.rows]
        shares = list(result.shares) if name == _MEASURED else shares
        times[name] = [row["seconds"] for row in result.rows[epochs // 2 :]]  # the first half finds shares
        bench.recorded += [Trial(name, {"epoch": epochs // 2 + i}, spent) for i, spent in enumerate(times[name])]
    # A GPU's convolutions round to TF32, the CPU's do not. If both compute, losses drift apart from step to step, so
    # only the first epochs can be compared.
    tolerance, compared = (1e-2, 2) if has_gpu else (1e-3, None)
    for name in methods:
        expected = losses[_ALONE][:compared]
        bench.equal(losses[name][:compared], expected, tolerance=tolerance, compared=f"the losses of {name}")
    title = "Time of an epoch, LeNet, batch size 256"
    slowed = f"No GPU here: the second device is made slow. It computes each forward pass {1 + _EXTRA_PASSES} times."
    beside = "The two devices are the GPU and the CPU, which computes with one thread."
    note = beside if has_gpu else slowed
    shared, two = times.compare(_MEASURED, to=_EQUAL), times.compare(_MEASURED, to=_ALONE, most=2)
    advice = "measuring them pays" if two.faster else "leave the slow device out" if two.slower else "it hardly matters"
    conclusion = (
        f"Two devices with measured shares ({shares[0]:.0%} for the fast one): an epoch {shared}, compared with equal "
        f"shares, and {two}, compared with the fast device alone: {advice}."
    )
    return Answer.of(conclusion, *times.shown(title, _EQUAL), notes=[note])


def _slow_down(net: Any, inputs: Any) -> None:
    """A hook that simulates a slow device, where all are equal: more forward passes, with results that nobody reads."""
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        with torch.no_grad():
            for _ in range(_EXTRA_PASSES):
                net.forward(*inputs)
