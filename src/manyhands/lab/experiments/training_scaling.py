"""Two nets on Fashion-MNIST on one device, two devices, and so on.

The batch is global: with twice the devices, each gets half of it, and the update stays the same. So accuracy depends
only on the batch size and the learning rate. The number of devices changes the time: computation is divided, but every
step adds communication. Small batches mean many steps, and a small net has little computation to divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.amounts import count_of
from manyhands.book import recipes
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Series, Sweep, Times, Trial
from manyhands.training.data import fashion_mnist


@dataclass(frozen=True)
class TrainingJob:
    model: str
    batch_size: int
    lr: float

    def __str__(self) -> str:
        return f"{self.model}, batch size {self.batch_size}, lr {self.lr:g}"


@Experiment(
    "training-scaling",
    "What do two devices give in training, by net, batch size and learning rate?",
    "Training on several GPUs: k times the batch size; learning rates and accuracy; and, concise, ResNet-18 "
    "with other epochs, batch sizes and rates.",
    devices=2,
)
def run(bench: Bench) -> Answer:
    data = fashion_mnist.load()
    sweep, accuracies = Sweep(), dict[TrainingJob, list[float]]()
    for job in jobs(bench):
        sweep[job], losses = Times(), []
        for count in range(1, max(2, bench.real_gpus) + 1):
            rows = _train(bench, job, count, data)
            sweep[job][count_of(count, "device")] = [row["seconds"] for row in rows[1:]]
            accuracies.setdefault(job, []).append(rows[-1]["val_acc"])
            losses.append(rows[0]["train_loss"])
            # Only the first epoch's loss: rounding and each device's BatchNorm statistics diverge later.
            close = 0.01 if job.model == "lenet" else 0.2
            bench.equal(losses[-1], losses[0], tolerance=close, compared=f"{job} on 1 and {count_of(count, 'device')}")
    notes = [f"Data: {data.source}. {_count(bench, 'lenet')} images in each epoch of LeNet."]
    sentence = conclusion(sweep)
    if not bench.quick:  # after three epochs on few images, accuracies teach nothing
        best = max(accuracies, key=lambda job: accuracies[job][0])
        apart = max(max(values) - min(values) for values in accuracies.values())
        sentence += (
            f" Accuracies on 1 device and on more are at most {apart:.3f} apart; the best, {accuracies[best][0]:.3f}, "
            f"is that of {best}."
        )
    lines: dict[str, dict[int, float]] = {}  # at the lowest learning rate
    for job, times in sweep.items():
        for devices in times:
            lines.setdefault(f"{job.model}, {devices}", {}).setdefault(job.batch_size, times.median(devices))
    series = [Series(name, list(line), list(line.values())) for name, line in lines.items()]
    plot = Plot("line", "Time of an epoch", series, x_label="batch size")
    *_, most = sweep.methods()
    return Answer(sentence, [sweep.table("job", "Time of an epoch", gain=most, to="1 device")], [plot], notes)


def jobs(bench: Bench) -> list[TrainingJob]:
    models = ("lenet", "small-resnet" if bench.quick else "resnet18")
    sizes, rates = ((32, 256), (0.05,)) if bench.quick else ((64, 256, 1024), (0.05, 0.2))
    return [TrainingJob(model, size, rate) for model in models for size in sizes for rate in rates]


def _count(bench: Bench, model: str) -> int:
    """The number of images in an epoch: fewer for a ResNet on a CPU."""
    return bench.size(gpu=60_000, cpu=20_000 if model == "lenet" else 2048, quick=2048 if model == "lenet" else 1024)


def _train(bench: Bench, job: TrainingJob, count: int, data: fashion_mnist.FashionMnist) -> list[dict[str, Any]]:
    bench.say(f"{job}, {count_of(count, 'device')}")
    framework_recipes = recipes.of(bench.framework)
    train, test = framework_recipes.data(data, job.batch_size)
    epochs = bench.size(gpu=6, cpu=4, quick=3)
    trainer = bench.mh.Trainer(max_epochs=epochs, lr=job.lr, quiet=True, devices=bench.for_trainer(count))
    parts = train.first(_count(bench, job.model)), test.first(500) if bench.quick else test
    rows: list[dict[str, Any]] = trainer.fit(framework_recipes.model(job.model, 0), *parts).rows
    settings = {"batch size": job.batch_size, "lr": job.lr, "devices": count, "model": job.model}
    bench.recorded.extend(Trial("epoch", settings, row["seconds"]) for row in rows[1:])
    return rows


def conclusion(sweep: Sweep) -> str:
    """With which jobs the largest number of devices pays."""
    *_, most = sweep.methods()
    gains = {job: times.compare(most, to="1 device", most=int(most.split()[0])) for job, times in sweep.items()}
    pays = [f"{job} ({gain.ratio:.2f} times as fast as one)" for job, gain in gains.items() if gain.faster]
    lost = [f"{job} ({gain.ratio:.2f})" for job, gain in gains.items() if not gain.faster]
    parts = [f"{most} pay with {'; '.join(pays)}." if pays else f"{most} do not pay."]
    return " ".join(parts + ([f"No clear gain with {'; '.join(lost)}."] if lost else []))
