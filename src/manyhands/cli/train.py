"""``manyhands train``: Fashion-MNIST on every device, from the data to the picture."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.device import FRAMEWORKS
from manyhands.errors import BadDevice, BadShares, WorkerFailed, WrongCheckpoint

if TYPE_CHECKING:
    from manyhands.training.recipes import Recipes
    from manyhands.training.settings import Settings


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on Fashion-MNIST on every device there is",
        description="Train on Fashion-MNIST. Without a GPU: a model that is ready in about a minute on two cores.",
    )
    option = parser.add_argument
    option("--framework", choices=FRAMEWORKS, help="default: that of the resumed run, else the first that is installed")
    option(
        "--model", choices=["resnet18", "lenet", "small-resnet", "mlp"], help="default: resnet18 on a GPU, else lenet"
    )
    option("--devices", default="all", help="all, 2 (GPUs), gpu:0,gpu:1, cpu, cpu:2 (two made of the CPU), gpu:0,cpu")
    option("--batch-size", type=int, help="samples of one step over all devices together")
    option("--lr", type=float, help="the largest learning rate of the cycle")
    option("--epochs", type=int)
    option("--shares", help="how a batch is divided: 0.7,0.3 or measured; default: evenly")
    option("--seed", type=int, help="of the weights and the order of samples; default 0")
    option("--precision", choices=["auto", "fp32", "bf16", "fp64"], help="default: auto")
    option("--batch-stats", choices=["per_device", "global"], help="default: per_device")
    option("--plain", action="store_true", help="plain steps only: no CUDA graph, no compiling")
    option("--compile", action=argparse.BooleanOptionalAction, help="compile kernels; default: where it pays")
    option("--parallel", action=argparse.BooleanOptionalAction, help="plan the step as a whole; default: where it pays")
    option("--data", type=Path, help="a folder with the four IDX files")
    option("--run", type=Path, help="the run folder; default: a new one under runs/")
    option("--resume", type=Path, metavar="RUN", help="go on with that run from its last checkpoint")
    option("--checkpoint-every", type=int, metavar="STEPS", help="default: at the end of every epoch")
    option("--quiet", action="store_true", help="no progress display")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    from manyhands.training import fashion_mnist, launcher, plot
    from manyhands.training import recipes as _recipes

    begun_with = _framework_of(options.resume or options.run)
    framework = options.framework or begun_with or _first_installed()
    if begun_with not in (None, framework):
        raise WrongCheckpoint(
            f"{options.resume or options.run} is a run of {begun_with}: make one for {framework} of it with "
            f"manyhands convert {options.resume or options.run} --to {framework}"
        )
    asked = _checked(options)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    where = trainer_devices(options.devices, recipes, mh)
    devices = mh.Trainer(1, **where).device_names  # refuses those that are not there
    if not launcher.is_there():
        asked.check_devices(len(devices))
    data = fashion_mnist.load(options.data)
    samples = len(data.train.labels)
    say = print if launcher.is_first() else _say_nothing
    say(f"data: {data.source}; {samples:,} to train on, {len(data.test.labels):,} to test with")
    # Under torchrun all processes do the same job, in the folder that the first one makes.
    folder_name, chosen = recipes.from_first(lambda: _choose(options, framework, recipes, where, samples))
    folder = Path(folder_name)
    trainer = mh.Trainer(
        chosen["epochs"],
        **where,
        optimizer=recipes.nesterov(chosen["lr"]),
        schedule=_recipes.one_cycle,
        shares=parse_shares(options.shares),
        seed=chosen["seed"],
        precision=chosen["precision"],
        batch_stats=chosen["batch_stats"],
        fast=not options.plain,
        compile=options.compile,
        parallel=options.parallel,
        run=folder,
        resume="auto",
        checkpoint_every=chosen["checkpoint_every"],
        quiet=options.quiet,
    )
    try:
        result = trainer.fit(recipes.model(chosen["model"], chosen["seed"]), recipes.data(data, chosen["batch_size"]))
    except (KeyboardInterrupt, WorkerFailed):
        if launcher.is_first():
            _say_how_to_go_on(folder)
        raise
    for note in result.notes:
        say(note)
    if not launcher.is_first():
        return 0
    title = f"{chosen['model']} on {', '.join(result.devices)}"
    picture = plot.curves(result.rows, folder / "curves.png", title=title)
    print(f"run: {folder} (config.json, metrics.jsonl, checkpoints, {picture.name})")
    print(result)
    return 0


def _checked(options: argparse.Namespace) -> Settings:
    """What was asked for; what no job can have is refused before there is a folder of its run."""
    from manyhands.training.settings import Settings

    given = {
        "max_epochs": options.epochs,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "seed": options.seed,
        "shares": parse_shares(options.shares),
        "checkpoint_every": options.checkpoint_every,
    }
    return Settings(**{name: value for name, value in given.items() if value is not None})


def _first_installed() -> str:
    from manyhands.placement import installed

    return next((name for name in FRAMEWORKS if installed(name)), FRAMEWORKS[0])


def _framework_of(run: Path | None) -> str | None:
    """The framework that a run was begun with; None where there is no run yet."""
    from manyhands.training.run_folder import RunFolder

    if run is None or not RunFolder(run).config_path.exists():
        return None
    return str(RunFolder(run).config.get("train", {}).get("framework", FRAMEWORKS[0]))


def _say_how_to_go_on(folder: Path) -> None:
    from manyhands.training import checkpoint
    from manyhands.training.run_folder import RunFolder

    if checkpoint.latest(RunFolder(folder).checkpoints) is not None:
        print(f"go on from the last checkpoint with: manyhands train --resume {folder}", file=sys.stderr)
    else:
        print("there was no checkpoint yet; --checkpoint-every STEPS writes more of them", file=sys.stderr)


def _say_nothing(*_: object) -> None:
    pass


def _choose(
    options: argparse.Namespace, framework: str, recipes: Recipes, where: dict[str, Any], samples: int
) -> tuple[str, dict[str, Any]]:
    """The run folder, and what is trained there: as asked, as the resumed run was begun, or what suits the machine."""
    from manyhands.training.recipes import for_a_minute
    from manyhands.training.run_folder import RunFolder

    on_gpu = any(str(name).startswith("gpu") for name in where["devices"])
    run = RunFolder.open(options.resume) if options.resume else _run_at(options.run)
    before = run.config if run.config_path.exists() else {}
    begun = before.get("train", {})
    chosen: dict[str, Any] = {"model": "resnet18", "epochs": 10, "batch_size": 256, "lr": 0.1, "seed": 0}
    chosen |= {"precision": "auto", "batch_stats": "per_device", "checkpoint_every": None}
    if not on_gpu:
        chosen |= {"model": "lenet", "epochs": 4, "batch_size": 128, "lr": 0.05}
    asked = {name: value for name in chosen if (value := getattr(options, name)) is not None}
    chosen |= {**begun, **asked}
    if not on_gpu and not begun and "model" not in asked and "epochs" not in asked:
        chosen["model"], chosen["epochs"] = for_a_minute(recipes, chosen["batch_size"], samples)
        print(
            f"no GPU: {chosen['model']} for {_counted(chosen['epochs'], 'epoch')}, which takes about a minute here "
            "(--model resnet18 for the book's, --epochs for another number)"
        )
    run.config = {**before, "train": {**chosen, "framework": framework}}
    return str(run.path.absolute()), chosen


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def trainer_devices(text: str, recipes: Recipes, mh: Any) -> dict[str, Any]:
    """The trainer's options for what ``--devices`` asks."""
    # Virtual devices come before anything that would start a framework.
    if text.strip().lower().partition(":")[0] == "cpu" and "," not in text:
        return recipes.on_cpu(parse_devices(text, 0)[1])
    return {"devices": parse_devices(text, mh.num_gpus())[0]}


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


def _run_at(path: Path | None) -> Any:
    from manyhands.training.run_folder import RunFolder

    return RunFolder.at(path) if path else RunFolder.create(Path("runs"))
