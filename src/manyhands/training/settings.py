"""How a job shall be run: checked once, the same in every framework, kept in the run folder as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal

from manyhands import shares as _shares
from manyhands.errors import BadSettings

Precision = Literal["auto", "fp32", "bf16", "fp64"]
BatchStats = Literal["per_device", "global"]
_CHOICES = {
    "precision": ("auto", "fp32", "bf16", "fp64"),
    "batch_stats": ("per_device", "global"),
    "on_nan": ("stop", "continue"),
}


# What other libraries call a precision, and ours for it. There is no fp16: it needs the loss scaled.
_PRECISIONS = {"fp32": ("32", "32-true", "float32"), "fp64": ("64", "64-true", "float64", "double")}
_PRECISIONS["bf16"] = ("bf16-mixed", "bf16-true", "bfloat16", "16", "16-mixed", "16-true", "fp16", "float16", "half")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about a job but its model, its data and its devices."""

    max_epochs: int = 10
    batch_size: int = 256
    # The rate of an optimizer that the trainer makes; None: the optimizer's own, or the default's.
    lr: float | None = None
    seed: int = 0
    # How the samples of a batch are divided: None (evenly), one number per device, or "measured".
    shares: Sequence[float] | Literal["measured"] | None = None
    gradient_clip_val: float = 0.0
    # Each device works its shard off in this many parts: less memory, the same update.
    accumulate: int = 1
    batch_stats: BatchStats = "per_device"
    precision: Precision = "auto"
    # Whether the trainer may choose faster ways to run the same step (one CUDA graph, compiled kernels).
    fast: bool = True
    # None: where compiling pays for the number of steps that are planned.
    compile: bool | None = None
    # Whether weight gradients are computed beside the backward pass, on streams of their own (the fast step alone).
    side_lanes: bool = True
    # Whether batch normalisation, addition and ReLU are done in one go by kernels of our own (the fast step alone).
    own_kernels: bool = True
    # Whether the step is planned as a whole, by ``parallel``, and the plan used if it is faster (the fast step alone).
    # None: where planning pays for the number of steps.
    parallel: bool | None = None
    # A loss that is no number: "stop" ends the job and names step and samples, "continue" leaves that batch out.
    on_nan: Literal["stop", "continue"] = "stop"
    # Steps between checkpoints; None: at the end of every epoch. Only where there is a run folder.
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    # A rank that makes no step for so many seconds is taken for hanging. The first steps get ten times as long.
    hang_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_epochs", "batch_size", "accumulate", "keep_checkpoints", "checkpoint_every", "seed"):
            self._make_plain(name, Integral, int)
        for name in ("lr", "gradient_clip_val", "hang_seconds"):
            self._make_plain(name, Real, float)
        for name in ("max_epochs", "batch_size", "accumulate", "keep_checkpoints"):
            _check_positive(name, getattr(self, name))
        if self.checkpoint_every is not None:
            _check_positive("checkpoint_every", self.checkpoint_every)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadSettings(
                    f"{name}={getattr(self, name)!r} is not known: choose one of {', '.join(choices)}"
                    f"{_meant(getattr(self, name)) if name == 'precision' else ''}"
                )
        if self.lr is not None and not _is_from_zero(self.lr):
            raise BadSettings(f"lr={self.lr!r} is not a learning rate: give a number of zero or more")
        if not _is_from_zero(self.gradient_clip_val):
            raise BadSettings(f"gradient_clip_val={self.gradient_clip_val!r}: give a norm, or 0 for no clipping")
        if not _is_from_zero(self.hang_seconds) or not self.hang_seconds:
            raise BadSettings(f"hang_seconds={self.hang_seconds!r}: give a number of seconds above zero")
        if isinstance(self.shares, str) and self.shares != "measured":
            raise BadSettings(f"shares={self.shares!r}: give one number per device, 'measured', or None")
        for name in ("compile", "parallel"):
            if getattr(self, name) and not self.fast:
                raise BadSettings(f"{name}=True is a faster way to run a step, fast=False allows none: choose one")
        if self.compile and self.parallel:
            raise BadSettings(
                "compile=True lets a compiler make the step, parallel=True makes a plan of its operations as they are: "
                "choose one"
            )
        if self.batch_stats == "global" and self.accumulate > 1:
            raise BadSettings(
                "batch_stats='global' takes statistics over the whole batch, accumulate > 1 works it off in parts: "
                "choose one"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise BadSettings(f"seed={self.seed!r}: give a number from 0 to 2**63 - 1")

    def _make_plain(self, name: str, kind: type, plain: Callable[[Any], Any]) -> None:
        """A number of NumPy's becomes one of Python's, which JSON knows; what is no number is left for the checks."""
        value = getattr(self, name)
        if isinstance(value, kind) and not isinstance(value, bool):
            object.__setattr__(self, name, plain(value))

    def check_devices(self, count: int) -> None:
        """What can only be said once the number of devices is known."""
        if self.batch_size < count:
            raise BadSettings(
                f"batch_size={self.batch_size} is smaller than the number of devices, {count}: a batch is divided over "
                f"them. Give at least {count}, or fewer devices"
            )
        if self.shares is not None and self.shares != "measured":
            _shares.check(self.shares, count)

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        if self.shares is not None and not isinstance(self.shares, str):
            plain["shares"] = [float(share) for share in self.shares]
        return plain


def _meant(precision: object) -> str:
    ours = next((name for name, others in _PRECISIONS.items() if str(precision) in others), None)
    return "" if ours is None else f". Did you mean {ours!r}?"


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadSettings(f"{name}={value!r}: give a whole number of at least 1")


def _is_from_zero(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
