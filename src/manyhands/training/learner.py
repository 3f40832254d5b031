"""The seam between training as such and a framework: what :class:`.loop.Loop` asks of a learner.

The loop knows epochs, the order of samples, files and what is shown. The learner knows a model, an optimizer and
devices. One process drives one learner, which may have several devices (JAX, TensorFlow, MXNet) or be one rank of
several (PyTorch; all of them on many machines).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.data.order import Cursor, Window
from manyhands.training.running_sums import Totals

NO_AVERAGE = "the checkpoint has no average of the weights (EMA): it begins with the weights of the checkpoint"
AVERAGE_DROPPED = (
    "the checkpoint has an average of the weights (EMA), and this job keeps none: it continues from the weights, and "
    "evaluates them; give callbacks=[mh.EMA(...)] to continue the average"
)
# Takes the events of a job, and returns the callbacks' answer to an event that asks for one.
Say = Callable[[dict[str, Any]], dict[str, Any] | None]
Take = Callable[[Any, Any], None]  # takes the outputs and targets of the next samples: trees of arrays on the host


class Data(Protocol):
    """A data set as the loop sees it."""

    @property
    def count(self) -> int | None:
        """How many samples there are; None for a stream, whose order is its own."""

    @property
    def shuffle(self) -> bool: ...


def check_average(sizes: Iterable[int]) -> None:
    """``sizes``: the bytes of the weights' numbers."""
    if min(sizes) < 4:
        raise BadSettings("EMA: small changes of an average in half precision are lost: give the model float32 weights")


def named_rates(rates: Sequence[float]) -> dict[str, float]:
    """Learning rates by name: ``lr``, and of further groups of parameters ``lr_1``, ``lr_2``, ..."""
    return {f"lr_{number}" if number else "lr": float(rate) for number, rate in enumerate(rates)}


@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint, or a learner's part of it: JSON, and safetensors by name (``model`` among them)."""

    state: dict[str, Any]
    blobs: dict[str, bytes]


class Learner(Protocol):
    """A framework's half of a training job.

    Nothing in :meth:`step` and :meth:`peek` may make the host wait for a device. All processes of a job call the same
    methods in the same order, so that each may be a collective.
    """

    framework: str
    rank: int
    size: int  # processes of the job
    optimizer_name: str
    # The options of the optimizer (rate, betas, ...) as JSON, as far as the framework reports them.
    optimizer_options: dict[str, Any]
    notes: list[str]  # about how the job runs, for the user

    @property
    def shares(self) -> list[float] | None:
        """How a batch is divided over the devices now."""

    @property
    def data(self) -> Data:
        """The training data."""

    @property
    def test(self) -> Data | None:
        """The validation data; None without any."""

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Any]]:
        """Every batch from the cursor to the end of its epoch, each in the form that :meth:`step` takes."""

    def step(self, window: Window, batch: Any, factor: float | None) -> None:
        """Make one update with the mean loss over the batch; ``factor`` scales the learning rate (None: by 1)."""

    def peek(self) -> Totals | None:
        """The newest sums of this process that have already arrived; never waits."""

    def read(self) -> list[Totals]:
        """The sums since the last reset, one entry per process; waits."""

    def reset(self) -> None:
        """All sums to zero: an epoch begins."""

    def send_totals(self, step: int) -> None:
        """Send the sums of this moment, over all processes, on their way to the host; never waits."""

    def arrived_totals(self, *, wait: bool) -> list[tuple[int, Totals]]:
        """The totals that have arrived since the last call, with their steps, oldest first; ``wait``: all of them."""

    def learning_rates(self) -> dict[str, float]:
        """The rates of the last step by name: ``lr``, of further groups of parameters ``lr_1``, ...; never waits."""

    def keep_average(self, averaging: Averaging) -> None:
        """From now on keep an exponential moving average of the weights; asked for before :meth:`restore`.

        It is part of :meth:`save` (the blob ``average``), and after :meth:`close` the model has it.
        """

    def with_averaged_weights(self) -> AbstractContextManager[None]:
        """Within it the model's weights are their average, where one is kept."""

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None:
        """The totals over the validation data, every sample counted once (None: there are none).

        Calls ``alive()`` often. In the first process ``take``, if there is one, gets the outputs and targets of all
        processes: every sample once, in order, piece by piece.
        """

    def save(self) -> Saved | None:
        """The state of this moment; only the first process needs to have it."""

    def restore(self, state: Mapping[str, Any], blobs: Mapping[str, bytes], totals: Totals) -> None:
        """Resume from what :meth:`save` returned, maybe on other devices; ``totals`` are this process's sums."""

    def from_first(self, data: bytes) -> bytes:
        """The bytes that the first process has."""

    def all_have(self, number: int) -> bool:
        """Whether every process has this number (32 bits); may wait."""

    def close(self) -> None:
        """Give model and optimizer back to the caller."""


def share(learner: Learner, value: Any) -> Any:
    """The value that the first process has, in all of them; of what JSON holds."""
    return json.loads(learner.from_first(json.dumps(value).encode()))
