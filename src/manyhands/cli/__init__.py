"""The command ``manyhands``. Each subcommand is a module with ``run``, whose parameters are its arguments.

Only the module of the subcommand that is called is imported, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

from manyhands import __version__
from manyhands.cli import flags
from manyhands.errors import ManyhandsError

COMMANDS = {
    "devices": "every device with its name, memory and load, and with --measure its real speed",
    "train": "train a model on Fashion-MNIST on every device",
    "parity": "train a few steps on 1 and on N devices, and print the largest difference",
    "convert": "convert a run's weights for another framework",
    "parallel": "run a function's work in parallel lanes; explain it, draw it, show its timeline",
    "simulate": "run a PyTorch script written for several GPUs on virtual CPU devices",
    "audit": "run a program and list every hidden wait and copy, with its line, cost, gain and cure",
    "forecast": "forecast N devices: time per step, efficiency, memory, and whether they pay",
    "lab": "run experiments on this machine: when do two devices, overlap, lanes and capture pay?",
}


def parser(names: Iterable[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of the command, with the options of the subcommands of these names."""
    top = flags.Parser(
        prog="manyhands",
        description="Compute and train on every device you have: no hidden copies, no hidden waits, the same answer.",
    )
    top.add_argument("--version", action="version", version=f"manyhands {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text)
        if name in names:
            module = importlib.import_module(f"manyhands.cli.{name}")
            module.add(subparser) if hasattr(module, "add") else flags.add_command(subparser, module.run)
            subparser.set_defaults(parser=subparser)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    top = parser(arguments[:1])
    options, unknown = top.parse_known_args(arguments)
    if unknown:
        flags.refuse(options.parser if options.command else top, unknown)
    if options.command is None:
        top.print_help()
        return 0
    try:
        return int(options.run_command(options))
    except ManyhandsError as error:
        print(f"manyhands: {flags.in_command_words(str(error), flags.names(options.parser))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # a signal has stopped training: 128 + its number, as in shells
        return stop.code if isinstance(stop.code, int) else 1
    except BrokenPipeError:  # `manyhands devices | head -1`: the reader is done, and Python must not write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
