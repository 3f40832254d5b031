"""``manyhands forecast``: what N devices would give in time and memory."""

from __future__ import annotations

import argparse
from dataclasses import replace
from json import dumps
from typing import Annotated, Any

from manyhands import machine
from manyhands.book import recipes
from manyhands.cli import flags
from manyhands.cli import script as script_functions
from manyhands.cli.flags import Count, File, Framework, Reads
from manyhands.errors import BadProfile, BadSettings, NotMeasured
from manyhands.files import check_writable
from manyhands.forecast import measured
from manyhands.forecast.forecast import Forecast, check_plot
from manyhands.forecast.links import link
from manyhands.forecast.profile import Profile
from manyhands.forecast.scaling import DEVICES, Assumptions

_DEVICES = f"{','.join(map(str, DEVICES))}, or so many nodes where the profile is a node's"


def _counts(text: str) -> list[int]:
    parse = flags.whole_number(1)
    return [parse(part) for part in text.split(",")]


def add(parser: argparse.ArgumentParser) -> None:
    flags.add_command(parser, run)
    changed: dict[str, dict[str, Any]] = {
        "devices": {"type": _counts, "metavar": "N,N", "default_text": _DEVICES},
        "link": {"default": "pcie"},
        "precision": {"choices": ["auto", "fp32", "bf16", "fp64"], "default": "auto"},
    }
    names = ("devices", "link", "per_device", "per_node", "precision", "optimizer")
    flags.add_options(parser, measured.forecast, names, changed)


def run(
    script: Annotated[str, Reads(metavar="SCRIPT:MAKE")] | None = None,
    *,
    model: Annotated[str, Reads(choices=recipes.MODELS)] | None = None,
    framework: Framework | None = None,
    batch_size: Count | None = None,
    input_rate: Count | None = None,
    profile: File | None = None,
    save_profile: File | None = None,
    plot: File | None = None,
    json: bool = False,
    **how: Any,
) -> int:
    """Measures a training step on one device and forecasts N devices.

    It prints time per step, what limits the gain, the batch size from which they pay, device-hours, and peak memory by
    category. The first line warns where more devices do not pay or a batch does not fit.

    Args:
        script: A file and a function in it that returns (model, (X, y)) or (model, (X, y), loss).
        model: A model of manyhands train, on random data. Default: resnet18 on a GPU, else lenet.
        framework: Framework of the model. Default: the first that is installed.
        batch_size: Samples per step, over all devices together. Default: the script's, else 256 on a GPU and 128 on a
            CPU.
        input_rate: Samples that the input pipeline of one machine prepares in a second. Default: no limit.
        profile: Forecast from a stored profile. Default: measure here.
        save_profile: Store the measured profile. Default: no file.
        plot: Plot the forecast as .png or .svg. Default: no file.
        json: Print JSON (docs/forecast.md describes it). Default: tables.
    """
    # Refuse bad options first: measuring takes a while.
    if plot is not None:
        check_plot(plot)
    for path in filter(None, (plot, save_profile)):
        check_writable(path, BadProfile)
    how["assumptions"] = Assumptions() if input_rate is None else Assumptions(input_rate=input_rate)
    how["link"] = link(how["link"], how.pop("per_node"))
    if profile is None:
        name, net, batch, loss = _subject(script, model, framework, batch_size)
        how["devices"] = how["devices"] or DEVICES
        try:
            forecast = machine.undisturbed(lambda: measured.forecast(net, batch, loss=loss, **how))
        except NotMeasured as reason:
            raise NotMeasured(f"not measured: the machine is busy: {reason}") from None
        forecast = replace(forecast, profile=replace(forecast.profile, name=name))
    elif own := script or model or framework or how["optimizer"] or how["precision"].removeprefix("auto"):
        raise BadSettings(f"--profile {profile} and {own}: a profile has its own model, precision and optimizer")
    else:
        stored = Profile.load(profile)
        devices = how["devices"] or [count * stored.devices for count in DEVICES]
        rest = {name: how[name] for name in ("per_device", "assumptions")}
        forecast = Forecast.of(stored, how["link"], devices, batch_size, **rest)
    if save_profile is not None:
        forecast.profile.save(save_profile)
    print(dumps(forecast.as_dict(), indent=2) if json else forecast, flush=True)
    if plot is not None:
        path = forecast.plot(plot)
        if not json:
            print(f"written: {path}")
    return 0


def _subject(text: str | None, name: str | None, framework: str | None, size: int | None) -> tuple[str, Any, Any, Any]:
    """A name, model, batch and loss, from one of our models or from the user's script."""
    if text is None:
        framework = flags.framework_or_first(framework)
        method = measured.of(framework)
        usual_name, usual_size = ("resnet18", 256) if method.has_gpu() else ("lenet", 128)
        name = name or usual_name
        return name, recipes.of(framework).model(name, 0), method.noise(size or usual_size), None  # only shapes count
    if name is not None:
        raise BadSettings(f"--model {name} and {text}: give one of them")
    model, batch, loss = script_functions.maker(text)()
    if size is not None:
        batch = measured.of(measured.framework_of(model)).resize(batch, size)
    return text, model, batch, loss
