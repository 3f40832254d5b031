"""The PyTorch door: ``from manyhands import torch as mh``.

Its devices are ``torch.device``. Every name here is the same in all four doors; what each does is
written once, in :mod:`manyhands.placement.verbs`.
"""

from collections.abc import Callable
from typing import Any, overload

from manyhands.placement.moves import require

require("torch")

from manyhands.backends.protocol import Arrival  # noqa: E402
from manyhands.backends.torch import devices as _backend  # noqa: E402
from manyhands.backends.torch import dynamo as _dynamo  # noqa: E402
from manyhands.backends.torch import planning as _parallel_backend  # noqa: E402
from manyhands.backends.torch import threads_and_modes as _workers  # noqa: E402
from manyhands.errors import EngineError as _EngineError  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402
from manyhands.placement.verbs import Verbs  # noqa: E402
from manyhands.tasks.scope import Future, task  # noqa: E402
from manyhands.tasks.scope import no_threads as _no_threads  # noqa: E402
from manyhands.tasks.scope import parallel as _Scope  # noqa: E402
from manyhands.training.book.vocabulary import Accumulator, Animator, HyperParameters, Timer, add_to_class  # noqa: E402
from manyhands.training.book.vocabulary import Benchmark as _Benchmark  # noqa: E402
from manyhands.training.commands.recipes import one_cycle  # noqa: E402
from manyhands.training.loss_sum import LossSum  # noqa: E402
from manyhands.training.result import Result  # noqa: E402
from manyhands.training.torch.book.accuracy import accuracy, evaluate_accuracy_gpu, evaluate_accuracy_gpus  # noqa: E402
from manyhands.training.torch.book.datasets import load_data_fashion_mnist  # noqa: E402
from manyhands.training.torch.book.models import Residual, lenet, resnet18  # noqa: E402
from manyhands.training.torch.book.module import DataModule, Module  # noqa: E402
from manyhands.training.torch.command import load_model, load_weights  # noqa: E402
from manyhands.training.torch.trainer import Trainer, train  # noqa: E402

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


class _Open(_Scope):
    """``parallel(...)`` without a function: a scope for tasks, or the decorator ``@parallel(memory=2.0)``."""

    def __init__(self, threads: int | None, how: dict[str, Any]) -> None:
        super().__init__(
            threads,
            synchronous=how["synchronous"],
            memory_of=_workers.memory_of,
            parts_of=_workers.parts_of,
            version_of=_workers.version_of,
            bound=_workers.bound,
        )
        self._how = how

    def __enter__(self) -> _Scope:
        for name, usual in (Parallel.__init__.__kwdefaults__ or {}).items():
            if (given := self._how[name]) != usual and name != "synchronous":
                raise _EngineError(
                    f"with parallel({name}={given}): tasks are run as they are written, so that there is no plan to "
                    f"make; write with parallel(): here, and parallel(fn, {name}={given}) for a function"
                )
        return super().__enter__()

    def __call__(self, function: Callable[..., Any]) -> Parallel:
        if self._threads is not None:
            raise _EngineError(_no_threads(self._threads))
        return Parallel(function, _parallel_backend, **self._how)


@overload
def parallel(
    function: Callable[..., Any],
    *,
    reuse_outputs: bool = ...,
    memory: float = ...,
    compile: bool = ...,
    synchronous: bool = ...,
) -> Parallel: ...


@overload
def parallel(
    function: None = None,
    *,
    reuse_outputs: bool = ...,
    memory: float = ...,
    compile: bool = ...,
    synchronous: bool = ...,
    threads: int | None = ...,
) -> _Open: ...


def parallel(
    function: Callable[..., Any] | None = None,
    *,
    reuse_outputs: bool = False,
    memory: float = 1.3,
    compile: bool = False,
    synchronous: bool = False,
    threads: int | None = None,
) -> Parallel | _Open:
    """``fast = parallel(fn)``: gives what ``fn`` gives, sooner where that is possible; ``with parallel():`` for tasks.

    The first call traces the function for its arguments' shapes, plans it over lanes, proves and measures the plans,
    and keeps the fastest; ``fast.explain()`` says what was chosen and why. Results belong to the caller, unless
    ``reuse_outputs=True`` allows the next call to overwrite them. A plan takes at most ``memory`` times what plain
    execution takes. ``compile=True`` also tries plans in which runs of small operations are compiled (Inductor), each a
    task of its own. ``synchronous=True`` runs the schedule's order, or a scope's tasks, in the caller's thread, for
    debugging. In a scope, ``task(fn)(a, b)`` runs beside others, on one of ``threads`` threads. As a decorator:
    ``@parallel``, ``@parallel(memory=2.0)``, of methods too.
    """
    how = {"reuse_outputs": reuse_outputs, "memory": memory, "compile": compile, "synchronous": synchronous}
    opened = _Open(threads, how)
    return opened if function is None else opened(function)


def compile_backend(module: Any, inputs: Any, **given: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="manyhands")``: forward and backward graphs, each planned over lanes.

    Runs of small operations are compiled first; ``options={"fuse": False}`` leaves them as they are.
    """
    fuse = _dynamo.options_from(given).get("fuse", True)
    return _dynamo.compile_with(module, inputs, lambda function: Parallel(function, _parallel_backend, compile=fuse))


_dynamo.register(compile_backend, only_if_loaded=True)


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
    "compile_backend",
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
