"""manyhands for TensorFlow: ``from manyhands import tensorflow as mh``.

Its devices are names that ``with mh.try_gpu():`` and ``tf.device(...)`` accept.
The names are the same for all four frameworks (:mod:`manyhands.names`); the verbs are written once, in
:mod:`manyhands.placement.verbs`.
"""

from typing import TYPE_CHECKING

from manyhands.placement.moves import require

require("tensorflow")

from manyhands import errors as errors  # noqa: E402
from manyhands import names as _names  # noqa: E402
from manyhands.backends.tensorflow import devices as _backend  # noqa: E402
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
    from manyhands.book.tensorflow import Trainer as Trainer
    from manyhands.book.tensorflow import load_model as load_model
    from manyhands.book.tensorflow import load_weights as load_weights
    from manyhands.names_for_types import *  # noqa: F403
    from manyhands.parallel.handed_over import ParallelEntry as _Offer

    parallel: _Offer
else:
    __all__, __getattr__, __dir__ = _names.lazy(__name__)
