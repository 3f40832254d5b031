"""The loops that manyhands is measured against, each as its documentation would have it.

All of them start from the same weights, with plain SGD, the same learning rate and the same samples, and shuffle them
in their own way. Every one gives the seconds of each epoch (the device has finished when the clock stops), the mean
training loss of each epoch, and the trained net. Where a documented option makes a peer faster, it is on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from manyhands import machine
from manyhands.book import torch as models

WORKERS = 4


@dataclass
class Problem:
    """What every row trains: bytes of grey images and their labels, on the host."""

    model: str
    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    device: torch.device
    batch_size: int
    lr: float
    epochs: int  # with the one that warms up
    seed: int = 0

    def net(self) -> nn.Module:
        """A new net, with the same weights every time."""
        return models.initialise(models.MODELS[self.model](), self.seed)

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """What the net gets for some rows of ``images``."""
        return as_images(rows)

    @property
    def bf16_is_quick(self) -> bool:
        if self.device.type == "cuda":
            return torch.cuda.is_bf16_supported()
        return "amx_bf16" in machine.host_features()


@dataclass
class Outcome:
    net: nn.Module
    seconds: list[float]
    losses: list[float]
    notes: list[str] = field(default_factory=list)


class Stopwatch:
    """Seconds between start and stop, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self._since = 0.0

    def start(self) -> None:
        synchronize(self.device)
        self._since = time.perf_counter()

    def stop(self) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._since)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_images(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.unsqueeze(1).float().div_(255)


def in_layout(rows: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """Images in this layout; anything else as it is."""
    return rows.contiguous(memory_format=layout) if rows.dim() == 4 else rows


# --- the book


class FashionMnist(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's, without its detour over PIL: one sample at a time, transformed as ``ToTensor`` does."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.images[number].unsqueeze(0).float().div(255), int(self.labels[number])


def book_batch(
    net: nn.Module, X: torch.Tensor, y: torch.Tensor, trainer: torch.optim.Optimizer, device: torch.device
) -> tuple[float, float]:
    """The book's ``train_batch``: one step; the sums of losses and of right answers, read at once."""
    X, y = X.to(device), y.to(device)
    net.train()
    trainer.zero_grad()
    answer = net(X)
    loss = cross_entropy(answer, y)
    loss.backward()
    trainer.step()
    return loss.item() * len(y), (answer.argmax(1) == y).sum().item()


def book(problem: Problem) -> Outcome:
    """The chapter on several GPUs: ``nn.DataParallel``, four worker processes, float32."""
    loader = DataLoader(
        FashionMnist(problem.images, problem.labels), problem.batch_size, shuffle=True, num_workers=WORKERS
    )
    on_gpu = problem.device.type == "cuda"
    net = nn.DataParallel(problem.net(), device_ids=[problem.device] if on_gpu else None).to(problem.device)
    trainer = torch.optim.SGD(net.parameters(), lr=problem.lr)
    watch, losses = Stopwatch(problem.device), []
    for _ in range(problem.epochs):
        watch.start()
        sums = [0.0, 0.0]
        for X, y in loader:
            for place, value in enumerate(book_batch(net, X, y, trainer, problem.device)):
                sums[place] += value
        watch.stop()
        losses.append(sums[0] / len(problem.images))
    return Outcome(net.module, watch.seconds, losses)


# --- Lightning and Accelerate


def loader_in_memory(problem: Problem) -> DataLoader[Any]:
    """The loader that both get: images as numbers already, workers that stay, pinned memory on a GPU."""
    return DataLoader(
        TensorDataset(as_images(problem.images), problem.labels.long()),
        problem.batch_size,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        pin_memory=problem.device.type == "cuda",
    )


def lightning(problem: Problem, precision: str) -> Outcome:
    import lightning

    watch, losses = Stopwatch(problem.device), []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            X, y = batch
            loss = cross_entropy(self.net(X), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=problem.lr)

    class Clock(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            watch.start()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            watch.stop()
            losses.append(float(trainer.callback_metrics["train_loss"]))

    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="gpu" if problem.device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=problem.epochs,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, loader_in_memory(problem))
    return Outcome(classifier.net, watch.seconds, losses)


def accelerate(problem: Problem, precision: str) -> Outcome:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(reset_partial_state=True)  # two precisions in one process need two states
    on_gpu = problem.device.type == "cuda"
    accelerator = Accelerator(
        mixed_precision=precision, cpu=not on_gpu, dataloader_config=DataLoaderConfiguration(non_blocking=on_gpu)
    )
    model = problem.net()
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=problem.lr), loader_in_memory(problem)
    )
    watch, losses = Stopwatch(problem.device), []
    for _ in range(problem.epochs):
        watch.start()
        net.train()
        total = torch.zeros((), device=accelerator.device)
        for X, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(X), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach().float() * len(y)
        watch.stop()
        losses.append(float(total) / len(problem.images))
    trained = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    accelerator.free_memory()
    return Outcome(trained, watch.seconds, losses)


# --- by hand


def as_it_is(net: nn.Module) -> nn.Module:
    return net


def eager(
    problem: Problem,
    *,
    bf16: bool,
    channels_last: bool,
    fused: bool,
    benchmark: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = as_it_is,
) -> Outcome:
    """A loop by hand: the bytes live on the device, the loss is summed there, the host waits once an epoch."""
    device = problem.device
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net = problem.net().to(device).to(memory_format=layout)  # type: ignore[call-overload]
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=problem.lr, fused=fused)
    images, labels = problem.images.to(device), problem.labels.long().to(device)
    watch, losses = Stopwatch(device), []
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, benchmark
    for _ in range(problem.epochs):
        watch.start()
        total = torch.zeros((), device=device)
        for part in torch.randperm(len(images), device=device).split(problem.batch_size):
            X, y = in_layout(problem.inputs(images[part]), layout), labels[part]
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = cross_entropy(wrapped(X), y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(part)
        watch.stop()
        losses.append(float(total) / len(images))
    torch.backends.cudnn.benchmark = before
    return Outcome(net, watch.seconds, losses)


def tuned(problem: Problem, wrap: Callable[[nn.Module], nn.Module] = as_it_is) -> Outcome:
    """Everything a careful person switches on, short of a CUDA graph."""
    quick = problem.bf16_is_quick  # without units for bf16, channels_last is no gain on a CPU either
    laid = quick or problem.device.type == "cuda"
    return eager(problem, bf16=quick, channels_last=laid, fused=True, benchmark=True, wrap=wrap)


def compiled(problem: Problem) -> Outcome:
    """The same loop with the model compiled, and its graphs captured by the compiler."""
    return tuned(problem, lambda net: torch.compile(net, mode="reduce-overhead"))  # type: ignore[return-value]


def graphed(problem: Problem, wrap: Callable[[nn.Module], nn.Module] = as_it_is) -> Outcome:
    """The same loop with forward, backward and update in one CUDA graph, as PyTorch's documentation has it.

    The last batch of an epoch is shorter, and runs without the graph.
    """
    device = problem.device
    net = problem.net().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=problem.lr, fused=True)
    images, labels = problem.images.to(device), problem.labels.long().to(device)
    total = torch.zeros((), device=device)

    def step(model: nn.Module, part: torch.Tensor) -> None:
        X, y = in_layout(problem.inputs(images[part]), torch.channels_last), labels[part]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach() * len(part))

    watch, losses, graph = Stopwatch(device), [], None
    place = torch.arange(problem.batch_size, device=device)
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)  # warm-up and capture are on one that is not the default
    for _ in range(problem.epochs):
        watch.start()
        total.zero_()
        for number, part in enumerate(torch.randperm(len(images), device=device).split(problem.batch_size)):
            if len(part) < problem.batch_size or (graph is None and number < 3):  # three steps warm it up
                step(net if len(part) < problem.batch_size else wrapped, part)
                continue
            place.copy_(part)
            if graph is None:
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):  # computes nothing yet
                    step(wrapped, place)
            graph.replay()
        watch.stop()
        losses.append(float(total) / len(images))
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    torch.backends.cudnn.benchmark = before
    return Outcome(net, watch.seconds, losses)


def ddp(problem: Problem) -> Outcome:
    """The same loop in ``DistributedDataParallel``, a world of one: what memory its buckets of gradients take."""
    on_gpu = problem.device.type == "cuda"

    def wrap(net: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net, device_ids=[problem.device] if on_gpu else None)

    with tempfile.TemporaryDirectory() as directory:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{directory}/store", rank=0, world_size=1
        )
        try:
            return tuned(problem, wrap)
        finally:
            distributed.destroy_process_group()


# --- what all rows share


@torch.no_grad()
def test_accuracy(net: nn.Module, problem: Problem) -> float:
    """Of a trained net, in float32: the same for every row."""
    net = net.to(problem.device).eval()
    right = 0
    for X, y in zip(problem.test_images.split(1000), problem.test_labels.split(1000), strict=True):
        answer = net(problem.inputs(X.to(problem.device))).argmax(1)
        right += int((answer == y.to(problem.device)).sum())
    return right / len(problem.test_images)


PEERS: dict[str, Callable[[Problem], Outcome]] = {
    "book": book,
    "lightning": lambda problem: lightning(problem, "32-true"),
    "lightning-bf16": lambda problem: lightning(problem, "bf16-mixed"),
    "accelerate": lambda problem: accelerate(problem, "no"),
    "accelerate-bf16": lambda problem: accelerate(problem, "bf16"),
    "eager": tuned,
    "compiled": compiled,
    "graph": graphed,
    "graph-compiled": lambda problem: graphed(problem, torch.compile),  # type: ignore[arg-type]
    "ddp": ddp,
}


# Rows that add something to another one, which should make them faster.
WEAKER = {"compiled": "eager", "graph": "eager", "graph-compiled": "graph"}


def why_not(row: str, problem: Problem) -> str | None:
    """The reason why a row cannot be measured here; None if it can."""
    package = row.split("-")[0]
    if package in ("lightning", "accelerate") and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if package == "graph" and problem.device.type != "cuda":
        return "a CUDA graph needs a GPU"
    if row.endswith("-bf16") and not problem.bf16_is_quick:
        return "this processor has no units for bf16, and emulates it many times slower"
    return None


def versions() -> Iterator[str]:
    for package in ("torch", "lightning", "accelerate"):
        if importlib.util.find_spec(package):
            yield f"{package} {importlib.metadata.version(package)}"


def hush() -> None:
    """Advice that the peers print at every start; what a run depends on is in the table."""
    import logging

    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*worker processes.*")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
