"""A fast and a slow device: equal shares, measured shares, and the slow device left out.

With equal shares the fast device waits for the slow one in every step. ``mh.Step(shares="measured")`` gives each device
samples in proportion to its speed, while it trains; every gradient is weighted by its samples, so the update equals
that of one device. On a machine with a GPU, the two devices are the GPU and the CPU. Elsewhere the second device is
made slow: it computes every forward pass several times.
"""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Finding, Plot, Series, Table, Times, Trial, seconds
from manyhands.training.commands import recipes
from manyhands.training.data import fashion_mnist

_EXTRA_PASSES = 4  # extra forward passes on the slow device, which give it about a third of the speed


@experiment(
    "unequal-devices",
    question="One of two devices is slow: equal shares, measured shares, or leave it out?",
    frameworks=("torch",),  # the others do not time each device separately
    devices=2,
)
def run(bench: Bench) -> Finding:
    from manyhands.lab.torch.slow_model import SlowOnRank

    framework_recipes = recipes.of(bench.framework)
    train = framework_recipes.data(fashion_mnist.load(), 256)[0].first(bench.size(gpu=8192, cpu=4096, quick=1536))
    has_gpu = bench.gpu() is not None
    both: Any = ["gpu:0", "cpu"] if has_gpu else bench.for_trainer(2)
    alone: Any = ["gpu:0"] if has_gpu else bench.for_trainer(1)
    ways = {
        "equal shares": {"devices": both},
        "measured shares": {"devices": both, "step": bench.mh.Step(shares="measured")},
        "the fast one alone": {"devices": alone},
    }
    times, losses, shares = Times(), dict[str, list[float]](), dict[str, Any]()
    for name, options in ways.items():
        bench.say(name)
        net = SlowOnRank(framework_recipes.model("lenet", seed=0), rank=1, extra_passes=0 if has_gpu else _EXTRA_PASSES)
        epochs = bench.size(gpu=7, cpu=7, quick=5)
        trainer = bench.mh.Trainer(max_epochs=epochs, batch_size=256, lr=0.05, precision="fp32", quiet=True, **options)
        result = trainer.fit(net, train)
        losses[name], shares[name] = [row["train_loss"] for row in result.rows], result.shares
        times[name] = [row["seconds"] for row in result.rows[len(result.rows) // 2 :]]  # the first half finds shares
        bench.recorded.extend(
            Trial(name, {"epoch": len(losses[name]) - number}, value) for number, value in enumerate(times[name])
        )
    # A GPU's convolutions round to TF32, the CPU's do not. If both compute, losses drift apart from step to step, so
    # only the first epochs can be compared.
    tolerance, compared = (1e-2, 2) if has_gpu else (1e-3, None)
    expected = losses["the fast one alone"][:compared]
    for name in ways:
        bench.equal(losses[name][:compared], expected, tolerance=tolerance, compared=f"the losses of {name}")
    measured = shares["measured shares"]
    base = times.median("equal shares")
    rows = [
        (name, _shares_in_words(shares[name], name), seconds(times.median(name)), f"{base / times.median(name):.2f}")
        for name in ways
    ]
    table = Table(("way", "shares", "per epoch", "times as fast as equal shares"), rows, "LeNet, batch size 256")
    parts = Series("share", ["fast device", "slow device"], list(measured))
    plots = [times.bars("Time of an epoch"), Plot("bar", "Measured shares", [parts], y_label="part of each batch")]
    slowed = f"No GPU here: the second device is made slow. It computes each forward pass {1 + _EXTRA_PASSES} times."
    beside = "The two devices are the GPU and the CPU, which computes with one thread."
    return Finding(conclusion(times, measured), [table], plots, [beside if has_gpu else slowed])


def _shares_in_words(shares: Any, name: str) -> str:
    if shares is not None:
        return " : ".join(f"{share:.2f}" for share in shares)
    return "1" if name == "the fast one alone" else "0.50 : 0.50"


def conclusion(times: Times, shares: list[float]) -> str:
    equal, measured, alone = (times.median(name) for name in ("equal shares", "measured shares", "the fast one alone"))
    divided = f"{shares[0]:.0%} for the fast device"
    both = f"Measured shares ({divided}) take {measured / equal:.0%} of the time of equal shares"
    if alone < measured / 1.05:
        return f"Leave the slow device out: alone, the fast one takes {alone / measured:.0%} of their time. {both}."
    if measured > equal / 1.05:
        return f"The devices are not unequal enough to matter: {both[0].lower()}{both[1:]}."
    if measured > alone / 1.05:
        return f"{both}; the fast device alone is about as fast, so the slow one is hardly worth having."
    worse = " Equal shares are slower than the fast device alone." if equal > alone * 1.05 else ""
    return f"{both}, and {measured / alone:.0%} of the time of the fast device alone: measuring them pays.{worse}"
