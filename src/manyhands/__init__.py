"""manyhands: compute and train on every device you have.

Import the module of your framework: ``from manyhands import torch as mh`` (or ``jax``, ``tensorflow``,
``mxnet``). This package by itself imports no framework.
"""

from manyhands.device import Device, DeviceRecord, Memory
from manyhands.errors import ManyhandsError

__version__ = "0.2.0"
__all__ = ["Device", "DeviceRecord", "ManyhandsError", "Memory", "__version__"]
