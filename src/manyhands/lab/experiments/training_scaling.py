"""Two nets on Fashion-MNIST on one device, two devices, and so on, with the same global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.amounts import count_of
from manyhands.book import recipes
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Sweep, Times, Trial
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
    *_, most = sweep.methods()
    sentence = sweep.in_words(most, "1 device", most=int(most.split()[0]))
    if not bench.quick:  # after three epochs on few images, accuracies teach nothing
        best = max(accuracies, key=lambda job: accuracies[job][0])
        apart = max(max(values) - min(values) for values in accuracies.values())
        sentence += (
            f" Accuracies on 1 device and on more are at most {apart:.3f} apart; the best, {accuracies[best][0]:.3f}, "
            f"is that of {best}."
        )
    plots = []
    for model in dict.fromkeys(job.model for job in sweep):
        lowest = {job.batch_size: times for job, times in reversed(sweep.items()) if job.model == model}
        plots.append(Sweep(reversed(lowest.items())).lines(f"Time of an epoch, {model}", "batch size"))
    return Answer(sentence, [sweep.table("job", "Time of an epoch", gain=most, to="1 device")], plots, notes)


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
