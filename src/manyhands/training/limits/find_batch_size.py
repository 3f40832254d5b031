"""``Trainer.find_batch_size``: the part that all frameworks share."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, cast

from manyhands.errors import BadSettings
from manyhands.training.choices import option_names
from manyhands.training.limits import units

if TYPE_CHECKING:
    from manyhands.training.trainer import BaseTrainer


class FindingBatchSize(abc.ABC):
    """The part of a trainer that searches for the largest batch that fits into memory."""

    @option_names.explained(too_many="find_batch_size takes a model and its training data; all others by name")
    def find_batch_size(
        self,
        model: Any,
        data: Any,
        *,
        maximum: int | None = None,
        memory: str | int | None = None,
        of: Literal["batch", "micro_batch"] = "batch",
    ) -> int:
        """The largest ``batch_size`` that fits into memory, over all of the trainer's devices; within an eighth of it.

        A few steps are made with larger and larger batches, on copies: the model, its optimizer and random numbers stay
        as they are. (Except MXNet's random numbers, which begin anew as in ``fit``: MXNet cannot save their state.)

        Args:
            model: As for ``fit``.
            data: As for ``fit``, but not a loader.
            maximum: The largest batch to try. Default: None, all samples.
            memory: The memory that steps may take on each device, as ``"8GB"``. Default: None, all of a GPU; on a CPU
                half of what is free, divided over the processes: a host that is full takes other programs with it.
            of: ``"micro_batch"`` finds the largest ``Step(micro_batch_size=...)`` for the trainer's ``batch_size``.
        """
        if of not in ("batch", "micro_batch"):
            raise BadSettings(f"find_batch_size(of={of!r}): choose one of batch, micro_batch")
        bound = None if memory is None else units.memory(memory)
        if memory is not None and bound is None:
            raise BadSettings(f"find_batch_size(memory={memory!r}): give '8GB' or a number of bytes")
        if maximum is not None and (isinstance(maximum, bool) or not isinstance(maximum, Integral) or maximum < 1):
            raise BadSettings(f"find_batch_size(maximum={maximum!r}): give a whole number of at least 1")
        self.train_source, self.test_source = self._sources(data)
        return self._find_batch_size(model, None if maximum is None else int(maximum), bound, micro=of != "batch")

    def _find_batch_size(self, model: Any, maximum: int | None, memory: int | None, *, micro: bool) -> int:
        from manyhands.training.limits.batch_size_search import Search

        return Search(cast("BaseTrainer", self), model, memory, micro=micro).largest(maximum)

    @contextlib.contextmanager
    def _trial(self, model: Any, optimizer: Any) -> Iterator[tuple[Any, Any]]:
        """A model and an optimizer to try steps with; the caller's own do not change."""
        yield self._copied(model, optimizer)

    def _copied(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        try:
            return copy.deepcopy((model, optimizer))
        except Exception as error:
            raise BadSettings(
                f"find_batch_size makes steps on a copy, and {type(model).__name__} cannot be copied "
                f"({type(error).__name__}: {error}): give batch_size="
            ) from error

    def _is_out_of_memory(self, error: Exception) -> bool:
        """Whether a framework's error says that a device has no memory left."""
        return False

    # Of the trainer

    train_source: Any
    test_source: Any

    @abc.abstractmethod
    def _sources(self, data: Any, validation: Any = None) -> tuple[Any, Any]: ...
