"""The TensorFlow door: ``from manyhands import tensorflow as mh``.

Its devices are names that ``with mh.try_gpu():`` and ``tf.device(...)`` accept. Every name here is the
same in all four doors; what each does is written once, in :mod:`manyhands.placement.verbs`.
"""

from manyhands.placement.moves import require

require("tensorflow")

from manyhands.backends.protocol import Arrival  # noqa: E402
from manyhands.backends.tensorflow import devices as _backend  # noqa: E402
from manyhands.backends.tensorflow import planning as _parallel_backend  # noqa: E402
from manyhands.parallel.delegated import Offer, Parallel  # noqa: E402
from manyhands.placement.verbs import Verbs  # noqa: E402
from manyhands.tasks.scope import Future, task  # noqa: E402
from manyhands.training.book.vocabulary import Accumulator, Animator, HyperParameters, Timer, add_to_class  # noqa: E402
from manyhands.training.book.vocabulary import Benchmark as _Benchmark  # noqa: E402
from manyhands.training.commands.recipes import one_cycle  # noqa: E402
from manyhands.training.loss_sum import LossSum  # noqa: E402
from manyhands.training.result import Result  # noqa: E402
from manyhands.training.tensorflow.book.accuracy import accuracy, evaluate_accuracy_gpu, evaluate_accuracy_gpus  # noqa: E402
from manyhands.training.tensorflow.book.datasets import load_data_fashion_mnist  # noqa: E402
from manyhands.training.tensorflow.book.models import Residual, lenet, resnet18  # noqa: E402
from manyhands.training.tensorflow.book.module import DataModule, Module  # noqa: E402
from manyhands.training.tensorflow.command import load_model, load_weights  # noqa: E402
from manyhands.training.tensorflow.trainer import Trainer, train  # noqa: E402

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


class Benchmark(_Benchmark):
    """``with Benchmark("text"):`` prints how long the block took, all work on the devices included."""

    def __init__(self, description: str = "Done") -> None:
        super().__init__(description, synchronize=synchronize)


__all__ = [
    "Accumulator",
    "Animator",
    "Arrival",
    "Benchmark",
    "DataModule",
    "Future",
    "HyperParameters",
    "LossSum",
    "Module",
    "Parallel",
    "Residual",
    "Result",
    "Timer",
    "Trainer",
    "accuracy",
    "add_to_class",
    "check_same_device",
    "copy",
    "cpu",
    "device_of",
    "devices",
    "evaluate_accuracy_gpu",
    "evaluate_accuracy_gpus",
    "gather",
    "gpu",
    "lenet",
    "load_data_fashion_mnist",
    "load_model",
    "load_weights",
    "memory",
    "num_gpus",
    "one_cycle",
    "parallel",
    "resnet18",
    "split",
    "split_batch",
    "synchronize",
    "task",
    "to",
    "train",
    "try_all_gpus",
    "try_gpu",
    "virtual_devices",
    "waitall",
]
