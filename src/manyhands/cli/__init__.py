"""The command ``manyhands``. Each subcommand is a module with ``add`` (its options) and ``run``.

Only the standard library is imported before a subcommand runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from manyhands import __version__
from manyhands.cli import audit, convert, devices, flags, forecast, lab, parallel, parity, simulate, train
from manyhands.errors import ManyhandsError

_COMMANDS = (devices, train, parity, convert, parallel, simulate, audit, forecast, lab)


def parser() -> argparse.ArgumentParser:
    top = flags.Parser(
        prog="manyhands",
        description="Compute and train on every device you have: no hidden copies, no hidden waits, the same answer.",
    )
    top.add_argument("--version", action="version", version=f"manyhands {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    top = parser()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    program: list[str] = []
    if arguments[:1] == ["audit"]:
        arguments, program = audit.divide(arguments)
    options, unknown = top.parse_known_args(arguments)
    options.program = program
    if unknown:
        flags.refuse(top, options.command, unknown)
    if options.command is None:
        top.print_help()
        return 0
    try:
        return int(options.run_command(options))
    except ManyhandsError as error:
        in_command_words = getattr(options, "error_text", str)
        print(f"manyhands: {in_command_words(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # a signal has stopped training: 128 + its number, as in shells
        return stop.code if isinstance(stop.code, int) else 1
    except BrokenPipeError:  # `manyhands devices | head -1`: the reader is done, and Python must not write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
