"""Two nets on Fashion-MNIST on one device, two devices, and so on: the exercise of the book's chapter on several GPUs.

The batch is global: with twice the devices, each gets half of it, and the update stays the same. So accuracy depends
only on the batch size and the learning rate. The number of devices changes the time: computation is divided, but every
step adds communication. Small batches mean many steps, and a small net has little computation to divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.amounts import counted
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Finding, Plot, Series, Table, Trial, seconds
from manyhands.training.commands import recipes
from manyhands.training.data import fashion_mnist

_PAYS = 1.05  # times as fast, at least


@dataclass(frozen=True)
class Job:
    model: str
    batch_size: int
    lr: float
    devices: int


@dataclass(frozen=True)
class Outcome:
    accuracy: float
    epochs: list[float]  # seconds of each, without the first
    first_loss: float

    @property
    def seconds(self) -> float:
        return sorted(self.epochs)[len(self.epochs) // 2]


@experiment(
    "training-scaling",
    question="What do two devices give in training, by net, batch size and learning rate?",
    devices=2,
)
def run(bench: Bench) -> Finding:
    data = fashion_mnist.load()
    outcomes: dict[Job, Outcome] = {}
    for job in jobs(bench):
        bench.say(f"{job.model}, batch size {job.batch_size}, lr {job.lr}, {_devices(job)}")
        outcomes[job] = _train(bench, job, data)
        alone = Job(job.model, job.batch_size, job.lr, 1)
        # Only the first epoch's loss: rounding and each device's BatchNorm statistics diverge later.
        close = 0.01 if job.model == "lenet" else 0.2
        losses = outcomes[job].first_loss, outcomes[alone].first_loss
        bench.equal(*losses, tolerance=close, compared=f"{job.model} on 1 and {_devices(job)}")
    notes = [f"Data: {data.source}. {_count(bench, 'lenet')} images in each epoch of LeNet."]
    return Finding(conclusion(outcomes), [_table(outcomes)], [_speed_plot(outcomes), _accuracy_plot(outcomes)], notes)


def jobs(bench: Bench) -> list[Job]:
    large = "small-resnet" if bench.quick else "resnet18"
    batch_sizes = (32, 256) if bench.quick else (64, 256, 1024)
    counts = range(1, max(2, bench.real_gpus) + 1)
    rates = {"lenet": (0.05, 0.2), large: (0.05,) if bench.quick else (0.05, 0.2)}
    return [
        Job(model, batch_size, rate, count)
        for model in rates
        for batch_size in batch_sizes
        for rate in rates[model]
        for count in counts
    ]


def _count(bench: Bench, model: str) -> int:
    """The number of images in an epoch: fewer for a ResNet on a CPU."""
    if model == "lenet":
        return bench.size(gpu=60_000, cpu=20_000, quick=2048)
    return bench.size(gpu=60_000, cpu=2048, quick=1024)


def _train(bench: Bench, job: Job, data: fashion_mnist.FashionMnist) -> Outcome:
    framework_recipes = recipes.of(bench.framework)
    train, test = framework_recipes.data(data, job.batch_size)
    epochs = bench.size(gpu=6, cpu=4, quick=3)
    trainer = bench.mh.Trainer(max_epochs=epochs, lr=job.lr, quiet=True, devices=bench.for_trainer(job.devices))
    parts = train.first(_count(bench, job.model)), test.first(500) if bench.quick else test
    rows: list[dict[str, Any]] = trainer.fit(framework_recipes.model(job.model, seed=0), *parts).rows
    spent = [row["seconds"] for row in rows[1:]]
    settings = {"batch size": job.batch_size, "lr": job.lr, "devices": job.devices, "model": job.model}
    bench.recorded.extend(Trial("epoch", settings, value) for value in spent)
    return Outcome(rows[-1]["val_acc"], spent, rows[0]["train_loss"])


def _speed_up(outcomes: dict[Job, Outcome], job: Job) -> float:
    """Speed-up over one device, from all learning rates, because these do not change the time."""

    def spent(devices: int) -> float:
        jobs = (other for other in outcomes if (other.model, other.batch_size) == (job.model, job.batch_size))
        return min(outcomes[other].seconds for other in jobs if other.devices == devices)

    return spent(1) / spent(job.devices)


def _table(outcomes: dict[Job, Outcome]) -> Table:
    rows = [
        (
            job.model,
            str(job.batch_size),
            f"{job.lr:g}",
            str(job.devices),
            f"{outcome.accuracy:.3f}",
            seconds(outcome.seconds),
            "1" if job.devices == 1 else f"{_speed_up(outcomes, job):.2f}",
        )
        for job, outcome in outcomes.items()
    ]
    headers = ("net", "batch size", "lr", "devices", "accuracy", "epoch", "gain")
    return Table(headers, rows, "Training on Fashion-MNIST")


def _devices(job: Job) -> str:
    return counted(job.devices, "device")


def _speed_plot(outcomes: dict[Job, Outcome]) -> Plot:
    """Seconds per epoch by batch size: a line for each net and number of devices."""
    lines: dict[str, dict[int, float]] = {}
    for job, outcome in outcomes.items():
        line = lines.setdefault(f"{job.model}, {_devices(job)}", {})
        line[job.batch_size] = min(outcome.seconds, line.get(job.batch_size, outcome.seconds))
    series = [Series(name, list(line), list(line.values())) for name, line in lines.items()]
    title = "Time of an epoch by batch size"
    return Plot("line", title, series, x_label="batch size", y_label="time", unit="s", log_x=True, log_y=True)


def _accuracy_plot(outcomes: dict[Job, Outcome]) -> Plot:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for job, outcome in outcomes.items():
        xs, ys = lines.setdefault(f"{job.model}, lr {job.lr:g}, {_devices(job)}", ([], []))
        xs.append(job.batch_size)
        ys.append(outcome.accuracy)
    series = [Series(name, *line) for name, line in lines.items()]
    return Plot("line", "Test accuracy", series, x_label="batch size", y_label="test accuracy", log_x=True)


def conclusion(outcomes: dict[Job, Outcome]) -> str:
    most = max(job.devices for job in outcomes)
    parts = []
    for model in dict.fromkeys(job.model for job in outcomes):
        gains = {
            job.batch_size: _speed_up(outcomes, job) for job in outcomes if (job.model, job.devices) == (model, most)
        }
        described = {size: f"batch size {size} ({gain:.2f} times as fast as one)" for size, gain in gains.items()}
        pays = [described[size] for size, gain in gains.items() if gain > _PAYS]
        lost = [described[size] for size, gain in gains.items() if gain <= _PAYS]
        words = [f"{most} devices pay with {', '.join(pays)}"] if pays else [f"{most} devices do not pay"]
        words += [f"no clear gain with {', '.join(lost)}"] if lost else []
        parts.append(f"{model}: {'; '.join(words)}.")
    apart = max(
        abs(outcome.accuracy - outcomes[Job(job.model, job.batch_size, job.lr, 1)].accuracy)
        for job, outcome in outcomes.items()
    )
    parts.append(f"Accuracy on {most} devices is within {apart:.3f} of one device's.")
    best = max(outcomes, key=lambda job: outcomes[job].accuracy)
    parts.append(
        f"The best accuracy, {outcomes[best].accuracy:.3f}, is that of {best.model} with batch size {best.batch_size} "
        f"and lr {best.lr:g}."
    )
    return " ".join(parts)
