"""JAX's learner: all devices of a job as one mesh, driven by one program a step."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from manyhands.amounts import count_of
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.checkpoints import saving, tensors
from manyhands.training.data.labels import Look
from manyhands.training.data.order import Cursor, Window, epoch_order, windows
from manyhands.training.data.sources import Source, Stream, prepared_by
from manyhands.training.jax.evaluation import Evaluation, first_numbers
from manyhands.training.jax.objective import Objective
from manyhands.training.jax.skeleton import PARTS, Skeleton, by_name, refill
from manyhands.training.jax.step import (
    AVERAGES,
    Programs,
    Resident,
    State,
    StepInput,
    Sums,
    is_ready,
    sums_of,
    totals_of,
)
from manyhands.training.jax.world import World, from_first, resident, sent
from manyhands.training.learner import NO_AVERAGE, Saved, Take, check_average, named_rates, share
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals


@dataclass(frozen=True)
class Job:
    """What to train, and how."""

    model: nnx.Module
    skeleton: Skeleton
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    optimizer_name: str
    train: Source
    test: Source | None
    settings: Settings
    dtype: Any  # what layers compute in; None: in that of their parameters
    labels: Look | None  # checks those of a loader's batch
    rate: float | None = None  # the learning rate, where it is known


class JaxLearner:
    """The state of a job while it runs; a :class:`~manyhands.training.learner.Learner`."""

    framework = "jax"
    chosen_precision: tuple[str, str] | None = None  # by precision="auto", and why

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world, self.settings = job, world, job.settings
        self.rank, self.size = world.rank, world.size
        self.data, self.test = job.train, job.test
        self.optimizer_name = job.optimizer_name
        self.shares: list[float] | None = None
        self.notes: list[str] = []
        self.steps = Programs(job.skeleton, job.objective, job.optimizer, world, job.dtype, job.settings)
        self.state: State = self._first_state(job.optimizer)
        self._averages: Mapping[str, str] = {}  # that are kept, and what they are of
        self.optimizer_options = _injected_hyperparameters(self.state["optimizer"])
        self.sums: Sums = world.put_copy(sums_of(Totals()))
        self._shown: Totals | None = None
        self._looked_at: Sums | None = None
        self._sent: collections.deque[tuple[int, Sums]] = collections.deque()
        self._prepare = prepared_by(job.train)
        gathers = job.settings.step.optimize != "off"  # on the devices
        self.arrays = resident(job.train, world) if gathers else None
        self.evaluation: Evaluation | None = None
        if job.test is not None:
            arrays, is_mean = resident(job.test, world) if gathers else None, job.objective.is_mean(job.model)
            self.evaluation = Evaluation(self.steps, lambda: self.state, job.test, is_mean, arrays)
        self._rate: tuple[float, jax.Array] | None = None
        self._say_how()

    def _first_state(self, optimizer: Any) -> State:
        double = self.settings.precision == "fp64"
        state = first_numbers(self.job.skeleton, self.job.model, self.world, double=double)
        state["optimizer"] = self.world.put_copy(jax.jit(optimizer.init)(state["parameters"]))
        state["at"] = self.world.put_copy(np.zeros(2, np.int32))
        return state

    def _say_how(self) -> None:
        where = "gathered on the devices" if self.arrays is not None else "gathered on the host and sent"
        self.notes.append(f"one compiled program a step; batches are {where}")
        if self.job.dtype == jnp.bfloat16:
            self.notes.append(f"layers compute in {jnp.dtype(self.job.dtype).name}, parameters keep their dtype")
        if self.settings.step.wrt is not None:
            parts = (self.state["parameters"], self.state["rest"])
            trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)
            self.notes.append(f"wrt: {count_of(trained, 'number')} trained, {frozen:,} frozen")

    # Steps

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, StepInput]]:
        data = self.job.train
        if isinstance(data, Stream):
            for window, parts in data.windows(cursor, self.settings.seed):
                if self.job.labels is not None:
                    self.job.labels(data.nest(parts))
                yield window, sent(parts, np.arange(window.size), self.world)
            return
        order = epoch_order(self.settings.seed, cursor.epoch, data.count, shuffle=data.shuffle)
        place = None if self.arrays is None else Resident(self.arrays, self.world.put(order.astype(np.int32)))
        self.state["at"] = self.world.put_copy(np.array([cursor.sample, cursor.step], np.int32))
        for window in windows(cursor, data.count, self.settings.batch_size):
            yield window, place or sent(data.arrays, order[window.start : window.stop], self.world)

    def step(self, window: Window, batch: StepInput, factor: float | None) -> None:
        self.world.make_room()
        rate = self._factor(1.0 if factor is None else factor)
        self.state, self.sums = self.steps.train(self.state, self.sums, rate, batch, window.size, self._prepare)
        self.world.started(self.sums)

    def _factor(self, factor: float) -> jax.Array:
        """The factor on the devices; sent only when it is another one."""
        if self._rate is None or self._rate[0] != factor:
            self._rate = factor, self.world.number(factor)
        return self._rate[1]

    # Totals: every process has those of all

    def peek(self) -> Totals | None:
        if self._looked_at is not None and is_ready(self._looked_at):
            self._shown = self._totals_of(self._looked_at)
            self._looked_at = None
        if self._looked_at is None:
            self._looked_at = self.sums
        return self._shown

    def keep_average(self, averaging: Averaging) -> None:
        check_average(leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state["parameters"]))
        self.steps.decay = averaging.decay
        self._averages = AVERAGES if averaging.buffers else {"average": "parameters"}
        self._start_average()

    def _start_average(self) -> None:
        for average, part in self._averages.items():
            self.state[average] = self.world.put_copy(self.state[part])

    @contextlib.contextmanager
    def with_averaged_weights(self) -> Iterator[None]:
        weights = {part: self.state[part] for part in self._averages.values()}
        self.state.update({part: self.state[average] for average, part in self._averages.items()})
        try:
            yield
        finally:
            self.state.update(weights)

    def send_totals(self, step: int) -> None:
        for leaf in self.sums.values():
            leaf.copy_to_host_async()
        self._sent.append((step, self.sums))

    def arrived_totals(self, *, wait: bool) -> list[tuple[int, Totals]]:
        arrived = []
        while self._sent and (wait or is_ready(self._sent[0][1])):
            step, sums = self._sent.popleft()
            arrived.append((step, self._totals_of(sums)))
        return arrived

    def learning_rates(self) -> dict[str, float]:
        """Optax hides rates in functions: only the trainer's own rate and injected rates are known."""
        factor = self._rate[0] if self._rate is not None else 1.0
        return {} if self.job.rate is None else named_rates([self.job.rate * factor])

    def read(self) -> list[Totals]:
        everything = totals_of(self.sums, counted=self.steps.counts_correct)
        return [everything, *[Totals(counted=everything.counted)] * (self.size - 1)]

    def _totals_of(self, so_far: Sums) -> Totals:
        return totals_of(so_far, counted=self.steps.counts_correct)

    def reset(self) -> None:
        self.sums = self.world.put_copy(sums_of(Totals()))
        self._looked_at, self._shown = None, None

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None:
        return None if self.evaluation is None else self.evaluation.evaluate(alive, take)

    # Checkpoints

    def save(self) -> Saved | None:
        if self.rank:
            return None
        blobs = {part: tensors.pack(by_name(self.state[part])) for part in ("optimizer", "random")}
        blobs["model"] = tensors.pack(self._weights())
        if self._averages:
            with self.with_averaged_weights():
                blobs["average"] = tensors.pack(self._weights())
        return Saved({"devices": [device.platform for device in self.world.devices], "processes": self.size}, blobs)

    def _weights(self) -> dict[str, Any]:
        return {**by_name(self.state["parameters"]), **by_name(self.state["rest"])}

    def _restore_average(self, blobs: Mapping[str, bytes]) -> None:
        self._start_average()
        if "average" not in blobs:
            self.notes.append(NO_AVERAGE)
            return
        saved = tensors.arrays_for(blobs["average"], self._weights(), "an average of another model's weights")
        for average in self._averages:
            self._refill(average, saved)

    def restore(self, saved: Mapping[str, Any], blobs: Mapping[str, bytes], totals: Totals) -> None:
        weights = tensors.arrays_for(blobs["model"], self._weights(), "weights of another model")
        for part in ("parameters", "rest"):
            self._refill(part, weights)
        for part, refusal in (
            ("optimizer", "numbers of another optimizer"),
            ("random", "random numbers of another model"),
        ):
            if part in blobs:  # weights from another framework come alone
                expected = by_name(self.state[part])
                saved_part = tensors.arrays_for(blobs[part], expected, refusal)
                job_options = [name for name in expected if saving.is_kept(name, self.optimizer_options, saved)]
                self._refill(part, {**saved_part, **{name: expected[name] for name in job_options}})
        if self._averages:
            self._restore_average(blobs)
        # All processes have the same sums: those of the first.
        first = Totals.from_json(share(self, totals.as_json()))
        self.steps.counts_correct = first.counted
        self.sums = self.world.put_copy(sums_of(first))

    def _refill(self, part: str, numbers: Mapping[str, Any]) -> None:
        self.state[part] = self.world.put_copy(refill(self.state[part], numbers))

    def from_first(self, data: bytes) -> bytes:
        return from_first(data)

    def all_have(self, number: int) -> bool:
        return self.world.all_have(number)

    def close(self) -> None:
        """Put the values back into the caller's model, each on its device and in its dtype."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):  # a step broke off that had taken them
            return
        before = self.job.skeleton.numbers(self.job.model)
        with self.with_averaged_weights():
            after = {part: jax.tree.map(_home, self.state[part], before[part]) for part in PARTS}
        self.job.skeleton.put_into(self.job.model, after)


def _home(array: jax.Array, like: Any) -> Any:
    host = np.asarray(array)
    if not isinstance(like, jax.Array):
        return host
    host = host.astype(like.dtype)
    is_placed = like.committed or isinstance(like.sharding, jax.sharding.NamedSharding)
    return jax.device_put(host, like.sharding) if is_placed else jax.device_put(host)


def _injected_hyperparameters(state: Any) -> dict[str, Any]:
    """The options that ``optax.inject_hyperparams`` keeps in the state; all others are hidden in functions."""
    numbers = {name: np.asarray(leaf) for name, leaf in by_name(state).items() if "hyperparams" in name.split(".")}
    return {name: number.item() for name, number in numbers.items() if not number.ndim and np.isfinite(number)}
