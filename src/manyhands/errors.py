"""Every error of manyhands, in one tree.

::

    ManyhandsError
     +- DeviceError
     |   +- BadDevice            a name or a number that cannot be a device        (ValueError)
     |   +- NoSuchDevice         a device that this machine does not have          (RuntimeError)
     |   +- DuplicateDevices     one device twice in a list                        (ValueError)
     |   +- DeviceMismatch       tensors that must be together are not             (RuntimeError)
     |   +- SeveralDevices       one device was asked for, there are several       (RuntimeError)
     |   +- PlacementFailed      the framework put a tensor somewhere else         (RuntimeError)
     |   +- VirtualDevicesError  virtual devices cannot be made (any more)         (RuntimeError)
     +- DataError
     |   +- ForeignTensor        an array of another framework                     (TypeError)
     |   +- NotATensor           no tensor where one is needed                     (TypeError)
     |   +- BadBatch             a batch that cannot be split or put together      (ValueError)
     |   +- BadShares            shares that are no shares                         (ValueError)
     |   +- ChangedInFlight      a source was written to while it was being copied (RuntimeError)
     |   +- BadLabels            labels that a model has no output for             (ValueError)
     |   +- BadDataFile          a data file that is damaged or not what it should be  (ValueError)
     |   +- DataNotFound         data files that are not where they were said to be  (FileNotFoundError)
     +- NotJson                  a value that JSON cannot hold exactly             (ValueError)
     +- BadRunFolder             a folder that is no run, or a run with bad files  (ValueError)
     +- BadProfile               a profile or link file that cannot be used        (ValueError)
     +- RunInUse                 another job writes to the run's folder            (RuntimeError)
     +- CheckpointError
     |   +- BadCheckpoint        something that cannot be saved as a checkpoint    (ValueError)
     |   +- NoCheckpoint         nothing to load                                   (FileNotFoundError)
     |   +- CheckpointDamaged    a file of a checkpoint is missing or was changed  (ValueError)
     |   +- CheckpointNotWritten no space or another refusal of the disk           (OSError)
     |   +- WrongCheckpoint      a checkpoint of another model, data set or job    (ValueError)
     +- TrainingError
     |   +- BadSettings          settings that no job can have                     (ValueError)
     |   |   +- UnknownOption    an option that a trainer does not have            (TypeError)
     |   +- LossIsNotANumber     a loss that is infinite or NaN                    (ArithmeticError)
     |   +- NotSendable          something that cannot be sent to a worker         (TypeError)
     |   +- WorkerFailed         a worker that died, failed or hangs               (RuntimeError)
     |   +- CallbackFailed       a callback of the user's raised an error          (RuntimeError)
     |   +- MetricFailed         a metric of the user's raised an error            (RuntimeError)
     +- HiddenWait               the host waited for a device where that is forbidden  (RuntimeError)
     +- EngineError
     |   +- CannotTrace          a function whose operations depend on values      (RuntimeError)
     |   |   +- NotYet           one that can perhaps be traced at its next call
     |   +- CannotFuse           operations that cannot be compiled together       (RuntimeError)
     |   +- CannotBeExact        a function that cannot be computed more exactly   (RuntimeError)
     |   +- UnsafeSchedule       a schedule that could compute something else      (RuntimeError)
     |   +- TaskCancelled        a task that was not run                           (RuntimeError)
     |   +- UndeclaredWrite      a task wrote to what it did not declare           (RuntimeError)
     |   +- WaitsForItself       tasks that wait for each other in a circle        (RuntimeError)
     +- ResultsDiffer            ways that should compute the same did not         (ArithmeticError)
     +- NotHere                  an experiment that this machine cannot show       (RuntimeError)
     +- FrameworkMissing         the framework of this door is not installed       (ImportError)
     +- PackageMissing           an optional package is not installed              (ImportError)

Each is also the built-in exception that a caller would think of first. A message says what was
asked, why it cannot be, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable


class ManyhandsError(Exception):
    """The root: ``except ManyhandsError`` catches all that this library raises on purpose."""


class DeviceError(ManyhandsError):
    """Something about devices."""


class BadDevice(DeviceError, ValueError):
    """A name or a number that cannot be a device, here or anywhere."""


class NoSuchDevice(DeviceError, RuntimeError):
    """A device that could exist, but does not on this machine."""


class DuplicateDevices(DeviceError, ValueError):
    """One device twice in a list: two replicas on it would be one and the same tensor."""


class DeviceMismatch(DeviceError, RuntimeError):
    """Tensors that must be on one device are on several."""


class SeveralDevices(DeviceError, RuntimeError):
    """A single device was asked for, but the value lives on several."""


class PlacementFailed(DeviceError, RuntimeError):
    """The framework accepted a placement and put the tensor somewhere else."""


class VirtualDevicesError(DeviceError, RuntimeError):
    """Virtual devices were asked for too late, twice, or in a number that cannot be."""


class DataError(ManyhandsError):
    """Something about tensors, batches and trees."""


class ForeignTensor(DataError, TypeError):
    """An array of another framework."""


class NotATensor(DataError, TypeError):
    """A tensor is needed and something else was given."""


class BadBatch(DataError, ValueError):
    """A batch that cannot be split, or shards that cannot be put together."""


class BadShares(DataError, ValueError):
    """Shares that are negative, all zero, not numbers, or not one per device."""


class ChangedInFlight(DataError, RuntimeError):
    """The source of an asynchronous move was written to before the move was over."""


class BadLabels(DataError, ValueError):
    """Labels that the model has no output for."""


class BadDataFile(DataError, ValueError):
    """A file of a data set that is damaged, or is not what its place or its header says."""


class DataNotFound(DataError, FileNotFoundError):
    """The files of a data set are not in the place that was given."""


class NotJson(ManyhandsError, ValueError):
    """A value that would come back from JSON as another one, or not at all."""


class BadRunFolder(ManyhandsError, ValueError):
    """A folder that is not a run's, or a file in a run's folder that cannot be read."""


class BadProfile(ManyhandsError, ValueError):
    """A file with a profile or a link that cannot be read, written, or is of another version."""


class RunInUse(ManyhandsError, RuntimeError):
    """Another job, that still runs, writes to the run's folder."""


class CheckpointError(ManyhandsError):
    """Something about checkpoints."""


class BadCheckpoint(CheckpointError, ValueError):
    """A step, a blob's name or a number of checkpoints to keep that cannot be."""


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was to be loaded from."""


class CheckpointDamaged(CheckpointError, ValueError):
    """A file of a checkpoint is missing, truncated, edited, or of another format."""


class CheckpointNotWritten(CheckpointError, OSError):
    """The disk refused; older checkpoints are still there, and training can go on."""


class WrongCheckpoint(CheckpointError, ValueError):
    """A whole checkpoint, but of another model, data set or job."""


class TrainingError(ManyhandsError):
    """Something about training."""


class BadSettings(TrainingError, ValueError):
    """Settings that no job can have."""


class UnknownOption(BadSettings, TypeError):
    """An option that a trainer does not have; the message names the one that is meant."""


class LossIsNotANumber(TrainingError, ArithmeticError):
    """The loss of a step is infinite or not a number."""


class NotSendable(TrainingError, TypeError):
    """A model, function or data set that cannot be sent to a worker process."""


class WorkerFailed(TrainingError, RuntimeError):
    """A worker died, raised, or makes no step any more; the message names its rank."""


class CallbackFailed(TrainingError, RuntimeError):
    """A callback raised an error; the message names it and the moment, ``__cause__`` is the error itself."""


class MetricFailed(TrainingError, RuntimeError):
    """A metric raised an error; the message names it and what it was given, ``__cause__`` is the error itself."""


class HiddenWait(ManyhandsError, RuntimeError):
    """The host waited for a device in a block that forbids it."""


class EngineError(ManyhandsError):
    """Something about automatic parallelism."""


class CannotTrace(EngineError, RuntimeError):
    """A function that cannot be traced, most often because it looks at values."""

    holds: Callable[[], bool] | None = None  # whether that is still so, where it may change


class MustRunAsWritten(CannotTrace):
    """A call that is run as it is written: its operations are observed one by one, or its arguments share memory."""


class CannotGuard(EngineError, RuntimeError):
    """A function that Dynamo cannot follow, so that its guards are not known."""


class NotYet(CannotTrace):
    """A function that cannot be traced at this call, but perhaps at the next."""


class ChangesOutside(CannotTrace):
    """A function that changes something outside itself: at its first call only, as what fills a cache, or at every."""


class CannotFuse(EngineError, RuntimeError):
    """A function none of whose operations can be compiled together here."""


class CannotCompile(EngineError, RuntimeError):
    """Kernels of our own cannot be compiled or launched on this device."""


class CannotBeExact(EngineError, RuntimeError):
    """A function that cannot be run with wider numbers, to see how exact its results are; or it says nothing."""


class UnsafeSchedule(EngineError, RuntimeError):
    """Two tasks that conflict are not ordered by the schedule."""


class TaskCancelled(EngineError, RuntimeError):
    """A task that was not run: one that it needs failed, or its scope was left by an error."""


class UndeclaredWrite(EngineError, RuntimeError):
    """An argument of a task was written to while the task ran, and the task had not declared it."""


class WaitsForItself(EngineError, RuntimeError):
    """A task asked for a result that cannot be there before it is over itself."""


class ResultsDiffer(ManyhandsError, ArithmeticError):
    """Two ways of an experiment gave different results, so that their times mean nothing."""


class NotHere(ManyhandsError, RuntimeError):
    """An experiment has nothing to show on this machine or in this framework."""


class FrameworkMissing(ManyhandsError, ImportError):
    """The framework behind a door is not installed."""


class PackageMissing(ManyhandsError, ImportError):
    """A package that only some features need is not installed."""


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}"
