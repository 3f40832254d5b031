"""manyhands for MXNet: ``from manyhands import mxnet as mh``.

Its devices are contexts.
The names are the same for all four frameworks (:mod:`manyhands.names`); the verbs are written once, in
:mod:`manyhands.placement.verbs`.

The module leaves MXNet in the mode it is in: call ``npx.set_np()`` yourself for ``mx.np`` arrays, as the book does. A
model is trained in the mode in which its parameters were made.
"""

from typing import TYPE_CHECKING

from manyhands.placement.moves import require

require("mxnet")

from manyhands import errors as errors  # noqa: E402
from manyhands import names as _names  # noqa: E402
from manyhands.backends.mxnet import devices as _backend  # noqa: E402
from manyhands.placement.verbs import Verbs as _Verbs  # noqa: E402

_verbs = _Verbs(_backend)

cpu = _verbs.cpu
gpu = _verbs.gpu
num_gpus = _verbs.num_gpus
try_gpu = _verbs.try_gpu
try_all_gpus = _verbs.try_all_gpus
devices = _verbs.devices
memory = _verbs.memory
virtual_devices = _verbs.virtual_devices
device_of = _verbs.device_of
to = _verbs.to
copy = _verbs.copy
check_same_device = _verbs.check_same_device
synchronize = _verbs.synchronize
waitall = _verbs.waitall
split = _verbs.split
gather = _verbs.gather

if TYPE_CHECKING:
    from manyhands.book.mxnet import Trainer as Trainer
    from manyhands.book.mxnet import load_model as load_model
    from manyhands.book.mxnet import load_weights as load_weights
    from manyhands.names_for_types import *  # noqa: F403
    from manyhands.parallel.handed_over import ParallelEntry as _Offer

    parallel: _Offer
else:
    __all__, __getattr__, __dir__ = _names.lazy(__name__)
