"""Settings, and the trainer's options by topic: how a step is run, its checkpoints, its workers, where it ends.

``Trainer(step=mh.Step(accumulate=4), checkpoints=mh.Checkpoints(every=100))``. Each object checks its values when it is
made and means the same in every framework; what a framework cannot do, its trainer refuses by name.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from manyhands import amounts
from manyhands import shares as _shares
from manyhands.errors import BadSettings
from manyhands.training import refusals

BatchStats = Literal["per_device", "global"]
Optimize = Literal["auto", "off", "max"]
ENDLESS = 2**31 - 1  # epochs of a job that something else ends
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]

# What other libraries call a precision, and ours for it.
_PRECISIONS = {"fp32": ("32", "32-true", "float32"), "fp64": ("64", "64-true", "float64", "double")}
_PRECISIONS["bf16"] = ("bf16-mixed", "bf16-true", "bfloat16")
_PRECISIONS["fp16"] = ("16", "16-mixed", "16-true", "float16", "half")


class _Topic:
    """Shows the options that differ from their defaults: ``Step(accumulate=4)``."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        changed = [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]
        return f"{type(self).__name__}({', '.join(changed)})"


@refusals.topic("step")
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Step(_Topic):
    """How a training step is run: ``Trainer(step=mh.Step(accumulate=4))``.

    The first options say how the batch is divided, ``on_nan`` what happens to a bad one. ``optimize`` chooses how fast
    the same step is run.

    Args:
        shares: How large a part of each batch every device gets: parts of one (``[0.7, 0.3]``) or whole numbers
            (``[7, 3]``), or ``"measured"``: their speed is measured once, before the first step. Default: None, equal
            parts.
        accumulate: Gradient accumulation: each device processes its shard in this many micro-batches. Needs less memory
            and gives the same update. Default: 1.
        micro_batch_size: Gradient accumulation by size, instead of ``accumulate``: no device processes more samples at
            once. Default: None, whole shards.
        batch_stats: Whether BatchNorm takes its statistics over each device's shard (``"per_device"``) or over the
            whole batch (``"global"``). Default: None, per device; in JAX a step is one program over the whole batch,
            so they are always global there (with ``accumulate`` over each micro-batch).
        on_nan: What to do when the loss is NaN or infinite: ``"stop"`` ends the job and names the step and its samples,
            ``"continue"`` skips that batch. Default: ``"stop"``.
        activation_checkpointing: Keep the inputs of blocks only, and compute the rest again in the backward pass: less
            memory, the same bits. True takes the model's blocks (children of a ModuleList or a Sequential that have
            several layers), a function picks modules: ``lambda module: isinstance(module, Block)``. PyTorch only.
            Default: False.
        wrt: Which variables are trained, in JAX: a filter of NNX's, as ``nnx.LoRAParam`` or
            ``nnx.PathContains("adapter")``. All others stay bit for bit as they are, and the optimizer keeps nothing
            for them. Elsewhere the model says it (``requires_grad_(False)``, ``layer.trainable = False``,
            ``grad_req = "null"``). Default: None, all parameters.
        shard: Divide parameters, gradients and optimizer state over the devices (PyTorch's FSDP2), for models that one
            device cannot hold. The same update; checkpoints are the same. PyTorch only. Default: False, every device
            holds all of them.
        optimize: How the same step is run. ``"auto"``: data stay on the device, and what the device and the model allow
            is done; on GPUs the step is captured in CUDA graphs, with weight gradients on lanes of their own and
            fused normalisation (PyTorch). ``"max"``: compiled by PyTorch's compiler as well, which takes half a minute
            and pays in long jobs of nets whose time goes into many small kernels. ``"off"``: plain steps, as you would
            write them; ``precision="auto"`` is that of the weights then. PyTorch, and all but ``"max"`` in JAX.
            Default: ``"auto"``.
    """

    shares: Sequence[float] | Literal["measured"] | None = None
    accumulate: int = 1
    micro_batch_size: int | None = None
    batch_stats: BatchStats | None = None
    on_nan: Literal["stop", "continue"] = "stop"
    activation_checkpointing: bool | Callable[[Any], bool] = False
    shard: bool = False
    wrt: Any = None
    optimize: Optimize = "auto"

    def __post_init__(self) -> None:
        make_plain(self, ("accumulate", "micro_batch_size"), Integral, int)
        check_positive(self, "accumulate")
        if self.micro_batch_size is not None:
            check_positive(self, "micro_batch_size")
            if self.accumulate > 1:
                both = f"accumulate={self.accumulate} and micro_batch_size={self.micro_batch_size}"
                raise BadSettings(f"{both} exclude each other: choose one")
        if self.batch_stats is not None:
            check_choice(self, "batch_stats", ("per_device", "global"))
        check_choice(self, "on_nan", ("stop", "continue"))
        check_choice(self, "shard", (True, False))
        check_choice(self, "optimize", ("auto", "off", "max"))
        if not callable(self.activation_checkpointing):
            check_choice(self, "activation_checkpointing", (True, False), ", or a function that picks modules")
        if self.activation_checkpointing and self.optimize == "max":
            raise BadSettings("activation_checkpointing and optimize='max', which decides what to keep: choose one")
        for name, default in (("accumulate", 1), ("micro_batch_size", None)):
            if self.batch_stats == "global" and (value := getattr(self, name)) != default:
                raise BadSettings(f"batch_stats='global' takes the whole batch, {name}={value} parts of it: choose one")
        if isinstance(self.shares, str) and self.shares != "measured":
            raise BadSettings(f"shares={self.shares!r}: give one number per device, 'measured', or None")
        if self.shares is not None and not isinstance(self.shares, str):
            _shares.check(self.shares)
            object.__setattr__(self, "shares", tuple(self.shares))

    def in_micro_batches(self, batch_size: int, devices: int) -> Step:
        """The same options, with the number of micro-batches in which no shard has larger ones than asked for."""
        if self.micro_batch_size is None:
            return self
        if isinstance(self.shares, str):  # measured: any device may get almost all
            largest = batch_size
        else:
            largest = max(_shares.sizes(batch_size, devices, self.shares))
        return dataclasses.replace(self, accumulate=-(-largest // self.micro_batch_size), micro_batch_size=None)


@refusals.topic("checkpoints")
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkpoints(_Topic):
    """When a run writes checkpoints: ``Trainer(run="runs/mine", checkpoints=mh.Checkpoints(every=100))``.

    Args:
        every: Steps between two checkpoints. Default: None, one at the end of every epoch.
        keep: How many of the newest checkpoints to keep; older ones are deleted. Default: 3.
    """

    every: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        make_plain(self, ("every", "keep"), Integral, int)
        if self.every is not None:
            check_positive(self, "every")
        check_positive(self, "keep")


@refusals.topic("workers")
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Workers(_Topic):
    """The worker processes of a job, in PyTorch: ``Trainer(devices=["cpu"], workers=mh.Workers(per_device=2))``.

    PyTorch trains on several devices with one process each. In JAX, TensorFlow and MXNet one process drives all of
    them, and these options are refused.

    Args:
        per_device: Processes per device. With more than one, a single device stands in for several. Default: 1.
        hang_seconds: A worker that makes no step for this many seconds has hung: the job ends with an error that shows
            where. The first steps get ten times as long. Default: 60.
    """

    per_device: int = 1
    hang_seconds: float = 60.0

    def __post_init__(self) -> None:
        make_plain(self, ("per_device",), Integral, int)
        make_plain(self, ("hang_seconds",), Real, float)
        check_positive(self, "per_device")
        if not is_from_zero(self.hang_seconds) or not self.hang_seconds:
            raise BadSettings(f"{as_written(self, 'hang_seconds')}: give a number of seconds above zero")


@refusals.topic("limits")
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Limits(_Topic):
    """Where training ends, how much of the data an epoch takes, and when to evaluate.

    ``Trainer(limits=mh.Limits(max_steps=1000, evaluate_every="100 steps"))``. A resumed job counts from where it was:
    steps and time are those of the whole run. The first limit that is reached ends the job, with an evaluation and a
    checkpoint; all processes end after the same step. With ``max_steps`` or ``max_time``, and no ``max_epochs``, the
    number of epochs is not limited, and the data may be a stream without an end.

    Args:
        max_steps: End the job after this many steps. Schedules follow ``step / max_steps`` then. Default: None.
        max_time: End the job after this much training time, including that of the jobs that it resumes: ``"2h"``,
            ``"1h30m"``, ``"90s"``, ``"12:00:00"``, a number of seconds or a ``timedelta``. Default: None.
        limit_batches: An epoch is only this many batches of the training data, or this part of them: ``100``, ``0.1``.
            ``1`` is one batch, ``1.0`` is all. Default: None, all of them.
        limit_val_batches: An evaluation takes only the first batches of the validation data, or this part of them. They
            are those of the loader, else of ``batch_size`` samples. Default: None, all.
        evaluate_every: ``"500 steps"`` or ``"2 epochs"``. After so many steps there is an evaluation and a row of
            metrics, whose training metrics are over the steps since the row before. Default: None, every epoch.
        overfit_batches: Train on the same first batches of the data in every epoch: a model that can learn at all
            learns them by heart. Default: None.
    """

    max_steps: int | None = None
    max_time: str | float | datetime.timedelta | None = None
    limit_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    evaluate_every: str | None = None
    overfit_batches: int | None = None

    def __post_init__(self) -> None:
        counts, parts = ("max_steps", "overfit_batches"), ("limit_batches", "limit_val_batches")
        make_plain(self, (*counts, *parts), Integral, int)
        make_plain(self, parts, np.floating, float)
        for name in counts:
            if getattr(self, name) is not None:
                check_positive(self, name)
        for name in parts:
            check_part(getattr(self, name), as_written(self, name))
        if self.max_time is not None:
            seconds = amounts.parse_seconds(self.max_time)
            if seconds is None:
                raise BadSettings(f"{as_written(self, 'max_time')}: give '2h', '1h30m', '90s', '12:00:00' or seconds")
            object.__setattr__(self, "max_time", seconds)
        if self.evaluate_every is not None and amounts.parse_interval(self.evaluate_every) is None:
            raise BadSettings(f"{as_written(self, 'evaluate_every')}: say of what, '500 steps' or '2 epochs'")
        if self.limit_batches is not None and self.overfit_batches is not None:
            both = f"limit_batches={self.limit_batches} and overfit_batches={self.overfit_batches}"
            raise BadSettings(f"{both}: one takes other samples in every epoch, one the same: choose one")

    @property
    def ends_training(self) -> bool:
        """Whether a job ends without a number of epochs."""
        return self.max_steps is not None or self.max_time is not None

    @property
    def batches(self) -> int | None:
        """The most batches of an epoch; None: all. A part of them is a number once the data are known."""
        if self.overfit_batches is not None:
            return self.overfit_batches
        return self.limit_batches if isinstance(self.limit_batches, int) else None

    @property
    def evaluation(self) -> tuple[int, str]:
        """How often to evaluate: a number, and what it counts, ``"steps"`` or ``"epochs"``."""
        return amounts.parse_interval(self.evaluate_every or "1 epoch") or (1, "epochs")


Topic = Step | Checkpoints | Workers | Limits
TOPICS: dict[str, type[Topic]] = {"step": Step, "checkpoints": Checkpoints, "workers": Workers, "limits": Limits}


def check_topic(name: str, value: object) -> None:
    """Refuse what is not the topic's object: a number, a dict, the class itself."""
    kind = TOPICS[name].__name__
    if not isinstance(value, TOPICS[name]):
        text = value.__name__ if isinstance(value, type) else repr(value)
        raise BadSettings(f"{name}={text}: give a {kind} object, as {name}=mh.{kind}(...)")


# Checks of one value; the trainer's settings use them too.


def as_written(options: object, name: str) -> str:
    """An option as the user wrote it: ``Checkpoints(every=0)``; of the trainer's own just ``lr=-1``."""
    text = f"{name}={getattr(options, name)!r}"
    return f"{type(options).__name__}({text})" if isinstance(options, _Topic) else text


def make_plain(options: object, names: Iterable[str], kind: type, plain: Callable[[Any], Any]) -> None:
    """Turn NumPy's numbers into Python's, which JSON knows; the checks refuse what is not a number."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, kind) and not isinstance(value, bool):
            object.__setattr__(options, name, plain(value))


def check_positive(options: object, name: str) -> None:
    check_count(getattr(options, name), as_written(options, name))


def check_count(value: object, written: str) -> None:
    """Refuse what is not a whole number of at least 1; ``written``: the option as the user wrote it."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise BadSettings(f"{written}: give a whole number of at least 1")


def check_part(value: object, text: str) -> None:
    """Refuse what is neither a number of batches nor a part of them."""
    if value is None or (isinstance(value, float) and 0 < value <= 1):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadSettings(f"{text}: give a number of batches of at least 1, or a part of them, as 0.1 (1.0 is all)")


def check_choice(options: object, name: str, choices: Sequence[Any], hint: str = "") -> None:
    value = getattr(options, name)
    if value not in choices:
        raise BadSettings(f"{as_written(options, name)}: choose one of {', '.join(map(str, choices))}{hint}")
    object.__setattr__(options, name, choices[choices.index(value)])  # NumPy's True becomes Python's


def is_from_zero(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


# How a job is run: checked once, the same in every framework, kept in the run folder as JSON


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about a job but its model, its data and its devices."""

    max_epochs: int = 10
    batch_size: int = 256
    # The rate of an optimizer that the trainer makes; None: the optimizer's own, or the default's.
    lr: float | None = None
    seed: int = 0
    gradient_clip_val: float = 0.0
    precision: Precision = "auto"
    step: Step = Step()
    checkpoints: Checkpoints = Checkpoints()
    workers: Workers = Workers()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        make_plain(self, ("max_epochs", "batch_size", "seed"), Integral, int)
        make_plain(self, ("lr", "gradient_clip_val"), Real, float)
        check_positive(self, "max_epochs")
        check_positive(self, "batch_size")
        check_choice(self, "precision", ("auto", "fp32", "bf16", "fp16", "fp64"), _meant(self.precision))
        if self.lr is not None and not is_from_zero(self.lr):
            raise BadSettings(f"lr={self.lr!r} is not a learning rate: give a number of zero or more")
        if not is_from_zero(self.gradient_clip_val):
            raise BadSettings(f"gradient_clip_val={self.gradient_clip_val!r}: give a norm, or 0 for no clipping")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise BadSettings(f"seed={self.seed!r}: give a number from 0 to 2**63 - 1")

    @property
    def fixed_shares(self) -> list[float] | None:
        """How large each device's part of a batch is; None where all are equal, or measured."""
        shares = self.step.shares
        return None if shares is None or isinstance(shares, str) else [float(share) for share in shares]

    def check_devices(self, count: int) -> None:
        """Checks that need the number of devices."""
        if self.batch_size < count:
            size = f"batch_size={self.batch_size} is smaller than the number of devices"
            raise BadSettings(f"{size}, {count}: give at least {count}, or fewer devices")
        if self.fixed_shares is not None:
            _shares.check(self.fixed_shares, count)

    def as_dict(self) -> dict[str, Any]:
        """As JSON keeps it: the options of a topic are one object."""
        plain = dataclasses.asdict(self)
        if callable(pick := self.step.activation_checkpointing):
            plain["step"]["activation_checkpointing"] = getattr(pick, "__qualname__", type(pick).__name__)
        if self.fixed_shares is not None:
            plain["step"]["shares"] = self.fixed_shares
        if self.step.wrt is not None:
            plain["step"]["wrt"] = getattr(self.step.wrt, "__name__", None) or str(self.step.wrt)
        return plain


def _meant(precision: object) -> str:
    meant = next((name for name, aliases in _PRECISIONS.items() if str(precision) in aliases), None)
    return "" if meant is None else f". Did you mean {meant!r}?"
