"""Every error of manyhands: a tree under :class:`ManyhandsError`.

Each is also the built-in exception that a caller would think of first. A message says what was requested, why it
failed, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable


class ManyhandsError(Exception):
    """The root: ``except ManyhandsError`` catches all that this library raises on purpose."""


class DeviceError(ManyhandsError):
    """Something about devices."""


class BadDevice(DeviceError, ValueError):
    """A name or a number that is not a device on any machine."""


class NoSuchDevice(DeviceError, RuntimeError):
    """A device that could exist, but does not on this machine."""


class DuplicateDevices(DeviceError, ValueError):
    """The same device twice in a list: two replicas on it would share their memory."""


class DeviceMismatch(DeviceError, RuntimeError):
    """Tensors that must be on one device are on several."""


class SeveralDevices(DeviceError, RuntimeError):
    """One device is required, but the value is on several."""


class PlacementFailed(DeviceError, RuntimeError):
    """The framework accepted a placement and put the tensor somewhere else."""


class VirtualDevicesError(DeviceError, RuntimeError):
    """Virtual devices were requested too late, twice with different numbers, or in an invalid number."""


class DataError(ManyhandsError):
    """Something about tensors, batches and trees."""


class ForeignTensor(DataError, TypeError):
    """An array of another framework."""


class NotATensor(DataError, TypeError):
    """Something else where a tensor is needed."""


class BadBatch(DataError, ValueError):
    """A batch that cannot be split, or shards that cannot be put together."""


class BadShares(DataError, ValueError):
    """Shares that are negative, all zero, not numbers, or not one per device."""


class ChangedInFlight(DataError, RuntimeError):
    """The source of an asynchronous move was written to before the move was over."""


class BadLabels(DataError, ValueError):
    """Labels that the model has no output for."""


class BadDataFile(DataError, ValueError):
    """A data file that is damaged, or contradicts its name or its header."""


class DataNotFound(DataError, FileNotFoundError):
    """The files of a data set are missing."""


class NotJson(ManyhandsError, ValueError):
    """A value that JSON cannot store exactly."""


class BadRunFolder(ManyhandsError, ValueError):
    """A folder that is not a run, or a file of a run that cannot be read."""


class BadProfile(ManyhandsError, ValueError):
    """A profile or link file that cannot be read or written, or has another version."""


class RunInUse(ManyhandsError, RuntimeError):
    """Another running job writes to the run's folder."""


class CheckpointError(ManyhandsError):
    """Something about checkpoints."""


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no checkpoint to load."""


class CheckpointDamaged(CheckpointError, ValueError):
    """A file of a checkpoint is missing, truncated, edited, or of another format."""


class CheckpointNotWritten(CheckpointError, OSError):
    """The disk refused to write. Older checkpoints are intact, and training can continue."""


class WrongCheckpoint(CheckpointError, ValueError):
    """An intact checkpoint of another model, data set or job."""


class TrainingError(ManyhandsError):
    """Something about training."""


class BadSettings(TrainingError, ValueError):
    """Invalid settings."""


class UnknownOption(BadSettings, TypeError):
    """An option that the trainer does not have. The message suggests the closest one."""


class LossIsNotANumber(TrainingError, ArithmeticError):
    """The loss of a step is infinite or not a number."""


class NotSendable(TrainingError, TypeError):
    """A model, function or data set that cannot be sent to a worker process."""


class WorkerFailed(TrainingError, RuntimeError):
    """A worker died, raised an error or hangs. The message names its rank."""


class CallbackFailed(TrainingError, RuntimeError):
    """A callback raised an error; the message names the callback and the event, ``__cause__`` is the error."""


class MetricFailed(TrainingError, RuntimeError):
    """A metric raised an error; the message names the metric and its inputs, ``__cause__`` is the error."""


class HiddenWait(ManyhandsError, RuntimeError):
    """The host waited for a device in a block that forbids it."""


class NothingWatched(ManyhandsError, RuntimeError):
    """There is neither a GPU nor a virtual device, so that a guard can see nothing. A test that ends so is skipped."""

    def __init__(self) -> None:
        super().__init__(
            "no hidden wait could be seen: there is neither a GPU nor a virtual device. MANYHANDS_VIRTUAL_DEVICES=1, "
            "or mh.virtual_devices(1) before tensors are made, lets the CPU stand in for a GPU"
        )


class EngineError(ManyhandsError):
    """Something about automatic parallelism."""


class CannotTrace(EngineError, RuntimeError):
    """A function that cannot be traced, most often because it reads values."""

    holds: Callable[[], bool] | None = None  # whether the reason still holds, where it may change


class NotYet(CannotTrace):
    """A function that cannot be traced at this call, but perhaps at the next."""


class CannotFuse(EngineError, RuntimeError):
    """A function none of whose operations can be fused."""


class CannotCompile(EngineError, RuntimeError):
    """manyhands' own kernels cannot be compiled or launched on this device."""


class UnsafeSchedule(EngineError, RuntimeError):
    """Two tasks that conflict are not ordered by the schedule."""


class TaskCancelled(EngineError, RuntimeError):
    """A task that did not run: a task that it needs failed, or an error left its scope."""


class UndeclaredWrite(EngineError, RuntimeError):
    """An argument was written to during a task that did not declare it in ``writes``."""


class WaitsForItself(EngineError, RuntimeError):
    """A task waits for a result that needs the task itself to finish: a deadlock."""


class ResultsDiffer(ManyhandsError, ArithmeticError):
    """Two variants of an experiment gave different results, so their times cannot be compared."""


class NotMeasured(ManyhandsError, RuntimeError):
    """Nothing was measured: the times cannot be true, or other programs use the machine."""


class FrameworkMissing(ManyhandsError, ImportError):
    """The framework of an import such as ``manyhands.jax`` is not installed."""


class PackageMissing(ManyhandsError, ImportError):
    """A package that only some features need is not installed."""


def type_in_words(value: object) -> str:
    """The type of a value with its article, for messages.

    >>> type_in_words(3), type_in_words("text")
    ('an int', 'a str')
    """
    name = type(value).__name__
    acronym = name[:2].isupper() or name == "ndarray"  # an NDArray, an LSTM
    return f"{'an' if name[0].upper() in ('AEFHILMNORSX' if acronym else 'AEIO') else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}"
