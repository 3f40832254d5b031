"""``manyhands train``: Fashion-MNIST on every device, from the data to the picture."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from manyhands.book import recipes as _recipes
from manyhands.book.recipes import MODELS, Recipes
from manyhands.cli import flags
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadRunFolder, BadSettings, BadShares, WorkerFailed
from manyhands.training import launcher
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data import fashion_mnist
from manyhands.training.options import Checkpoints, Limits, Step
from manyhands.training.schedules import one_cycle
from manyhands.training.trainer import BaseTrainer

_ON_GPU: dict[str, Any] = {"model": "resnet18", "epochs": 10, "batch_size": 256, "lr": 0.1}
_ON_CPU: dict[str, Any] = {"model": "lenet", "epochs": 4, "batch_size": 128, "lr": 0.05}
_EPOCHS_OF_SUBSET = 20  # of 4,000 images: as many as lenet needs for a test accuracy of 0.85
# The library's options that are the command's, too, and those whose flag has another name.
_TRAINER = ("devices", "max_epochs", "batch_size", "lr", "precision", "seed", "quiet", "run", "resume")
_TOPICS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "step": (Step, ("shares", "accumulate", "micro_batch_size", "batch_stats", "on_nan", "optimize")),
    **{kind.__name__.lower(): (kind, tuple(inspect.signature(kind).parameters)) for kind in (Limits, Checkpoints)},
}
_KEYS = {"every": "checkpoint_every", "keep": "keep_checkpoints"}  # in a run's options, where they differ
_KEYWORDS: dict[str, dict[str, Any]] = {
    "devices": {
        "help": "as devices= in Python: gpu (all of them), 2 (GPUs, else virtual CPU devices), gpu:0,gpu:1, cpu, cpu:2 "
        "(two virtual CPU devices), gpu:0,cpu; default: all GPUs, else the CPU"
    },
    "every": {"flag": "--checkpoint-every"},
    "keep": {"flag": "--keep-checkpoints"},
    "max_epochs": {"flag": "--epochs", "default_text": f"10 on a GPU, else 4; {_EPOCHS_OF_SUBSET} on the small subset"},
    "batch_size": {"default_text": "256 on a GPU, else 128"},
    "lr": {
        "type": flags.number,
        "metavar": "RATE",
        "help": "peak learning rate of the cycle; default: 0.1, on a CPU 0.05",
    },
    "seed": {"type": int},
    "shares": {"help": "each device's part of a batch: 0.7,0.3 or measured; default: equal parts"},
    "run": {"type": flags.folder, "metavar": "FOLDER", "default_text": "one under runs/, named by the time"},
    "resume": {"type": flags.folder, "metavar": "RUN", "default_text": "a new run"},
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains on Fashion-MNIST: resnet18 for 10 epochs on GPUs, lenet for 4 epochs without one. If the full data set "
        f"is missing, it trains {_EPOCHS_OF_SUBSET} epochs on the small subset in manyhands."
    )
    group = parser.add_argument_group("model, data and training")
    option = group.add_argument
    option("--framework", choices=FRAMEWORKS, help="default: the resumed run's, else the first that is installed")
    option("--model", choices=MODELS, help="default: resnet18 on a GPU, else lenet")
    option(
        "--data",
        type=flags.folder,
        metavar="FOLDER",
        help="folder with the four IDX files; default: $MANYHANDS_DATA, the user cache, a download, else the "
        "small subset",
    )
    defaults = flags.add_options(group, BaseTrainer, _TRAINER, _KEYWORDS)
    # How a run is trained. A resumed run keeps all of these unless the user sets them again.
    always = {"devices": "all", "data": None} | {name: defaults[name] for name in ("seed", "precision")}
    for title, (topic, names) in _TOPICS.items():
        always |= flags.add_options(parser.add_argument_group(title), topic, names, _KEYWORDS)
    parser.set_defaults(always=always, run_command=run)


def run(options: argparse.Namespace) -> int:
    resumed = _run_to_resume(options)
    begun = {} if resumed is None else _options_of_run(resumed)
    for name in ("framework", "model"):
        if begun and getattr(options, name) not in (None, begun[name]):
            raise BadSettings(
                f"--{name} {getattr(options, name)}: {resumed} was started with --{name} {begun[name]}. Leave it out, "
                "or start a new run (manyhands convert makes a run for another framework)"
            )
    framework = options.framework or begun.get("framework") or flags.framework_or_first(None)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    names = (*options.always, *_ON_CPU)
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "devices" in asked:
        asked.setdefault("shares", None)  # the run's shares were for its own devices
    chosen = {**options.always, **begun, **asked}
    devices = mh.Trainer(1, devices=chosen["devices"]).device_names  # raises if a device does not exist
    chosen = {**(_ON_GPU if any(name.startswith("gpu") for name in devices) else _ON_CPU), **chosen}
    data = fashion_mnist.load(chosen["data"])
    chosen["data"] = str(Path(str(chosen["data"] or data.directory)).absolute())
    if "epochs" not in (begun | asked) and (chosen["max_steps"] or data.subset):  # the cycle needs an end
        chosen["epochs"] = None if chosen["max_steps"] else _EPOCHS_OF_SUBSET

    def say(text: object) -> None:
        if launcher.is_first():
            print(text)

    say(f"data: {data.source}; {len(data.train.labels):,} to train on, {len(data.test.labels):,} to test with")
    say(f"{chosen['model']} on {', '.join(devices)}")
    # Under torchrun, all processes take the options of the first one, and the folder that it creates.
    run = resumed or options.run
    name, chosen = recipes.from_first(lambda: (str(run or RunFolder.create(Path("runs")).path), chosen))
    folder = Path(name).absolute()
    try:
        resume = None if resumed is None else "auto"
        trainer = mh.Trainer(**_trainer_options(chosen, recipes), run=folder, resume=resume, quiet=options.quiet)
        trainer.run_config = {"train": {**chosen, "framework": framework}}
        result = trainer.fit(recipes.model(chosen["model"], chosen["seed"]), recipes.data(data, chosen["batch_size"]))
    except BaseException as error:
        if launcher.is_first():
            _leave(folder, interrupted=isinstance(error, (KeyboardInterrupt, SystemExit, WorkerFailed)))
        raise
    for text in (*result.notes, f"run: {folder}", result):
        say(text)
    for missing in result.unsaved:  # a full disk has lost it
        print(f"manyhands: not all of the run is in its folder: {missing}", file=sys.stderr)
    return 1 if result.unsaved else 0


# What is trained


def _run_to_resume(options: argparse.Namespace) -> Path | None:
    """The folder of the run that is resumed; ``--resume auto`` is the one in ``--run``, if there is one."""
    folder: Path | None = options.resume
    if folder == Path("auto"):
        if options.run is None:
            raise BadSettings("--resume auto continues the run in --run FOLDER: give --run, or the run as --resume RUN")
        return options.run if RunFolder(options.run).config_path.exists() else None
    if folder is not None and options.run is not None and options.run.resolve() != folder.resolve():
        raise BadSettings(f"--run {options.run} --resume {folder}: a run continues in its own folder")
    return folder


def _options_of_run(folder: Path) -> dict[str, Any]:
    """The options that the resumed run was started with."""
    if not launcher.is_first() and not RunFolder(folder).config_path.exists():  # on another machine
        return {}
    begun: dict[str, Any] = RunFolder.open(folder).config.get("train", {})
    if begun.get("model") not in MODELS:
        raise BadRunFolder(
            f"--resume {folder}: manyhands train did not start this run, so only your own program knows its "
            f"model. Continue it there: Trainer(run={str(folder)!r}, resume='auto')"
        )
    return {"framework": FRAMEWORKS[0], **begun}


def _trainer_options(chosen: dict[str, Any], recipes: Recipes) -> dict[str, Any]:
    chosen = {**chosen, "shares": parse_shares(chosen["shares"])}
    options = {name: chosen[name] for name in ("devices", "seed", "precision")}
    for topic, (kind, names) in _TOPICS.items():
        options[topic] = kind(**{name: chosen[_KEYS.get(name, name)] for name in names})
    return {
        **options,
        "max_epochs": chosen["epochs"],
        "optimizer": recipes.nesterov(chosen["lr"]),
        "schedule": one_cycle,
    }


def parse_shares(text: str | None) -> Any:
    if text is None or text == "measured":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise BadShares(f"--shares {text}: write one number per device, as 0.7,0.3, or measured") from None


# What is said


def _leave(folder: Path, *, interrupted: bool) -> None:
    """After an error: remove an empty folder; after an interrupt, print how to continue."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # only if it is empty
    if not interrupted:
        return
    if store.latest(RunFolder(folder).checkpoints) is not None:
        print(f"continue from the last checkpoint with: manyhands train --resume {folder}", file=sys.stderr)
    else:
        print("there was no checkpoint yet; --checkpoint-every STEPS writes more of them", file=sys.stderr)
