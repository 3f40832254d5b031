"""``manyhands forecast``: what N devices would give in time and memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyhands.cli import flags, script
from manyhands.errors import BadProfile, BadSettings
from manyhands.forecast.scaling import DEVICES, Assumptions

if TYPE_CHECKING:
    from manyhands.forecast.forecast import Forecast
    from manyhands.forecast.links import Link

_DEVICES = ",".join(map(str, DEVICES))


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "forecast",
        help="forecast N devices: time per step, efficiency, memory, and whether they pay",
        description="Measures a training step on one device and forecasts N devices: time per step, what limits the "
        "gain, the batch size from which they pay, device-hours, and peak memory by category. The first line warns "
        "where more devices do not pay or a batch does not fit.",
    )
    option = parser.add_argument
    option(
        "script",
        nargs="?",
        metavar="SCRIPT:MAKE",
        help="a file and a function in it that returns (model, (X, y)) or (model, (X, y), loss)",
    )
    option(
        "--model",
        choices=flags.MODELS,
        help="a model of manyhands train, on random data; default: resnet18 on a GPU, else lenet",
    )
    flags.add_framework(option)
    option(
        "--batch-size",
        **flags.COUNT,
        help="samples per step, over all devices together; default: the script's, else 256 on a GPU and 128 on a CPU",
    )
    option(
        "--per-device",
        action="store_true",
        help="--batch-size is per device (weak scaling); default: it is divided over the devices",
    )
    option(
        "--devices",
        type=_counts,
        metavar="N,N",
        help=f"numbers of devices; default: {_DEVICES}, or so many nodes where the profile is a node's",
    )
    option(
        "--link",
        default="pcie",
        help="nvlink, pcie, ethernet-100g, pcie+ethernet-25g, or a JSON file; default: pcie",
    )
    option("--per-node", **flags.COUNT, help="devices per machine; default: the usual number for the link")
    option(
        "--input-rate",
        **flags.COUNT,
        help="samples that the input pipeline of one machine prepares in a second; default: no limit",
    )
    option(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp64"],
        default="auto",
        help="number format of the layers; default: auto, as in manyhands train",
    )
    option(
        "--optimizer",
        metavar="NAME",
        help="name of the optimizer, for example adamw; default: the model's own, else sgd",
    )
    option("--profile", **flags.FILE, help="forecast from a stored profile; default: measure here")
    option("--save-profile", **flags.FILE, help="store the measured profile; default: no file")
    option("--plot", **flags.FILE, help="plot the forecast as .png or .svg; default: no file")
    option("--json", action="store_true", help="print JSON (docs/forecast.md describes it); default: tables")
    parser.set_defaults(run_command=run, error_text=flags.in_command_words)


def _counts(text: str) -> list[int]:
    parse = flags.whole_number(1)
    return [parse(part) for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    from manyhands.files import check_writable
    from manyhands.forecast import links, plot

    # Refuse bad options first: measuring takes a while.
    if options.plot is not None:
        plot.place(options.plot)
    for path in (options.plot, options.save_profile):
        if path is not None:
            check_writable(path, BadProfile)
    between = links.link(options.link, options.per_node)
    forecast = _stored(options, between) if options.profile is not None else _measured(options, between)
    if options.save_profile is not None:
        forecast.profile.save(options.save_profile)
    text = json.dumps(forecast.as_dict(), indent=2) if options.json else str(forecast)
    print(text, flush=True)
    if options.plot is not None:
        path = forecast.plot(options.plot)
        if not options.json:
            print(f"written: {path}")
    return 0


def _stored(options: argparse.Namespace, between: Link) -> Forecast:
    from manyhands.forecast.forecast import Forecast
    from manyhands.forecast.profile import Profile

    for name in ("script", "model"):
        if getattr(options, name) is not None:
            raise BadSettings(f"--profile {options.profile} and {getattr(options, name)}: a profile has its own model")
    profile = Profile.load(options.profile)
    devices = options.devices or [count * profile.devices for count in DEVICES]
    return Forecast.of(
        profile, between, devices, options.batch_size, per_device=options.per_device, assumptions=_assumptions(options)
    )


def _measured(options: argparse.Namespace, between: Link) -> Forecast:
    from manyhands.forecast.measured import forecast

    name, model, batch, loss = _subject(options)
    made = forecast(
        model,
        batch,
        loss=loss,
        optimizer=options.optimizer,
        precision=options.precision,
        devices=options.devices or DEVICES,
        link=between,
        per_device=options.per_device,
        assumptions=_assumptions(options),
    )
    return replace(made, profile=replace(made.profile, name=name))


def _assumptions(options: argparse.Namespace) -> Assumptions:
    return Assumptions() if options.input_rate is None else Assumptions(input_rate=options.input_rate)


def _subject(options: argparse.Namespace) -> tuple[str, Any, Any, Any]:
    """A name, model, batch and loss, from one of our models or from the user's script."""
    from manyhands.forecast import measured

    if options.script is None:
        framework = flags.framework(options)
        on_gpu = measured.of(framework).has_gpu()
        name = options.model or ("resnet18" if on_gpu else "lenet")
        return name, *measured.example(framework, name, options.batch_size or (256 if on_gpu else 128)), None
    if options.model is not None:
        raise BadSettings(f"--model {options.model} and {options.script}: give one of them")
    model, batch, loss = script.made_by(options.script)
    if options.batch_size is not None:
        batch = measured.of(measured.framework_of(model)).resized(batch, options.batch_size)
    return options.script, model, batch, loss
