"""``manyhands simulate``: a script written for several GPUs, unchanged, on virtual devices."""

from __future__ import annotations

import os
import runpy
import sys

from manyhands.cli import flags
from manyhands.cli.flags import Count, File, Rest
from manyhands.errors import BadSettings, FrameworkMissing
from manyhands.placement.moves import VIRTUAL_DEVICES, is_installed


def run(script: File, arguments: Rest, *, devices: Count | None = None) -> int:
    """Runs a script as 'python script.py' would, on virtual devices instead of GPUs.

    x.cuda(1), device='cuda:1', torch.cuda and nn.DataParallel use them (docs/virtual-devices.md).

    Args:
        script: A file, for example train.py.
        arguments: Arguments of the script.
        devices: Number of virtual devices. Default: MANYHANDS_VIRTUAL_DEVICES in the environment, or 2.
    """
    if not script.is_file():
        raise BadSettings(f"{script}: there is no such file")
    asked = os.environ.get(VIRTUAL_DEVICES, "").strip()
    if devices is not None and asked:
        os.environ[VIRTUAL_DEVICES] = str(devices)
    if not is_installed("torch"):
        raise FrameworkMissing(
            "manyhands simulate puts virtual devices in the place of PyTorch's GPUs, and torch is not installed. In "
            f"JAX, TensorFlow and MXNet write {VIRTUAL_DEVICES}=2 python {script}, and let the script take its "
            "devices from manyhands: mh.try_all_gpus()",
            name="torch",
        )
    from manyhands import torch as mh

    # The user asked for virtual devices, so use them even if there is a GPU.
    count = devices or int(asked or 0) or 2
    before, path = sys.argv, list(sys.path)
    with mh.virtual_devices(count, as_cuda=True):
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent.resolve()))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            if end.code == 2:  # as argparse ends
                flags.hint_misplaced("simulate", [script.name, *arguments], run)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv, sys.path[:] = before, path
    return 0
