"""``manyhands parallel``: run a function of a script in parallel, and explain the plan."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.cli import flags, script
from manyhands.errors import BadSettings
from manyhands.schedule.pictures import graph_svg, timeline


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plans and runs script.py:function, and prints the chosen plan and why. The arguments come from "
        "inputs() in the same script, which returns a tuple, or a dict by name; without it there are none."
    )
    option = parser.add_argument
    option("function", metavar="SCRIPT:FUNCTION", help="a file and a function in it, for example script.py:step")
    flags.add_framework(option, "framework of the function")
    option("--draw", type=Path, metavar="SVG", help="write the graph, coloured by lane; default: no file")
    option(
        "--timeline",
        **flags.FILE,
        help="write the timeline: a trace (.json) or a picture (.png, .svg); default: no file",
    )
    option(
        "--devices",
        **flags.COUNT,
        help="also forecast the time on this many devices (simulated); default: no forecast",
    )


def run(options: argparse.Namespace) -> int:
    # Refuse bad paths first: planning takes a while.
    for path, check in ((options.draw, graph_svg.checked_path), (options.timeline, timeline.checked_path)):
        if path is not None:
            check(path)
    framework = flags.framework(options)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    backend: Any = importlib.import_module(f"manyhands.backends.{framework}.devices")
    wanted = [f"--{name}" for name in ("draw", "timeline", "devices") if getattr(options, name) is not None]
    if wanted and not backend.CAPABILITIES.plans_lanes:
        raise BadSettings(
            f"{', '.join(wanted)}: {framework}'s own runtime runs the function, so there is no plan to draw, time or "
            "forecast. Leave it out, or write the function in torch"
        )
    module, function = script.load(options.function)
    arguments, named = _inputs(module, function, options.function)
    fast = mh.parallel(function)
    fast(*arguments, **named)
    print(fast.explain())
    if options.devices is not None:
        print(fast.forecast(options.devices))
    for path, make in ((options.draw, fast.draw), (options.timeline, fast.timeline)):
        if path is not None:
            print(f"written: {make(path)}")
    return 0


def _inputs(module: Any, function: Any, text: str) -> tuple[Sequence[Any], dict[str, Any]]:
    """The function's arguments: what ``inputs()`` in its script returns, if the function takes any."""
    signature, make = inspect.signature(function), getattr(module, "inputs", None)
    arguments: Any = () if make is None or not signature.parameters else make()
    named = arguments if isinstance(arguments, dict) else {}
    if named or not isinstance(arguments, (tuple, list)):
        arguments = () if named else (arguments,)
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise BadSettings(
            f"{text}: {error}: write a function inputs() in the script that gives the arguments, as a tuple, or as a "
            "dict by name"
        ) from None
    return arguments, named
