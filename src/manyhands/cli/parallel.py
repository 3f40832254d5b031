"""``manyhands parallel``: run a function of a script in parallel, and say how that goes."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any

from manyhands.cli import script
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "parallel",
        help="spread a function's work over lanes; explain it, draw it, show when what runs",
        description="Plans script.py:function for the arguments that inputs() of the same script gives (none: no "
        "arguments), runs it, and prints what was chosen and why.",
    )
    parser.add_argument("function", metavar="SCRIPT:FUNCTION")
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0], help="that the function is written in"
    )
    parser.add_argument("--draw", type=Path, metavar="SVG", help="the graph, coloured by lane")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="a trace (.json) or a picture (.png)")
    parser.add_argument("--devices", type=int, metavar="N", help="what it would take on so many devices (simulated)")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    mh: Any = importlib.import_module(f"manyhands.{options.framework}")
    module, function = script.load(options.function)
    given = module.inputs() if hasattr(module, "inputs") else ()
    if not hasattr(module, "inputs") and _needs_arguments(function):
        raise BadSettings(
            f"{options.function} takes arguments: write a function inputs() in the script that gives them, as a tuple"
        )
    fast = mh.parallel(function)
    fast(*(given if isinstance(given, (tuple, list)) else (given,)))
    print(fast.explain())
    if options.devices is not None:
        print(fast.forecast(options.devices))
    for path, make in ((options.draw, fast.draw), (options.timeline, fast.timeline)):
        if path is not None:
            print(f"written: {make(path)}")
    return 0


def _needs_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it does not say what it takes
        pass
    return False
