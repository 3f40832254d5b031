"""``manyhands simulate``: a script written for several GPUs, unchanged, on virtual devices."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from manyhands.cli import flags
from manyhands.errors import BadSettings, FrameworkMissing
from manyhands.placement.moves import VIRTUAL_DEVICES, installed


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a script as 'python script.py' would, on virtual devices instead of GPUs: x.cuda(1), "
        "device='cuda:1', torch.cuda and nn.DataParallel use them (docs/virtual-devices.md)."
    )
    option = parser.add_argument
    option(
        "--devices",
        **flags.COUNT,
        help=f"number of virtual devices; default: {VIRTUAL_DEVICES} in the environment, or 2",
    )
    option("script", type=Path, metavar="SCRIPT", help="a file, for example train.py")
    option("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    if not options.script.is_file():
        raise BadSettings(f"{options.script}: there is no such file")
    asked = os.environ.get(VIRTUAL_DEVICES, "").strip()
    if options.devices is not None and asked:
        os.environ[VIRTUAL_DEVICES] = str(options.devices)
    if not installed("torch"):
        raise FrameworkMissing(
            "manyhands simulate puts virtual devices in the place of PyTorch's GPUs, and torch is not installed. In "
            f"JAX, TensorFlow and MXNet write {VIRTUAL_DEVICES}=2 python {options.script}, and let the script take its "
            "devices from manyhands: mh.try_all_gpus()",
            name="torch",
        )
    from manyhands import torch as mh

    # The user asked for virtual devices, so use them even if there is a GPU.
    count = options.devices or int(asked or 0) or 2
    arguments, path = sys.argv, list(sys.path)
    with mh.virtual_devices(count, as_cuda=True):
        sys.argv = [str(options.script), *options.arguments]
        sys.path.insert(0, str(options.script.parent.resolve()))
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            if end.code == 2:  # as argparse ends
                flags.hint_misplaced("simulate", [options.script.name, *options.arguments], options.parser)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv, sys.path[:] = arguments, path
    return 0
