"""``manyhands train``: Fashion-MNIST on every device, from the data to the picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from manyhands.errors import BadDevice, BadShares


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on Fashion-MNIST on every device there is",
        description="Train on Fashion-MNIST. Without a GPU: a model that is ready in about a minute on two cores.",
    )
    option = parser.add_argument
    option(
        "--model", choices=["resnet18", "lenet", "small-resnet", "mlp"], help="default: resnet18 on a GPU, else lenet"
    )
    option("--devices", default="all", help="all, 2 (GPUs), gpu:0,gpu:1, cpu, cpu:2 (two processes), gpu:0,cpu")
    option("--batch-size", type=int, help="samples of one step over all devices together")
    option("--lr", type=float, help="the largest learning rate of the cycle")
    option("--epochs", type=int)
    option("--shares", help="how a batch is divided: 0.7,0.3 or measured; default: evenly")
    option("--seed", type=int, default=0)
    option("--precision", choices=["auto", "fp32", "bf16", "fp64"], default="auto")
    option("--batch-stats", choices=["per_device", "global"], default="per_device")
    option("--plain", action="store_true", help="plain steps only: no CUDA graph, no compiling")
    option("--compile", action=argparse.BooleanOptionalAction, help="compile kernels; default: where it pays")
    option("--data", type=Path, help="a folder with the four IDX files")
    option("--run", type=Path, help="the run folder; default: a new one under runs/")
    option("--resume", type=Path, metavar="RUN", help="go on with that run from its last checkpoint")
    option("--checkpoint-every", type=int, metavar="STEPS", help="default: at the end of every epoch")
    option("--quiet", action="store_true", help="no progress display")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    from manyhands import torch as mh
    from manyhands.training import fashion_mnist, plot
    from manyhands.training.torch import datasets, recipes
    from manyhands.training.torch.models import MODELS, initialise

    devices, ranks = parse_devices(options.devices, mh.num_gpus())
    on_gpu = any(not name.startswith("cpu") for name in devices)
    model = options.model or ("resnet18" if on_gpu else "lenet")
    if options.model is None and not on_gpu:
        print("no GPU: training lenet, which takes about a minute on two cores (--model resnet18 for the book's)")
    data = fashion_mnist.load(options.data)
    print(f"data: {data.source}; {len(data.train.labels):,} to train on, {len(data.test.labels):,} to test with")
    folder = options.resume or options.run or _new_run()
    rate = options.lr if options.lr is not None else (0.1 if on_gpu else 0.05)
    net = MODELS[model](num_classes=10)
    initialise(net, options.seed)
    size = options.batch_size or (256 if on_gpu else 128)
    epochs = options.epochs or (10 if on_gpu else recipes.epochs_in_a_minute(net, size, len(data.train.labels)))
    if options.epochs is None and not on_gpu:
        print(f"{epochs} epochs: about a minute here (--epochs for another number)")
    trainer = mh.Trainer(
        epochs,
        devices=devices,
        ranks_per_device=ranks,
        lr=rate,
        optimizer=recipes.Nesterov(rate),
        schedule=recipes.one_cycle,
        shares=parse_shares(options.shares),
        seed=options.seed,
        precision=options.precision,
        batch_stats=options.batch_stats,
        fast=not options.plain,
        compile=options.compile,
        run=folder,
        resume="auto",
        checkpoint_every=options.checkpoint_every,
        quiet=options.quiet,
    )
    result = trainer.fit(net, datasets.of(data, size))
    for note in result.notes:
        print(note)
    picture = plot.curves(result.rows, folder / "curves.png", title=f"{model} on {', '.join(result.devices)}")
    print(f"run: {folder} (config.json, metrics.jsonl, checkpoints, {picture.name})")
    print(result)
    return 0


def parse_devices(text: str, gpus: int) -> tuple[list[str], int]:
    """The names of the devices, and how many ranks each gets.

    >>> parse_devices("all", gpus=2)
    (['gpu:0', 'gpu:1'], 1)
    >>> parse_devices("cpu:2", gpus=0)
    (['cpu'], 2)
    """
    text = text.strip().lower()
    if text == "all":
        return [f"gpu:{i}" for i in range(gpus)] or ["cpu"], 1
    if text.isdecimal():
        if not 1 <= int(text) <= gpus:
            raise BadDevice(
                f"--devices {text}: there are {gpus} GPUs here; cpu:{text} makes {text} processes on the CPU"
            )
        return [f"gpu:{i}" for i in range(int(text))], 1
    kind, _, count = text.partition(":")
    if kind == "cpu" and count:
        if not count.isdecimal() or not 1 <= int(count) <= 64:
            raise BadDevice(f"--devices {text}: write cpu, or cpu:2 for two processes on the CPU")
        return ["cpu"], int(count)
    return [part.strip() for part in text.split(",")], 1


def parse_shares(text: str | None) -> Any:
    if text is None or text == "measured":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise BadShares(f"--shares {text}: write one number per device, as 0.7,0.3, or measured") from None


def _new_run() -> Path:
    from manyhands.training.run_folder import RunFolder

    run = RunFolder.create(Path("runs"))
    run.config = {}
    return run.path
