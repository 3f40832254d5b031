"""The TensorFlow door: ``from manyhands import tensorflow as mh``.

Its devices are names that ``with mh.try_gpu():`` and ``tf.device(...)`` accept. Every name here is the
same in all four doors; what each does is written once, in :mod:`manyhands.api`.
"""

from manyhands.placement import require

require("tensorflow")

from manyhands.api import Verbs  # noqa: E402
from manyhands.backend import Arrival  # noqa: E402
from manyhands.backends import tensorflow as _backend  # noqa: E402
from manyhands.backends import tensorflow_parallel as _parallel_backend  # noqa: E402
from manyhands.engine.futures import Future, task  # noqa: E402
from manyhands.engine.parallel_native import Offer, Parallel  # noqa: E402

_verbs = Verbs(_backend)

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
split_batch = _verbs.split_batch
gather = _verbs.gather
parallel = Offer(_parallel_backend)

__all__ = [
    "Arrival",
    "Future",
    "Parallel",
    "check_same_device",
    "copy",
    "cpu",
    "device_of",
    "devices",
    "gather",
    "gpu",
    "memory",
    "num_gpus",
    "parallel",
    "split",
    "split_batch",
    "synchronize",
    "task",
    "to",
    "try_all_gpus",
    "try_gpu",
    "virtual_devices",
    "waitall",
]
