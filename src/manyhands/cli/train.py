"""``manyhands train``: Fashion-MNIST on every device, from the data to the picture."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.amounts import counted
from manyhands.cli import flags
from manyhands.device import FRAMEWORKS
from manyhands.errors import (
    BadRunFolder,
    BadSettings,
    BadShares,
    DataNotFound,
    WorkerFailed,
    WrongCheckpoint,
)

if TYPE_CHECKING:
    from manyhands.training.commands.recipes import Recipes
    from manyhands.training.data.fashion_mnist import FashionMnist
    from manyhands.training.result import Result

# How a run is trained. A resumed run keeps all of these unless the user sets them again.
_ALWAYS: dict[str, Any] = {
    "devices": "all",
    "data": None,
    "seed": 0,
    "precision": "auto",
    "shares": None,
    "accumulate": 1,
    "micro_batch_size": None,
    "batch_stats": None,
    "on_nan": "stop",
    "optimize": "auto",
    "checkpoint_every": None,
    "keep_checkpoints": 3,
    "max_steps": None,
    "max_time": None,
    "limit_batches": None,
    "limit_val_batches": None,
    "evaluate_every": None,
    "overfit_batches": None,
}
# Options of a step that have the same meaning in the library.
_STEP = ("accumulate", "micro_batch_size", "batch_stats", "on_nan", "optimize")
_ON_GPU: dict[str, Any] = {"model": "resnet18", "epochs": 10, "batch_size": 256, "lr": 0.1}
_ON_CPU: dict[str, Any] = {"model": "lenet", "epochs": 4, "batch_size": 128, "lr": 0.05}
_EPOCHS_OF_SUBSET = 20  # of 4,000 images: as many as lenet needs for a test accuracy of 0.85
# A resumed run cannot change these: the weights would not fit, or samples would be seen twice or never.
_FIXED = ("model", "batch_size", "seed")
_SETTINGS = {"epochs": "max_epochs"}  # the trainer's name, if it differs


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on Fashion-MNIST on every device",
        description="Trains on Fashion-MNIST: resnet18 for 10 epochs on GPUs, lenet for 4 epochs without one. If "
        f"the full data set is missing, it trains {_EPOCHS_OF_SUBSET} epochs on the small subset in manyhands.",
    )
    _add_what(parser.add_argument_group("model, data and devices"))
    _add_how(parser.add_argument_group("training"))
    _add_step(parser.add_argument_group("step", "How a step is run, and how its batch is divided."))
    _add_limits(parser.add_argument_group("limits", "Where training ends, and when to evaluate."))
    _add_checkpoints(parser.add_argument_group("run and checkpoints", "Where figures and checkpoints are written."))
    parser.set_defaults(run_command=run, error_text=flags.in_command_words)


def _add_what(group: Any) -> None:
    option = group.add_argument
    option("--framework", choices=FRAMEWORKS, help="default: the resumed run's, else the first that is installed")
    option("--model", choices=flags.MODELS, help="default: resnet18 on a GPU, else lenet")
    option(
        "--devices",
        help="as devices= in Python: gpu (all of them), 2 (GPUs, else virtual CPU devices), gpu:0,gpu:1, "
        "cpu, cpu:2 (two virtual CPU devices), gpu:0,cpu; default: all GPUs, else the CPU",
    )
    option(
        "--data",
        type=flags.folder,
        metavar="FOLDER",
        help="folder with the four IDX files; default: $MANYHANDS_DATA, the user cache, a download, else the "
        "small subset",
    )


def _add_how(group: Any) -> None:
    option = group.add_argument
    option(
        "--epochs",
        **flags.COUNT,
        help=f"passes through the data; default: 10 on a GPU, else 4; {_EPOCHS_OF_SUBSET} on the small subset",
    )
    option(
        "--batch-size",
        **flags.COUNT,
        help="samples per step, over all devices together; default: 256 on a GPU, else 128",
    )
    option("--lr", type=flags.rate, metavar="RATE", help="peak learning rate of the cycle; default: 0.1, on a CPU 0.05")
    option(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16", "fp64"],
        help="number format of the layers; default: auto, which is bf16 where the hardware supports it well, else fp32",
    )
    seed = flags.whole_number(0)
    option("--seed", type=seed, metavar="N", help="seed of the weights and the sample order; default: 0")
    option("--quiet", action="store_true", help="no progress display; default: show it")


def _add_step(group: Any) -> None:
    """The options of :class:`manyhands.training.options.Step`."""
    option = group.add_argument
    option("--shares", help="each device's part of a batch: 0.7,0.3 or measured; default: equal parts")
    option(
        "--accumulate", **flags.COUNT, help="gradient accumulation: micro-batches per step on each device; default: 1"
    )
    option(
        "--micro-batch-size",
        **flags.COUNT,
        help="gradient accumulation by size: at most N samples per micro-batch; default: no limit",
    )
    option(
        "--batch-stats",
        choices=["per_device", "global"],
        help="BatchNorm's statistics over each device's shard or the whole batch; default: per_device, in jax global",
    )
    option(
        "--on-nan",
        choices=["stop", "continue"],
        help="when the loss is NaN, stop, or continue without that batch; default: stop",
    )
    option(
        "--optimize",
        choices=["auto", "off", "max"],
        help="how the step is run: off, plain steps; max, compiled, too; default: auto",
    )


def _add_limits(group: Any) -> None:
    """The options of :class:`manyhands.training.options.Limits`."""
    option = group.add_argument
    option("--max-steps", **flags.COUNT, help="stop after this many steps of the run; default: no limit")
    option(
        "--max-time", metavar="TIME", help="stop after this training time of the run: 2h, 1h30m, 90s; default: no limit"
    )
    option("--limit-batches", **flags.COUNT, help="training batches per epoch; default: all")
    option("--limit-val-batches", **flags.COUNT, help="batches per evaluation; default: all")
    option("--evaluate-every", metavar="N_UNIT", help="evaluate every '500 steps' or '2 epochs'; default: every epoch")
    option("--overfit-batches", **flags.COUNT, help="train on the same N batches in every epoch; default: off")


def _add_checkpoints(group: Any) -> None:
    option = group.add_argument
    option(
        "--run",
        type=flags.folder,
        metavar="FOLDER",
        help="folder of a new run; default: one under runs/, named by the time",
    )
    option(
        "--resume",
        type=flags.folder,
        metavar="RUN",
        help="continue this run from its last checkpoint, with the options it was started with; auto: the run in "
        "--run, if there is one; default: a new run",
    )
    option(
        "--checkpoint-every",
        type=flags.whole_number(1),
        metavar="STEPS",
        help="steps between checkpoints; default: one at the end of every epoch",
    )
    option("--keep-checkpoints", **flags.COUNT, help="keep this many of the newest; default: 3")


def run(options: argparse.Namespace) -> int:
    from manyhands.training import launcher
    from manyhands.training.commands import recipes as _recipes

    _find_run(options)
    begun = _begun(options)
    framework = options.framework or begun.get("framework") or flags.framework(options)
    recipes = _recipes.of(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    chosen = {**_ALWAYS, **begun, **_asked(options, begun)}
    where = {"devices": chosen["devices"]}
    devices = mh.Trainer(1, **where).device_names  # raises if a device does not exist
    chosen = {**(_ON_GPU if any(name.startswith("gpu") for name in devices) else _ON_CPU), **chosen}
    data = _load_data(chosen["data"], begun, options)
    samples = len(data.train.labels)
    chosen |= {"data": chosen["data"] or str(data.directory), "samples": samples}
    if "epochs" not in (begun | _asked(options, begun)):
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
    changes = {name: value for name, value in _asked(options, begun).items() if value != begun.get(name, value)}
    for name, value in changes.items():
        say(flags.changed(name, value, begun[name]))
    trainer = mh.Trainer(
        **options_of_trainer, run=folder, resume="auto" if options.resume else None, quiet=options.quiet
    )
    trainer.run_config = {"train": {**chosen, "framework": framework}}
    trainer.announced = [_SETTINGS.get(name, name) for name in changes] + ["learning_rate"] * ("lr" in changes)
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
    from manyhands.training.checkpoints.run_folder import RunFolder

    if options.resume != Path("auto"):
        return
    if options.run is None:
        raise BadSettings("--resume auto continues the run in --run FOLDER: give --run, or the run as --resume RUN")
    options.resume = options.run if RunFolder(options.run).config_path.exists() else None


def _begun(options: argparse.Namespace) -> dict[str, Any]:
    """The options that the resumed run was started with; none for a new run."""
    from manyhands.training import launcher
    from manyhands.training.checkpoints.run_folder import RunFolder

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
    if begun.get("model") not in flags.MODELS:
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
    names = (*_ALWAYS, *_ON_CPU)
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name in _FIXED:
        if name in asked and name in begun and asked[name] != begun[name]:
            flag = flags.of(name)
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
    from manyhands.training.data import fashion_mnist

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
    from manyhands.training.commands.recipes import one_cycle
    from manyhands.training.options import Checkpoints, Limits, Step

    return {
        "max_epochs": chosen["epochs"],
        "optimizer": recipes.nesterov(chosen["lr"]),
        "schedule": one_cycle,
        "seed": chosen["seed"],
        "precision": chosen["precision"],
        "step": Step(shares=parse_shares(chosen["shares"]), **{name: chosen[name] for name in _STEP}),
        "checkpoints": Checkpoints(every=chosen["checkpoint_every"], keep=chosen["keep_checkpoints"]),
        "limits": Limits(**{name: chosen[name] for name in flags.LIMITS}),
    }


def _check_devices(chosen: dict[str, Any], count: int) -> None:
    from manyhands.training.options import Step
    from manyhands.training.settings import Settings

    shares = parse_shares(chosen["shares"])
    Settings(batch_size=chosen["batch_size"], step=Step(shares=shares)).check_devices(count)


def _folder(options: argparse.Namespace) -> str:
    """The run's folder. A folder under ``runs/`` is created now, so that no other job takes its name."""
    from manyhands.training.checkpoints.run_folder import RunFolder

    path = options.resume or options.run or RunFolder.create(Path("runs")).path
    return str(path.absolute())


# What is said


def _leave(folder: Path, *, interrupted: bool) -> None:
    """After an error: remove an empty folder; after an interrupt, print how to continue."""
    from manyhands.training.checkpoints import store
    from manyhands.training.checkpoints.run_folder import RunFolder

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
    from manyhands.training.checkpoints.run_folder import RunFolder

    run = RunFolder(folder)
    files = [run.config_path, run.metrics_path, run.checkpoints, run.plot_path]
    there = [path.name for path in files if (any(path.iterdir()) if path.is_dir() else path.exists())]
    print(f"run: {folder} ({', '.join(there)})")
    print(result)
    for missing in result.unsaved:
        print(f"manyhands: not all of the run is in its folder: {missing}", file=sys.stderr)
    return 1 if result.unsaved else 0


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
