"""How a job is run: checked once, the same in every framework, kept in the run folder as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal

from manyhands import shares as _shares
from manyhands.errors import BadSettings
from manyhands.training.options import (
    Checkpoints,
    Limits,
    Step,
    Workers,
    check_choice,
    check_positive,
    is_from_zero,
    make_plain,
)

ENDLESS = 2**31 - 1  # epochs of a job that something else ends
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]

# What other libraries call a precision, and ours for it.
_PRECISIONS = {"fp32": ("32", "32-true", "float32"), "fp64": ("64", "64-true", "float64", "double")}
_PRECISIONS["bf16"] = ("bf16-mixed", "bf16-true", "bfloat16")
_PRECISIONS["fp16"] = ("16", "16-mixed", "16-true", "float16", "half")


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
            raise BadSettings(
                f"batch_size={self.batch_size} is smaller than the number of devices, {count}: a batch is divided over "
                f"them. Give at least {count}, or fewer devices"
            )
        if self.fixed_shares is not None:
            _shares.check(self.fixed_shares, count)

    def as_dict(self) -> dict[str, Any]:
        """As JSON keeps it: the options of a topic are one object."""
        plain = asdict(self)
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
