"""Evaluation and prediction: one compiled program per size of batch, over all devices.

The programs are those of :class:`.step.Programs`. After each of them every device has the model's outputs; they are
read one batch late, so that the devices have the next one already. Every process has all outputs; the first one's
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from manyhands.training.checkpoints import tensors
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Window, windows
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Source, Stream, prepared_by
from manyhands.training.evaluation.metrics import PendingOutputs, batch_size_for, check_rows, whole_size
from manyhands.training.jax.objective import Objective, is_dict
from manyhands.training.jax.skeleton import PARTS, Skeleton, by_name, refill
from manyhands.training.jax.step import Programs, Resident, State, StepInput, mean_of, sums_of
from manyhands.training.jax.world import World, from_first, sent
from manyhands.training.learner import Take
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals


@dataclass
class Evaluation:
    """A model and a data set, and the programs that compute with them without training."""

    steps: Programs
    state: Callable[[], State]
    data: Source
    is_mean: bool  # whether the loss is known to be a mean over samples, so that it is the same in any batches
    arrays: tuple[jax.Array, ...] | None = None  # the data on the devices, if they live there

    def __post_init__(self) -> None:
        self.world, self.settings, self.rank = self.steps.world, self.steps.settings, self.steps.world.rank
        self._prepare = prepared_by(self.data)  # compiled programs are cached by it

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals:
        """Loss and accuracy."""
        total, outputs = self.world.put_copy(sums_of(Totals())), _outputs(take)
        state, with_outputs = self.state(), take is not None
        for window, rows in self._batches():
            self.world.make_room()
            total, pair = self.steps.test(state, total, rows, window.size, self._prepare, with_outputs=with_outputs)
            self.world.started(total)
            outputs.add((pair, window.size))
            alive()
        outputs.finish()
        return mean_of(total, counted=self.steps.tests_count_correct)

    def predict(self, inputs: ModelInputs, alive: Callable[[], None], take: Take) -> None:
        """The model's outputs for all samples."""
        state, outputs = self.state(), _outputs(take)

        def prepare(batch: Any) -> Any:
            whole = self._prepare(batch)
            return whole if is_dict(whole) else inputs.of(whole)

        for window, rows in self._batches():
            assert not isinstance(rows, Resident)
            self.world.make_room()
            output = self.steps.predict(state, rows, window.size, prepare)
            self.world.started(output)
            outputs.add(((output, None), window.size))
            alive()
        outputs.finish()

    def from_first(self, data: bytes) -> bytes:
        return from_first(data)

    def _batches(self) -> Iterator[tuple[Window, StepInput]]:
        """Every batch in the order of the data, divided over the devices."""
        data, batch_size = self.data, self.settings.batch_size
        if isinstance(data, Stream):
            batches = data.windows(Cursor(), self.settings.seed)
            for window, parts in loader_batches.check_agreement(batches, self.world.all_have):
                yield window, sent(parts, np.arange(window.size), self.world)
            return
        size = _even(data.count, batch_size_for(batch_size)) if self.is_mean else whole_size(data, batch_size)
        for window in windows(Cursor(), data.count, size):
            if self.arrays is not None:
                yield window, Resident(self.arrays, start=self.world.number(window.start, np.int32))
            else:
                yield window, sent(data.arrays, np.arange(window.start, window.stop), self.world)


def apart(
    model: nnx.Module, objective: Objective, data: Source, world: World, settings: Settings, dtype: Any
) -> Evaluation:
    """The evaluation of a caller's model, apart from any training; ``dtype``: what layers compute in, if not in that of
    their parameters.
    """
    skeleton = Skeleton(model)
    steps = Programs(skeleton, objective, optax.with_extra_args_support(optax.identity()), world, dtype, settings)
    state = first_numbers(skeleton, model, world, double=settings.precision == "fp64")
    return Evaluation(steps, lambda: state, data, objective.is_mean(model))


def first_numbers(skeleton: Skeleton, model: nnx.Module, world: World, *, double: bool) -> State:
    """The first process's values of the model, on all devices: other processes may have drawn other weights."""
    numbers: State = dict(skeleton.numbers(model))
    if world.size > 1:
        numbers = {part: _from_first_process(tree) for part, tree in numbers.items()}
    if double:
        numbers = jax.tree.map(_double, numbers)
    return {part: world.put_copy(numbers[part]) for part in PARTS}


def _from_first_process(tree: Any) -> Any:
    leaves = by_name(tree)
    return refill(tree, tensors.arrays_for(from_first(tensors.pack(leaves)), leaves, "numbers of another model"))


def _double(leaf: Any) -> Any:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.asarray(leaf).astype(np.float64) if floating else leaf


def _outputs(take: Take | None) -> PendingOutputs:
    """Outputs and targets of batches, with their sizes, on their way to ``take`` in the first process."""

    def deliver(coming: tuple[Any, int]) -> None:
        pair, size = coming
        outputs, targets = jax.tree.map(np.asarray, pair)
        check_rows(outputs, size)
        assert take is not None
        take(outputs, targets)

    return PendingOutputs(None if take is None or jax.process_index() else deliver)


def _even(count: int, size: int) -> int:
    """A batch size near ``size`` whose last batch is hardly shorter: every size is compiled separately."""
    return -(-count // -(-count // size))
