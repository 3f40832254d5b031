"""``manyhands convert``: the weights of a run, for another framework."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from manyhands.cli import flags
from manyhands.device import FRAMEWORKS


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a run's weights for another framework",
        description="Creates a new run with the same weights in the layout of another framework. Load it there with "
        "mh.load_model(RUN), or continue it with manyhands train --resume RUN. Needs no framework installed.",
    )
    option = parser.add_argument
    option("run", type=flags.folder, metavar="RUN", help="the folder of a run")
    option("--to", required=True, choices=FRAMEWORKS, help="the framework that the new run is for")
    option("--out", type=flags.folder, metavar="FOLDER", help="the new run's folder; default: RUN-FRAMEWORK beside RUN")
    option(
        "--names",
        type=Path,
        metavar="TABLE",
        help="a JSON table of weight names, for your own model (docs/training.md); default: those of manyhands' models",
    )
    option(
        "--like",
        type=flags.folder,
        metavar="RUN",
        help="a run of the target model, to check names and shapes against; default: no check",
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    from manyhands.training.commands import convert
    from manyhands.training.commands.names_table import NamesTable

    source = convert.framework_of(options.run)
    names = None if options.names is None else NamesTable.read(options.names)
    new_run = convert.convert(options.run, options.to, options.out, names=names, like=options.like)
    print(f"{new_run}: the weights of {options.run}, from {source} to {options.to}")
    return 0
