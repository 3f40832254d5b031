"""Which learning rate a job uses, the trainer's or the optimizer's: one rule for all frameworks.

``lr`` is the rate of an optimizer that the trainer makes: plain SGD by default, one given by name (``"adamw"``), or one
given as a class or a function that takes a rate. These are called with ``lr`` if it is given, and otherwise with their
own default. An optimizer object, or a function that takes no rate, has its own: giving ``lr`` as well is an error.

============================================  =====================  =====================
``optimizer=``                                ``lr=0.01``            without ``lr``
============================================  =====================  =====================
nothing                                       ``SGD(0.01)``          ``SGD(0.1)``
``"adamw"`` or ``torch.optim.AdamW``          ``AdamW(lr=0.01)``     ``AdamW()``
``optax.adamw`` (has no default)              ``optax.adamw(0.01)``  an error: give ``lr``
``torch.optim.AdamW(parameters, lr=1e-3)``    an error               as it is
============================================  =====================  =====================
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.loss.own_step import is_default

_SGD_RATE = 0.1  # of plain SGD, which is trained with where no optimizer is given


@dataclass(frozen=True)
class Optimizers:
    """A framework's optimizers, and how they take a learning rate."""

    where: str  # the module that has them
    example: str
    finished: tuple[type, ...]  # the first: what a function of the rate has to return
    by_name: Callable[[], Mapping[str, Any]]
    sgd: Callable[..., Any]
    rate: str  # the argument that is the learning rate
    # Functions take the model's parameters, and a rate by that name; in other frameworks a rate alone, by any name.
    of_parameters: bool

    def check(self, optimizer: Any, lr: float | None) -> None:
        """Refuse what cannot be an optimizer, and a second learning rate: when a trainer is made, not in ``fit``."""
        if optimizer is None:
            return
        if isinstance(optimizer, str):
            self._by_name(optimizer)
        elif isinstance(optimizer, self.finished):
            self.refuse_rate(lr, f"optimizer={type(optimizer).__name__}(...)")
        elif not callable(optimizer):
            function = "a function of the parameters" if self.of_parameters else "a function of the learning rate"
            raise BadSettings(
                f"optimizer={optimizer!r} is of type {type(optimizer).__name__}: give a name ('adam'), {self.example}, "
                f"{function}, or an optimizer object"
            )
        elif isinstance(optimizer, functools.partial) and self.rate in optimizer.keywords:
            has = f"{self.rate}={optimizer.keywords[self.rate]}"
            self.refuse_rate(lr, f"optimizer=partial({_name_of(optimizer.func)}, {has})")
        elif self._rate_argument(optimizer) is None:
            self.refuse_rate(lr, f"optimizer={_name_of(optimizer)}, a function that takes no {self.rate}")

    def refuse_rate(self, lr: float | None, optimizer: str) -> None:
        """``lr`` beside an optimizer that has its own rate: one of the two would be dropped silently."""
        if lr is not None:
            raise BadSettings(
                f"lr={lr} and {optimizer}: the optimizer has its own learning rate. Leave out lr, or give "
                f"optimizer={self.example}, which the trainer calls with lr"
            )

    def configured_by(self, model: Any, optimizer: Any, lr: float | None) -> bool:
        """Whether the model chooses its optimizer itself; then the trainer's options must not choose another one."""
        if not hasattr(model, "configure_optimizers") or is_default(model, "configure_optimizers"):
            return False
        source = f"configure_optimizers of {type(model).__name__}"
        if optimizer is not None:
            raise BadSettings(f"optimizer= and {source} both give an optimizer: leave out one of them")
        self.refuse_rate(lr, source)
        return True

    def maker(self, model: Any, optimizer: Any, lr: float | None) -> tuple[Callable[..., Any], dict[str, float]]:
        """What makes the optimizer, and the rate that it is called with, by name (none: its own default)."""
        self.check(optimizer, lr)
        rate = rate_for(lr, model)
        if optimizer is None:
            return self.sgd, {self.rate: _SGD_RATE if rate is None else rate}
        make: Callable[..., Any] = self._by_name(optimizer) if isinstance(optimizer, str) else optimizer
        argument = self._rate_argument(make)
        if argument is None:
            return make, {}
        if rate is not None:
            return make, {argument.name: rate}
        if argument.default is inspect.Parameter.empty:
            raise BadSettings(f"optimizer={_name_of(make)} has no default learning rate: give lr=, as lr=0.001")
        return make, {}

    def create(self, model: Any, optimizer: Any, lr: float | None) -> Any:
        """The optimizer that a name, a class or a function of the rate makes (None: plain SGD)."""
        make, rate = self.maker(model, optimizer, lr)
        result = make(**rate)
        if not isinstance(result, self.finished[0]):
            raise BadSettings(
                f"optimizer= gave {type_in_words(result)}: a function of the learning rate has to return an "
                f"optimizer of {self.where}, as lambda rate: {self.example}(rate)"
            )
        return result

    def _by_name(self, name: str) -> Any:
        known = self.by_name()
        if (entry := known.get(name.lower())) is not None:
            return entry
        close = difflib.get_close_matches(name.lower(), known, 1)
        meant = f"Did you mean {close[0]!r}? " if close else ""
        has = f"{meant}It has {', '.join(known)}"
        raise BadSettings(f"optimizer={name!r}: {self.where} has none of that name for training. {has}")

    def _rate_argument(self, make: Callable[..., Any]) -> inspect.Parameter | None:
        """The argument through which a class or a function takes its learning rate; None without one."""
        try:
            parameters = list(inspect.signature(make).parameters.values())
        except (TypeError, ValueError):  # compiled code may not say
            return None
        bound = getattr(make, "keywords", {})  # of a functools.partial: what is given there is given
        for parameter in parameters:
            if parameter.name == self.rate:
                return None if self.rate in bound else parameter
        if isinstance(make, type):
            hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            return inspect.Parameter(self.rate, inspect.Parameter.KEYWORD_ONLY, default=None) if hands_on else None
        named = [parameter for parameter in parameters[:1] if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        return named[0] if named and not self.of_parameters else None


def rate_for(lr: float | None, model: Any) -> float | None:
    """The rate that the user gave: ``lr``, or the model's attribute of that name."""
    of_model = getattr(model, "lr", None)
    if not isinstance(of_model, Real) or isinstance(of_model, bool):
        return lr
    if lr is not None and lr != of_model:
        raise BadSettings(f"lr={lr} was given to the trainer, and the model has lr={of_model}: give one of them")
    return float(of_model)


def _name_of(make: Any) -> str:
    return getattr(make, "__name__", type(make).__name__)
