"""The parts of a training step: each feature is one class with a few moments, behind the base class :class:`Part`.

A step makes passes and an update. At each moment it calls the parts that it was put together from
(:func:`.build.build_step`), in their order::

    begin            before the first pass: whatever the step may change is as it was
    forward          around each forward pass and its loss
    scale_loss       the loss, as the backward pass begins with it
    after_backward   the gradients are those of the whole batch
    around_update    around the optimizer's update
    after_update     the weights are new

A new feature is a class in a file of its own that overrides some of these, and one line in :mod:`.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # ``mh.whole_batch`` is a part, and loads little
    from manyhands.training.torch.data.batches import Batch, Shard
    from manyhands.training.torch.job import NumberFormat
    from manyhands.training.torch.objective import Objective
    from manyhands.training.torch.ranks.gradient_sum import Gradients
    from manyhands.training.torch.step.running_sums import RunningSums


@dataclass(slots=True)
class Turn:
    """The batch of a step: its number, its samples on all ranks, and this rank's shard."""

    step: int | torch.Tensor
    whole: int = 0
    shard: Shard | None = None
    # Numbers on the device: if one of them is not finite, an update that may be taken back is.
    marks: list[torch.Tensor] = field(default_factory=list)
    counted: bool = False  # whether its samples are in the metrics


class Part:
    """A feature of a training step. Subclasses override the moments at which they act."""

    # Its gradients may be infinite without a fault, and its ``after_update`` writes to the metrics.
    scales_loss = False
    # Its forward pass is computed again within the backward pass.
    recomputes = False

    def begin(self, turn: Turn) -> None: ...

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def after_backward(self, turn: Turn, parameters: Sequence[torch.Tensor]) -> None: ...

    def around_update(self, turn: Turn) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_update(self, turn: Turn) -> None: ...

    # The job around the steps

    def prepare(self) -> None:
        """Before the first step, when weights and state are those of the checkpoint, and after a capture has ended."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """What ``after_update`` changes: it is taken back with the update."""
        return ()

    def state_to_save(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Its state in a checkpoint: JSON, and bytes by name."""
        return {}, {}

    def restore(self, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> str | None:
        """Continue from a checkpoint; returns a note for the user, if there is one."""

    def why_no_numbers(self) -> str | None:
        """Why steps make no progress, where this part knows. May wait."""

    def why_not_captured(self) -> str | None:
        """Why a CUDA graph of the steps made so far would compute something else."""

    def close(self) -> str | None:
        """Leave the model as it was; returns a note about the job, if there is one."""


# Gives the mean loss of a micro-batch, or its sum and count (else None); and the correct predictions, where known.
LossOf = Callable[["Batch", int], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


class TrainingStep:
    """The parts of a step, called at its moments; subclasses make the passes between them.

    A step is ``begin``, ``passes`` of each micro-batch, ``sum_up`` and ``update``. A captured step calls the same.
    """

    objective: Objective
    gradients: Gradients
    updates_in_passes = False  # whether weights change before ``update``

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: RunningSums,
        device: torch.device,
        number_format: NumberFormat,
        parts: Sequence[Part | None],
    ) -> None:
        self.model, self.optimizer, self.metrics = model, optimizer, metrics
        self.device, self.number_format = device, number_format
        self.parts = [part for part in parts if part is not None]
        # What acts at each moment, known before the first step: a step of a small net takes a few hundred microseconds.
        self._begin, self._forward = self.parts_with("begin"), self.parts_with("forward")
        self._scaled, self._updating = self.parts_with("scale_loss"), self.parts_with("around_update")
        self._after_update = self.parts_with("after_update")

    def parts_with(self, moment: str) -> list[Callable[..., Any]]:
        """The methods of the parts that override this moment."""
        idle = getattr(Part, moment)
        return [getattr(part, moment) for part in self.parts if getattr(type(part), moment) is not idle]

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        """Process this rank's shard of a batch of ``whole`` samples; ``batch_idx`` is its number in the epoch."""
        raise NotImplementedError

    def loss_of(self, batch: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The forward pass of a micro-batch: a :data:`LossOf`."""
        raise NotImplementedError

    def passes(self, turn: Turn, batch: Batch, size: int, *args: Any, **how: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch of ``size`` samples, and its loss; ``how``: see :mod:`.plain`."""
        raise NotImplementedError

    def sum_up(self, turn: Turn) -> None:
        """The passes are over: the gradients of all ranks become one."""

    def update(self, turn: Turn) -> None:
        """The update of the weights, when the gradients are those of the whole batch."""
        raise NotImplementedError

    def begin(self, turn: Turn) -> None:
        for begin in self._begin:
            begin(turn)

    def forward(self) -> AbstractContextManager[None]:
        scope = self.number_format.scope(self.device)
        return scope if not self._forward else enter_all([scope, *(forward() for forward in self._forward)])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        for scaled in self._scaled:
            loss = scaled(loss)
        return loss

    def around_update(self, turn: Turn) -> AbstractContextManager[None]:
        return enter_all([updating(turn) for updating in self._updating]) if self._updating else nullcontext()

    def after_update(self, turn: Turn) -> None:
        for after_update in self._after_update:
            after_update(turn)

    def lay_out_gradients(self) -> None:
        """Between two steps: other parameters may be trained now."""
        self.gradients.lay_out()

    def versions(self) -> list[int]:
        """How often each weight, and each tensor of the optimizer, was written to: PyTorch counts that on the host."""
        raise NotImplementedError

    def close(self) -> list[str]:
        """Leave model and parameters without our hooks; notes about the job."""
        notes = [part.close() for part in self.parts]
        return [note for note in notes if note is not None]


@contextmanager
def enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter all of these contexts, in their order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
