"""``manyhands forecast``: what N devices would give in time and memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from manyhands.book.recipes import MODELS
from manyhands.cli import flags, script
from manyhands.errors import BadProfile, BadSettings
from manyhands.files import check_writable
from manyhands.forecast import measured, plot
from manyhands.forecast.forecast import Forecast
from manyhands.forecast.links import Link, link
from manyhands.forecast.profile import Profile
from manyhands.forecast.scaling import DEVICES, Assumptions

_PARAMETERS = ("devices", "link", "per_device", "per_node", "precision", "optimizer")
_DEVICES = f"{','.join(map(str, DEVICES))}, or so many nodes where the profile is a node's"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures a training step on one device and forecasts N devices: time per step, what limits the "
        "gain, the batch size from which they pay, device-hours, and peak memory by category. The first line warns "
        "where more devices do not pay or a batch does not fit."
    )
    option = parser.add_argument
    option(
        "script",
        nargs="?",
        metavar="SCRIPT:MAKE",
        help="a file and a function in it that returns (model, (X, y)) or (model, (X, y), loss)",
    )
    models = "a model of manyhands train, on random data; default: resnet18 on a GPU, else lenet"
    option("--model", choices=MODELS, help=models)
    flags.add_framework(option)
    sizes = "samples per step, over all devices together; default: the script's, else 256 on a GPU and 128 on a CPU"
    option("--batch-size", **flags.COUNT, help=sizes)
    flags.add_parameters(
        parser,
        measured.forecast,
        _PARAMETERS,
        devices={"type": _counts, "metavar": "N,N", "default_text": _DEVICES},
        link={"default": "pcie"},
        precision={"choices": ["auto", "fp32", "bf16", "fp64"], "default": "auto"},
    )
    rate = "samples that the input pipeline of one machine prepares in a second; default: no limit"
    option("--input-rate", **flags.COUNT, help=rate)
    option("--profile", **flags.FILE, help="forecast from a stored profile; default: measure here")
    option("--save-profile", **flags.FILE, help="store the measured profile; default: no file")
    option("--plot", **flags.FILE, help="plot the forecast as .png or .svg; default: no file")
    option("--json", action="store_true", help="print JSON (docs/forecast.md describes it); default: tables")


def _counts(text: str) -> list[int]:
    parse = flags.whole_number(1)
    return [parse(part) for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    # Refuse bad options first: measuring takes a while.
    if options.plot is not None:
        plot.place(options.plot)
    for path in (options.plot, options.save_profile):
        if path is not None:
            check_writable(path, BadProfile)
    rate = options.input_rate
    assumptions = Assumptions() if rate is None else Assumptions(input_rate=rate)
    between = link(options.link, options.per_node)
    method = _measured if options.profile is None else _stored
    forecast = method(options, between, assumptions)
    if options.save_profile is not None:
        forecast.profile.save(options.save_profile)
    print(json.dumps(forecast.as_dict(), indent=2) if options.json else forecast, flush=True)
    if options.plot is not None:
        path = forecast.plot(options.plot)
        if not options.json:
            print(f"written: {path}")
    return 0


def _stored(options: argparse.Namespace, between: Link, assumptions: Assumptions) -> Forecast:
    if own := options.script or options.model:
        raise BadSettings(f"--profile {options.profile} and {own}: a profile has its own model")
    profile = Profile.load(options.profile)
    devices = options.devices or [count * profile.devices for count in DEVICES]
    how: dict[str, Any] = {"per_device": options.per_device, "assumptions": assumptions}
    return Forecast.of(profile, between, devices, options.batch_size, **how)


def _measured(options: argparse.Namespace, between: Link, assumptions: Assumptions) -> Forecast:
    name, model, batch, loss = _subject(options)
    given = {name: getattr(options, name) for name in ("optimizer", "precision", "per_device")}
    devices = options.devices or DEVICES
    forecast = measured.forecast(
        model, batch, devices=devices, link=between, loss=loss, assumptions=assumptions, **given
    )
    return replace(forecast, profile=replace(forecast.profile, name=name))


def _subject(options: argparse.Namespace) -> tuple[str, Any, Any, Any]:
    """A name, model, batch and loss, from one of our models or from the user's script."""
    if options.script is None:
        framework = flags.framework(options)
        on_gpu = measured.of(framework).has_gpu()
        name = options.model or ("resnet18" if on_gpu else "lenet")
        return name, *measured.example(framework, name, options.batch_size or (256 if on_gpu else 128)), None
    if options.model is not None:
        raise BadSettings(f"--model {options.model} and {options.script}: give one of them")
    model, batch, loss = script.maker(options.script)()
    if options.batch_size is not None:
        batch = measured.of(measured.framework_of(model)).resized(batch, options.batch_size)
    return options.script, model, batch, loss
