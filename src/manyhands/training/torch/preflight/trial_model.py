"""A copy of a model and its loss that computes passes over some samples, always from the same state.

The copy is in training mode, as in the job, but without what may differ between parts of a batch: layers that drop
out, and layers that normalise over a batch, are in evaluation mode. What else the forward pass changes, parameters and
buffers, is put back before every pass, and remembered by name.

Parts of a batch are computed as they will be in the job: one after the other, each alone; or, where the loss needs the
whole batch, as several devices compute it together (:meth:`TrialModel.compute_together`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence

import cloudpickle
import numpy as np
import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings
from manyhands.training.data.sources import Array
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import Pass, Term
from manyhands.training.torch.data import samples
from manyhands.training.torch.data.batches import Batch, tensors_in
from manyhands.training.torch.objective import Objective, OwnStep, placed
from manyhands.training.torch.ranks import whole_batch
from manyhands.training.torch.ranks.whole_batch import Rows
from manyhands.training.torch.state.module_state import modes_preserved
from manyhands.training.torch.workers import job_bytes

_COMPARED = 4_000_000  # numbers of a gradient; a larger one is sampled evenly
_READ_BACK = 1e-6  # relative: what a pass may differ from the one before that has changed the state
_MOVED = 0.01
_STATE_CLOSE = 1e-4  # relative: the state that parts of a batch and the whole leave behind
_CALM = (compat.BatchNorm, compat.Dropout, torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
State = dict[str, torch.Tensor]
Sized = tuple[Batch, int]  # a part of a batch, and how many samples it has


class TrialModel:
    """A copy of a model and its loss."""

    def __init__(self, model: torch.nn.Module, objective: Objective, device: torch.device) -> None:
        self.model, self.objective = _copies(model, objective)
        self.model.to(device)
        self.objective = placed(self.objective, device, None)
        if isinstance(self.objective, OwnStep):
            self.objective.training = True
        self.changed: set[str] = set()  # names of parameters and buffers that a forward pass has changed
        self.asks_for_rows = False  # whether whole_batch was called
        self._train()
        self._move_weights()
        self._remember()

    def _train(self) -> None:
        if not self.model.training:
            self.model.train()  # layers that the caller has frozen stay so
        for layer in self.model.modules():
            if isinstance(layer, _CALM):
                layer.eval()
            if isinstance(layer, compat.BatchNorm) and layer.running_mean is None:
                weight = next(self.model.parameters())
                layer.running_mean = weight.new_zeros(layer.num_features)
                layer.running_var = weight.new_ones(layer.num_features)

    def _move_weights(self) -> None:
        """A little, as updates do: a copy of the model within it, which follows it slowly, is then another."""
        generator = torch.Generator().manual_seed(0)  # every rank of a launcher tries the same
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                    parameter.mul_(1 + _MOVED * noise.to(parameter.device, parameter.dtype))

    def evaluate(self) -> None:
        """From now on the model is in evaluation mode: no layer draws random numbers, of whatever kind."""
        self.model.eval()

    def _remember(self) -> None:
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._start = {name: tensor.detach().clone() for name, tensor in self._state().items()}

    def _state(self) -> State:
        loss = getattr(self.objective, "loss", None)
        modules = [("", self.model), *([("loss", loss)] if isinstance(loss, torch.nn.Module) else [])]
        return {
            name: tensor
            for prefix, module in modules
            for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix))
        }

    @property
    def precision(self) -> torch.dtype:
        return self._parameters[0].dtype

    def becomes_double(self, batch: Batch, size: int) -> bool:
        """Compute in float64 from now on; False where that does not work, and the copy is spoilt."""
        self.model.double()
        self._remember()
        try:
            self.compute(batch, size, whole=True)
        except Exception:  # it has tensors of its own that stay in float32
            return False
        return True

    def gives_sum(self, batch: Batch) -> bool:
        """Whether the loss comes as a sum and its count."""
        self._put_back()
        with torch.no_grad(), whole_batch.gathered_by(self._noted):
            found = self.objective.as_sum(self.model, samples.as_the_model(self.model, batch))[0]
        self._see_changes()
        return found is not None

    def _see_changes(self) -> None:
        state = self._state()
        self.changed |= {name for name, start in self._start.items() if not _equal(state[name], start)}

    def _put_back(self) -> None:
        state = self._state()
        with torch.no_grad():
            for name in self.changed:
                if state[name].shape == self._start[name].shape:
                    state[name].copy_(self._start[name])
                else:  # a queue that grows
                    state[name].data = self._start[name].clone()

    # Passes

    def compute(self, batch: Batch, size: int, *, whole: bool = False) -> Pass:
        """Loss and gradients of these samples alone; after a ``whole`` batch, see what it has changed."""
        self._put_back()
        with whole_batch.gathered_by(self._noted):
            total, count = self._loss(batch, size)
        if whole:
            self._see_changes()
        return self._pass(total, count)

    def compute_together(self, parts: Sequence[Sized]) -> Pass:
        """Loss and gradients of these parts, each on a device of its own, which gather rows from each other.

        What a device gives in its n-th call may depend on what it got in earlier ones: the calls become known one
        after the other, in as many rounds.
        """
        return self._pass(*self._together(parts)[0])

    def _together(self, parts: Sequence[Sized]) -> tuple[tuple[torch.Tensor, torch.Tensor | float], list[State]]:
        """The sum of losses and counts, and the state of each device afterwards."""
        before: list[list[torch.Tensor]] = [[] for _ in parts]
        for number in range(_MOST_CALLS):
            given, sums, states, failed = _round(self, parts, before)
            if len({len(calls) for calls in given}) > 1:
                raise BadSettings("mh.whole_batch is called more often on one device than on another")
            if number >= len(given[0]):
                if failed is not None:
                    raise failed
                return (sum(total for total, _ in sums), sum(count for _, count in sums)), states  # type: ignore[return-value]
            before = given
        raise BadSettings(f"mh.whole_batch is called more than {_MOST_CALLS} times in a step")

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asks_for_rows = True
        return tensor

    def _loss(self, batch: Batch, size: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        """A sum, and what it is divided by."""
        moved = samples.as_the_model(self.model, batch)
        with torch.enable_grad():
            if self.objective.sums:
                both = self.objective.in_parts(self.model, moved)[0]
                return both.total, both.count
            return self.objective(self.model, moved, part=True)[0] * size, size

    def _pass(self, total: torch.Tensor, count: torch.Tensor | float) -> Pass:
        computed = torch.autograd.grad(total, self._parameters, allow_unused=True, materialize_grads=True)
        return Pass([Term(float(total.detach()), float(count), [numbers(_sampled(each)) for each in computed])])

    # What passes leave behind

    def differing_state(self, whole: Sized, parts: Sequence[Sized], *, devices: bool, micro_batches: bool) -> set[str]:
        """The parameters and buffers that parts of a batch change in another way than the whole does."""
        expected, states = self._after([whole])[0], []
        if devices:
            rows = self.objective.rows is not None
            states += self._together(parts)[1] if rows else [self._after([part])[0] for part in parts]
        if micro_batches:
            states.append(self._after(parts)[-1])
        return {name for name in self.changed for state in states if not _close(expected[name], state[name])}

    def reads_back(self, batch: Batch, size: int) -> bool:
        """Whether a pass has another loss or gradient after what the one before it has changed."""
        before = self.compute(batch, size)
        with whole_batch.gathered_by(self._noted):
            after = self._pass(*self._loss(batch, size))
        return not loss_trial.are_close(before, after, [before], (_READ_BACK, _READ_BACK))

    def _after(self, parts: Sequence[Sized]) -> list[State]:
        """The state after each of these passes, one after the other."""
        self._put_back()
        states = []
        for batch, size in parts:
            with whole_batch.gathered_by(self._noted):
                self._loss(batch, size)
            states.append(self._copied_state())
        return states

    def _copied_state(self) -> State:
        state = self._state()
        return {name: state[name].detach().clone() for name in self.changed}

    # Rows

    def find_rows(self, whole: Sized, part: Sized) -> tuple[Rows, int] | None:
        """Which tensors of output and target have a row for each sample, and their bytes for a sample; None: none."""
        self._put_back()
        batches = [samples.as_the_model(self.model, batch) for batch, _ in (whole, part)]
        with modes_preserved(self.model):
            self._train()  # there may be fewer outputs in evaluation
            both = [self.objective.output_and_target(self.model, batch) for batch in batches]
        if both[0] is None or both[1] is None:
            return None
        flags, width = [], 0
        for first, second in zip(*both, strict=True):
            pairs = list(zip(tensors_in(first), tensors_in(second), strict=True))
            flags.append(tuple(_is_of(a, whole[1]) and _is_of(b, part[1]) for a, b in pairs))
            width += sum(a[0].numel() * a.element_size() for (a, _), rows in zip(pairs, flags[-1], strict=True) if rows)
        return (Rows(*flags), width) if any(flags[0]) else None


_MOST_CALLS = 16


def _round(
    trial: TrialModel, parts: Sequence[Sized], before: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor | float]], list[State], Exception | None]:
    """One round: what each device gave in its calls, given what all gave in the round before."""
    given: list[list[torch.Tensor]] = []
    sums: list[tuple[torch.Tensor, torch.Tensor | float]] = []
    states: list[State] = []
    failed: Exception | None = None
    for number, (batch, size) in enumerate(parts):
        calls: list[torch.Tensor] = []

        gather = functools.partial(_gathered, number, size, calls, before)
        trial._put_back()
        try:
            with whole_batch.gathered_by(gather):
                sums.append(trial._loss(batch, size))
        except Exception as error:  # a loss of too few rows may fail: only the last round counts
            failed = error
        given.append(calls)
        states.append(trial._copied_state())
    return given, sums, states, failed


def _gathered(
    number: int,
    size: int,
    calls: list[torch.Tensor],
    before: Sequence[Sequence[torch.Tensor]],
    tensor: torch.Tensor,
) -> torch.Tensor:
    """The rows of all devices in the next call of this one, as far as the others' are known."""
    whole_batch.check_rows(tensor, size)
    calls.append(tensor)
    if any(len(other) < len(calls) for other in before):
        return tensor
    rows = [other[len(calls) - 1] for other in before]
    return torch.cat([*rows[:number], tensor, *rows[number + 1 :]])


def _is_of(tensor: torch.Tensor, size: int) -> bool:
    return bool(tensor.dim()) and len(tensor) == size


def _copies(model: torch.nn.Module, objective: Objective) -> tuple[torch.nn.Module, Objective]:
    """Copies made as for a worker process, including what functions have closed over; else deep copies."""
    with contextlib.suppress(Exception):
        both: tuple[torch.nn.Module, Objective] = cloudpickle.loads(job_bytes.dumps((model, objective)))
        return both
    return copy.deepcopy((model, objective))


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    return bool((first - second).norm() <= _STATE_CLOSE * (first.norm() + second.norm()))


def numbers(tensor: torch.Tensor) -> Array:
    """In NumPy, which has no bfloat16."""
    wide = tensor.is_floating_point() and tensor.dtype != torch.float64
    return np.asarray((tensor.detach().float() if wide else tensor.detach()).cpu().numpy())


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    """Not too many of its numbers. An odd step meets every column of a matrix, whose width is mostly even."""
    step = gradient.numel() // _COMPARED
    dense = gradient.to_dense()
    return dense.flatten()[:: step | 1] if step > 1 else dense
