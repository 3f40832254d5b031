"""Training from a DataLoader: manyhands beside Lightning, Accelerate and loops by hand, all in bfloat16.

    python benchmarks/from_loader.py                               every net and row, on the first GPU
    python benchmarks/from_loader.py --nets resnet18,gpt2 --rows eager,manyhands
    python benchmarks/from_loader.py --tiny                        small sizes on any device: no figures to quote

The loader gathers a batch at once (`__getitems__`), bytes of images become numbers on the device, two workers, pinned
memory. The row `loader` only copies its batches to the device: no other row from the loader can be faster. Rows are at
their strongest: by hand with fused optimizers, channels_last, copies from pinned memory beside the step, and static
buffers for the graphs; `graph-compiled` is `torch.compile` in one CUDA graph for each shape of a batch.
`manyhands-resident` has the same data on the GPU.

Every row has a process of its own; compilers' caches are filled before (`--fill`, which runs first). A process gets
the GPU for itself while it trains: the others load their libraries meanwhile. Milliseconds a step: the median of the
timed epochs, after a first one. All rows make the same steps on the same data, in an order of their own; the loss of
the last epoch shows that they compute the same.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import apart
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

CLASSES = 10
LENGTHS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Net:
    """A net, its data set, and how many of its samples are a batch."""

    make: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    batch: int
    images: bool = True
    adam: bool = False


class Bytes(nn.Module):
    """A net for images, given their bytes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x
        return self.net(x.float().div(255).contiguous(memory_format=torch.channels_last))  # type: ignore[no-any-return]


class Images(Dataset[Any]):
    """``count`` images, of which 1,024 are different; a batch is gathered at once."""

    def __init__(self, count: int, shape: tuple[int, ...], classes: int = CLASSES) -> None:
        generator = torch.Generator().manual_seed(0)
        different = min(count, 1024)
        self.count, self.images = count, torch.randint(256, (different, *shape), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(classes, (different,), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: list[int]) -> Any:
        rows = torch.tensor(numbers) % len(self.images)
        return self.images[rows], self.labels[rows]

    def all_of(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(self.count) % len(self.images)
        return self.images[rows], self.labels[rows]


class Texts(Dataset[Any]):
    """Token sequences of different lengths; a batch is padded to one of five."""

    def __init__(self, count: int, words: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.count, self.scale = count, scale
        self.tokens = torch.randint(words, (count, round(max(LENGTHS) * scale)), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        length = round(LENGTHS[numbers[0] % len(LENGTHS)] * self.scale)
        tokens, mask = self.tokens[numbers, :length], torch.ones(len(numbers), length, dtype=torch.int64)
        mask[:, round(length * 0.9) :] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask > 0, tokens, -100)}


class OfOneLength:
    """Batches of samples of one length, in a shuffled order."""

    def __init__(self, count: int, batch: int) -> None:
        self._batches = [
            list(range(kind, count, len(LENGTHS)))[first : first + batch]
            for kind in range(len(LENGTHS))
            for first in range(0, count // len(LENGTHS), batch)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(1))
        return (self._batches[number] for number in order.tolist())


def whole(batch: Any) -> Any:
    """The collate function: the data set has made the batch."""
    return batch


def nets(tiny: bool, steps: int) -> dict[str, Net]:
    import suite_programs as suite

    from manyhands.book import torch as book

    def resnet18() -> nn.Module:
        return Bytes(book.initialise(book.resnet18(), 0))

    side, batch = (32, 4) if tiny else (224, 128)
    of_resnet, of_unet = (4, 4) if tiny else (256, 32)
    found = {"resnet18": Net(resnet18, lambda: Images(steps * of_resnet, (28, 28)), of_resnet)}
    found["unet"] = Net(
        lambda: Bytes(suite.UNet(8 if tiny else 32)), lambda: Images(steps * of_unet, (3, 64, 64), 4), of_unet
    )
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision import models

        found["resnet50"] = Net(
            lambda: Bytes(models.resnet50(num_classes=CLASSES)), lambda: Images(steps * batch, (3, side, side)), batch
        )
        found["vit"] = Net(
            lambda: Bytes(models.vit_b_16(num_classes=CLASSES, image_size=side)),
            lambda: Images(steps * batch // 2, (3, side, side)),
            batch // 2,
            adam=True,
        )
    if importlib.util.find_spec("transformers") is not None:
        import transformers as hf

        words, layers, width = (100, 2, 64) if tiny else (30_000, 12, 768)
        config = hf.GPT2Config(vocab_size=words, n_embd=width, n_layer=layers, n_head=4 if tiny else 12)
        config.use_cache = False
        per_batch = 4 if tiny else 16
        found["gpt2"] = Net(
            lambda: hf.GPT2LMHeadModel(config),
            lambda: Texts(steps * per_batch, words, 0.1 if tiny else 1.0),
            per_batch,
            images=False,
            adam=True,
        )
    return found


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        return net(**batch).loss  # type: ignore[no-any-return]
    return cross_entropy(net(batch[0]).float(), batch[1])


def optimizer_of(net: Net, parameters: Any) -> torch.optim.Optimizer:
    fused = torch.cuda.is_available()
    if net.adam:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=fused, capturable=fused)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=fused)


def loader_of(net: Net, data: Dataset[Any]) -> DataLoader[Any]:
    options: dict[str, Any] = {
        "num_workers": 2,
        "persistent_workers": True,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": whole,
    }
    if isinstance(data, Texts):
        return DataLoader(data, batch_sampler=OfOneLength(len(data), net.batch), **options)
    return DataLoader(data, net.batch, shuffle=True, **options)


@dataclass
class Run:
    """What each row does: it trains for some epochs, and writes down when each one ended."""

    net: Net
    epochs: int
    device: torch.device
    seconds: list[float]
    losses: list[float]
    note: str = ""

    def placed(self) -> nn.Module:
        torch.manual_seed(0)
        net = self.net.make().to(self.device)
        return net.to(memory_format=torch.channels_last) if self.net.images else net  # type: ignore[call-overload]

    def on_device(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return {name: part.to(self.device, non_blocking=True) for name, part in batch.items()}
        return tuple(part.to(self.device, non_blocking=True) for part in batch)

    @contextlib.contextmanager
    def epoch(self) -> Iterator[list[torch.Tensor]]:
        losses: list[torch.Tensor] = []
        synchronize()
        start = time.perf_counter()
        yield losses
        synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(torch.stack(losses).float().mean()))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Rows


def loader_alone(run: Run) -> None:
    loader = loader_of(run.net, run.net.data())
    for _ in range(run.epochs):
        with run.epoch() as losses:
            for from_loader in loader:
                run.on_device(from_loader)
            losses.append(torch.zeros(()))


def by_hand(run: Run, wrap: Callable[[Any], Any] = whole) -> None:
    model = run.placed()
    optimizer = optimizer_of(run.net, model.parameters())
    loader, loss_function = loader_of(run.net, run.net.data()), wrap(loss_of)
    for _ in range(run.epochs):
        with run.epoch() as losses:
            for from_loader in loader:
                batch = run.on_device(from_loader)
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(run.device.type, torch.bfloat16):
                    loss = loss_function(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())


def in_graphs(run: Run, wrap: Callable[[Any], Any] = whole) -> None:
    """The whole step in one CUDA graph for each shape of a batch, with static buffers."""
    model, pool = run.placed(), torch.cuda.graph_pool_handle()
    optimizer = optimizer_of(run.net, model.parameters())
    loader, loss_function = loader_of(run.net, run.net.data()), wrap(loss_of)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    graphs: dict[Any, Any] = {}
    warm: dict[Any, int] = {}

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_function(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(run.epochs):
        with run.epoch() as losses:
            for from_loader in loader:
                batch = run.on_device(from_loader)
                parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
                key = tuple(part.shape for part in parts)
                if warm.get(key, 0) < 3:
                    warm[key] = warm.get(key, 0) + 1
                    losses.append(step(batch))
                    continue
                if key not in graphs:
                    static = [torch.empty_like(part) for part in parts]
                    again = dict(zip(batch, static, strict=True)) if isinstance(batch, dict) else tuple(static)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        loss = step(again)
                    graphs[key] = graph, static, loss
                graph, static, loss = graphs[key]
                torch._foreach_copy_(static, parts)
                graph.replay()
                losses.append(loss.clone())
    torch.cuda.set_stream(torch.cuda.default_stream())


def lightning(run: Run) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.placed()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(run.net, self.parameters())

    losses: list[torch.Tensor] = []

    class Clock(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            losses.clear()
            synchronize()
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            synchronize()
            run.seconds.append(time.perf_counter() - self.start)
            run.losses.append(float(torch.stack(losses).float().mean()))

    trainer = lightning.Trainer(
        accelerator="gpu" if run.device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=run.epochs,
        precision="bf16-mixed",
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), loader_of(run.net, run.net.data()))


def accelerate(run: Run) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    on_gpu = run.device.type == "cuda"
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=not on_gpu, dataloader_config=DataLoaderConfiguration(non_blocking=on_gpu)
    )
    placed = run.placed()
    model, optimizer, loader = accelerator.prepare(
        placed, optimizer_of(run.net, placed.parameters()), loader_of(run.net, run.net.data())
    )
    for _ in range(run.epochs):
        with run.epoch() as losses:
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.detach())


def manyhands(run: Run, *, optimize: Any = "auto", resident: bool = False) -> None:
    from manyhands import torch as mh

    data = run.net.data()
    torch.manual_seed(0)
    model = run.net.make()
    trainer = mh.Trainer(
        run.epochs,
        devices=["gpu:0" if run.device.type == "cuda" else "cpu"],
        batch_size=run.net.batch,
        optimizer=lambda parameters: optimizer_of(run.net, parameters),
        precision="bf16",
        step=mh.Step(optimize=optimize),
        quiet=True,
        **({} if isinstance(data, Texts) else {"loss": cross_entropy}),
    )
    given = data.all_of() if resident and isinstance(data, Images) else loader_of(run.net, data)
    result = trainer.fit(model, given)
    run.seconds += [row["seconds"] for row in result.rows]
    run.losses += [row["train_loss"] for row in result.rows]
    run.note = next((note for note in result.notes if "step" in note), "")


ROWS: dict[str, Callable[[Run], None]] = {
    "loader": loader_alone,
    "lightning": lightning,
    "accelerate": accelerate,
    "eager": by_hand,
    "compiled": lambda run: by_hand(run, lambda function: torch.compile(function, dynamic=False)),
    "graph": in_graphs,
    "graph-compiled": lambda run: in_graphs(run, lambda function: torch.compile(function, dynamic=False)),
    "manyhands": manyhands,
    "manyhands-max": lambda run: manyhands(run, optimize="max"),
    "manyhands-resident": lambda run: manyhands(run, resident=True),
    "manyhands-plain": lambda run: manyhands(run, optimize="off"),
}
COMPILED = ("compiled", "graph-compiled", "manyhands-max")


def measure(name: str, row: str, flags: argparse.Namespace) -> dict[str, Any]:
    net = nets(flags.tiny, flags.steps)[name]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run = Run(net, 2 if flags.fill_one else 1 + flags.epochs, device, [], [])
    if row in ("lightning", "accelerate"):
        __import__(row)
    with apart.turn():
        ROWS[row](run)
    steps = flags.steps if not isinstance(net.data(), Texts) else len(OfOneLength(flags.steps * net.batch, net.batch))
    timed = [seconds / steps * 1e3 for seconds in run.seconds[1:]]
    return {
        "net": name,
        "row": row,
        "ms": statistics.median(timed),
        "least": min(timed),
        "loss": run.losses[-1],
        "first": run.seconds[0],
        "peak": torch.cuda.max_memory_reserved() / 1e6 if torch.cuda.is_available() else 0,
        "note": run.note,
    }


def child(name: str, row: str, flags: argparse.Namespace, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A row; without variables for its process it only fills the compilers' caches."""
    fill = variables is None
    command = [__file__, "--one", f"{name}/{row}", "--steps", str(len(LENGTHS) if fill else flags.steps)]
    command += ["--epochs", str(flags.epochs)] + ["--tiny"] * flags.tiny + ["--fill-one"] * fill
    found = apart.measure(command, cache=f"{flags.cache}/{name}-{row}", **(variables or {}))
    return {"net": name, "row": row, **found}


def show(found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{found['net']:10}{found['row']:20} FAILED: {found['failed']}", flush=True)
        return
    print(
        f"{found['net']:10}{found['row']:20}{found['ms']:9.3f} ms (least {found['least']:.3f}), first epoch "
        f"{found['first']:.1f} s, {found['peak']:.0f} MB, loss {found['loss']:.4f} {found['note']}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="resnet18,unet,resnet50,vit,gpt2")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--steps", type=int, default=100, help="of an epoch: %(default)s")
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs, after a first: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--fill", action="store_true", help="only fill the compilers' caches")
    parser.add_argument("--cache", default=f"{tempfile.gettempdir()}/from-loader-caches")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--fill-one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        print(json.dumps(measure(*flags.one.split("/"), flags)))
        return 0
    hardware = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    print(f"{hardware}; Python {platform.python_version()}, torch {torch.__version__}; {datetime.date.today()}")
    chosen = [name for name in flags.nets.split(",") if name in nets(flags.tiny, flags.steps)]
    pairs = [(name, row) for name in chosen for row in flags.rows.split(",")]
    missing = [pair for pair in pairs if pair[1] in COMPILED and not os.path.exists(f"{flags.cache}/{'-'.join(pair)}")]
    apart.fill(missing, lambda pair: child(*pair, flags))
    if not flags.fill:
        for _, found in apart.by_turns(pairs, lambda pair, variables: child(*pair, flags, variables)):
            show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
