"""``manyhands train``: Fashion-MNIST on every device, from the data to the picture."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from manyhands.amounts import counted
from manyhands.book import recipes as _recipes
from manyhands.book.recipes import MODELS, Recipes
from manyhands.cli import flags
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadRunFolder, BadSettings, BadShares, DataNotFound, WorkerFailed, WrongCheckpoint
from manyhands.training import launcher
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import FashionMnist
from manyhands.training.options import Checkpoints, Limits, Step
from manyhands.training.result import Result
from manyhands.training.schedules import one_cycle
from manyhands.training.settings import Settings
from manyhands.training.trainer import BaseTrainer

_ON_GPU: dict[str, Any] = {"model": "resnet18", "epochs": 10, "batch_size": 256, "lr": 0.1}
_ON_CPU: dict[str, Any] = {"model": "lenet", "epochs": 4, "batch_size": 128, "lr": 0.05}
_EPOCHS_OF_SUBSET = 20  # of 4,000 images: as many as lenet needs for a test accuracy of 0.85
# A resumed run cannot change these: the weights would not fit, or samples would be seen twice or never.
_FIXED = ("model", "batch_size", "seed")
# The library's options that are the command's, too, and those whose flag has another name.
_TRAINER = ("devices", "max_epochs", "batch_size", "lr", "precision", "seed", "quiet", "run", "resume")
_TOPICS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "step": (Step, ("shares", "accumulate", "micro_batch_size", "batch_stats", "on_nan", "optimize")),
    "limits": (
        Limits,
        ("max_steps", "max_time", "limit_batches", "limit_val_batches", "evaluate_every", "overfit_batches"),
    ),
    "checkpoints": (Checkpoints, ("every", "keep")),
}
_CALLED = {"max_epochs": "--epochs", "every": "--checkpoint-every", "keep": "--keep-checkpoints"}
_KEYWORDS: dict[str, dict[str, Any]] = {
    "devices": {
        "help": "as devices= in Python: gpu (all of them), 2 (GPUs, else virtual CPU devices), gpu:0,gpu:1, cpu, cpu:2 "
        "(two virtual CPU devices), gpu:0,cpu; default: all GPUs, else the CPU"
    },
    "max_epochs": {"default_text": f"10 on a GPU, else 4; {_EPOCHS_OF_SUBSET} on the small subset"},
    "batch_size": {"default_text": "256 on a GPU, else 128"},
    "lr": {
        "type": flags.rate,
        "metavar": "RATE",
        "help": "peak learning rate of the cycle; default: 0.1, on a CPU 0.05",
    },
    "seed": {"type": flags.whole_number(0)},
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
    defaults = flags.add_parameters(group, BaseTrainer, _TRAINER, _CALLED, **_KEYWORDS)
    # How a run is trained. A resumed run keeps all of these unless the user sets them again.
    always = {"devices": "all", "data": None} | {name: defaults[name] for name in ("seed", "precision")}
    for title, (topic, names) in _TOPICS.items():
        always |= flags.add_parameters(parser.add_argument_group(title), topic, names, _CALLED, **_KEYWORDS)
    parser.set_defaults(always=always)


def run(options: argparse.Namespace) -> int:
    from manyhands.training import launcher

    _find_run(options)
    begun = _begun(options)
    framework = options.framework or begun.get("framework") or flags.framework(options)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    asked = _asked(options, begun)
    chosen = {**options.always, **begun, **asked}
    where = {"devices": chosen["devices"]}
    devices = mh.Trainer(1, **where).device_names  # raises if a device does not exist
    chosen = {**(_ON_GPU if any(name.startswith("gpu") for name in devices) else _ON_CPU), **chosen}
    data = _load_data(chosen["data"], begun, options)
    samples = len(data.train.labels)
    chosen |= {"data": chosen["data"] or str(data.directory), "samples": samples}
    if "epochs" not in (begun | asked):
        if chosen["max_steps"] or chosen["max_time"]:
            chosen["epochs"] = None
        elif data.subset:
            chosen["epochs"] = _EPOCHS_OF_SUBSET
    if not launcher.is_launched():
        _check_devices(chosen, len(devices))
    # Raises for invalid options before a folder is created; this trainer is not used.
    mh.Trainer(**_trainer_options(chosen, recipes), **where, run=options.run or options.resume or "runs")
    say = print if launcher.is_first() else _say_nothing
    say(f"data: {data.source}; {samples:,} to train on, {len(data.test.labels):,} to test with")
    # Under torchrun, all processes take the options of the first one, and the folder that it creates.
    folder_name, chosen = recipes.from_first(lambda: (_folder(options), chosen))
    folder, options_of_trainer = Path(folder_name), _trainer_options(chosen, recipes) | where
    say(f"{chosen['model']} for {_how_long(chosen)} on {', '.join(devices)}")
    changes = {name: value for name, value in asked.items() if value != begun.get(name, value)}
    for name, value in changes.items():
        say(_change(name, value, begun[name]))
    trainer = mh.Trainer(
        **options_of_trainer, run=folder, resume="auto" if options.resume else None, quiet=options.quiet
    )
    trainer.run_config = {"train": {**chosen, "framework": framework}}
    announced = ["max_epochs" if name == "epochs" else name for name in changes]
    trainer.announced = [*announced, "learning_rate"] if "lr" in changes else announced
    try:
        result = trainer.fit(recipes.model(chosen["model"], chosen["seed"]), recipes.data(data, chosen["batch_size"]))
    except BaseException as error:
        if launcher.is_first():
            _leave(folder, interrupted=isinstance(error, (KeyboardInterrupt, SystemExit, WorkerFailed)))
        raise
    for note in result.notes:
        say(note)
    return _show(result, folder) if launcher.is_first() else 0


# What is trained


def _find_run(options: argparse.Namespace) -> None:
    """Resolve ``--resume auto`` to the run in ``--run``, if there is one."""
    if options.resume != Path("auto"):
        return
    if options.run is None:
        raise BadSettings("--resume auto continues the run in --run FOLDER: give --run, or the run as --resume RUN")
    options.resume = options.run if RunFolder(options.run).config_path.exists() else None


def _begun(options: argparse.Namespace) -> dict[str, Any]:
    """The options that the resumed run was started with; none for a new run."""
    if options.resume is None:
        if options.run is not None and RunFolder(options.run).config_path.exists():
            raise BadRunFolder(
                f"--run {options.run}: there is a run already. manyhands train --resume {options.run} continues it; "
                "for a new run name another folder"
            )
        return {}
    if options.run is not None and options.run.resolve() != options.resume.resolve():
        raise BadSettings(f"--run {options.run} --resume {options.resume}: a run continues in its own folder")
    run = RunFolder(options.resume)
    if not launcher.is_first() and not run.config_path.exists():  # on another machine
        return {}
    begun: dict[str, Any] = RunFolder.open(options.resume).config.get("train", {})
    if begun.get("model") not in MODELS:
        raise BadRunFolder(
            f"--resume {options.resume}: manyhands train did not start this run, so only your own program knows its "
            f"model. Continue it there: Trainer(run={str(options.resume)!r}, resume='auto')"
        )
    begun = {"framework": FRAMEWORKS[0], **begun}
    if options.framework not in (None, begun["framework"]):
        raise WrongCheckpoint(
            f"--framework {options.framework}: {options.resume} is a run of {begun['framework']}. Make one for "
            f"{options.framework} of it: manyhands convert {options.resume} --to {options.framework}"
        )
    return begun


def _asked(options: argparse.Namespace, begun: dict[str, Any]) -> dict[str, Any]:
    """The options from the command line; raises if they would make a resumed run a different job."""
    names = (*options.always, *_ON_CPU)
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name in _FIXED:
        if name in asked and name in begun and asked[name] != begun[name]:
            flag = _flag(name)
            raise BadSettings(
                f"{flag} {asked[name]}: {options.resume} was started with {flag} {begun[name]}, and another one would "
                f"make it another job. Leave {flag} out, or start a new run"
            )
    if "data" in asked:
        asked["data"] = str(asked["data"].expanduser().absolute())
    if "devices" in asked and "shares" not in asked:
        asked["shares"] = None  # the run's shares were for its own devices
    parse_shares(asked.get("shares"))
    return asked


def _load_data(folder: str | None, begun: dict[str, Any], options: argparse.Namespace) -> FashionMnist:
    """The data set; a resumed run uses the one that it was started with."""
    try:
        data = fashion_mnist.load(folder)
    except DataNotFound as error:
        if options.data is not None or folder is None or not begun:
            raise
        raise DataNotFound(
            f"{options.resume} was started with the data in {folder}, which are no longer there. If they were moved, "
            "name their folder with --data"
        ) from error
    count, before = len(data.train.labels), begun.get("samples")
    if before not in (None, count):
        raise WrongCheckpoint(
            f"{options.resume} was started with {counted(before, 'sample')} to train on, and {data.directory} has "
            f"{count:,}. Name the folder of its data with --data"
        )
    return data


def _trainer_options(chosen: dict[str, Any], recipes: Recipes) -> dict[str, Any]:
    chosen = {**chosen, "shares": parse_shares(chosen["shares"])}
    topics = {
        topic: kind(**{name: chosen[_flag(name)[2:].replace("-", "_")] for name in names})
        for topic, (kind, names) in _TOPICS.items()
    }
    return {
        "max_epochs": chosen["epochs"],
        "optimizer": recipes.nesterov(chosen["lr"]),
        "schedule": one_cycle,
        "seed": chosen["seed"],
        "precision": chosen["precision"],
        **topics,
    }


def _check_devices(chosen: dict[str, Any], count: int) -> None:
    shares = parse_shares(chosen["shares"])
    Settings(batch_size=chosen["batch_size"], step=Step(shares=shares)).check_devices(count)


def _folder(options: argparse.Namespace) -> str:
    """The run's folder. A folder under ``runs/`` is created now, so that no other job takes its name."""
    path = options.resume or options.run or RunFolder.create(Path("runs")).path
    return str(path.absolute())


def _flag(name: str) -> str:
    return _CALLED.get(name, f"--{name.replace('_', '-')}")


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


def _show(result: Result, folder: Path) -> int:
    """Print the result; returns 1 if a full disk has lost a part of it."""
    run = RunFolder(folder)
    files = [run.config_path, run.metrics_path, run.checkpoints, run.plot_path]
    there = [path.name for path in files if (any(path.iterdir()) if path.is_dir() else path.exists())]
    print(f"run: {folder} ({', '.join(there)})")
    print(result)
    for missing in result.unsaved:
        print(f"manyhands: not all of the run is in its folder: {missing}", file=sys.stderr)
    return 1 if result.unsaved else 0


def _change(name: str, value: Any, before: Any) -> str:
    """An option of a resumed run: its value now, and the one that the run was started with."""
    now = f"no {_flag(name)}" if value is None else f"{_flag(name)} {value}"
    return f"{now}: the run was started {'without it' if before is None else f'with {before}'}"


def _say_nothing(*_: object) -> None:
    pass


def _how_long(chosen: dict[str, Any]) -> str:
    """When the training ends, in words."""
    epochs = [counted(chosen["epochs"], "epoch")] if chosen["epochs"] else []
    steps = [counted(chosen["max_steps"], "step")] if chosen["max_steps"] else []
    return " or ".join([*epochs, *steps, *([str(chosen["max_time"])] if chosen["max_time"] else [])])


# What options mean


def parse_shares(text: str | None) -> Any:
    if text is None or text == "measured":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise BadShares(f"--shares {text}: write one number per device, as 0.7,0.3, or measured") from None
