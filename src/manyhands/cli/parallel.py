"""``manyhands parallel``: run a function of a script in parallel, and explain the plan."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from manyhands.cli import flags, script
from manyhands.cli.flags import Count, File, Framework
from manyhands.errors import BadSettings
from manyhands.schedule import graph_svg
from manyhands.schedule import timeline as timelines


def run(
    function: str,
    *,
    framework: Framework | None = None,
    draw: File | None = None,
    timeline: File | None = None,
    devices: Count | None = None,
) -> int:
    """Plans and runs script.py:function, and prints the chosen plan and why.

    The arguments come from inputs() in the same script, which returns a tuple, or a dict by name; without it there are
    none.

    Args:
        function: A file and a function in it, for example script.py:step.
        framework: Framework of the function. Default: the first that is installed.
        draw: Write the graph as SVG, coloured by lane. Default: no file.
        timeline: Write the timeline: a trace (.json) or a picture (.png, .svg). Default: no file.
        devices: Also forecast the time on this many devices (simulated). Default: no forecast.
    """
    # Refuse bad paths first: planning takes a while.
    for path, check in ((draw, graph_svg.checked_path), (timeline, timelines.checked_path)):
        if path is not None:
            check(path)
    framework = flags.framework_or_first(framework)
    mh: Any = importlib.import_module(f"manyhands.{framework}")
    backend: Any = importlib.import_module(f"manyhands.backends.{framework}.devices")
    given = {"--draw": draw, "--timeline": timeline, "--devices": devices}
    wanted = [flag for flag, value in given.items() if value is not None]
    if wanted and not backend.CAPABILITIES.plans_lanes:
        raise BadSettings(
            f"{', '.join(wanted)}: {framework}'s own runtime runs the function, so there is no plan to draw, time or "
            "forecast. Leave it out, or write the function in torch"
        )
    module, loaded = script.load(function)
    arguments, named = _inputs(module, loaded, function)
    fast = mh.parallel(loaded)
    fast(*arguments, **named)
    print(fast.explain())
    if devices is not None:
        print(fast.forecast(devices))
    for path, make in ((draw, fast.draw), (timeline, fast.timeline)):
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
