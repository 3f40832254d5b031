"""A copy of a model and its loss that computes passes over some samples, always from the same state.

The copy is in training mode, as in the job, but without what may differ between parts of a batch: layers that drop
out, and layers that normalise over a batch, are in evaluation mode. What else the forward pass changes, parameters and
buffers, is put back before every pass, and remembered by name.

Parts of a batch are computed as they will be in the job: each alone, one after the other, or, where the loss needs the
whole batch, as several devices compute it together (:meth:`TrialModel.together`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import numpy as np
import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings
from manyhands.training.data.sources import Array
from manyhands.training.loss.loss_trial import Pass, Term
from manyhands.training.torch.data.batches import Batch, as_the_model, tensors_in
from manyhands.training.torch.objective import Objective, OwnStep, place
from manyhands.training.torch.ranks import whole_batch
from manyhands.training.torch.ranks.whole_batch import Gather, Rows
from manyhands.training.torch.state.module_state import modes_preserved
from manyhands.training.torch.workers import job_bytes

_COMPARED = 4_000_000  # numbers of a gradient; a larger one is sampled evenly
_MOVED = 0.01
_STATE_CLOSE = 1e-4  # relative
_MOST_CALLS = 16  # of whole_batch in a step
_CALM = (compat.BatchNorm, compat.Dropout, torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
State = dict[str, torch.Tensor]
Part = tuple[Batch, int]  # of a batch, and how many samples it has


@dataclass(frozen=True)
class Run:
    """What a pass gave, a sum and what it is divided by, and the state that it left behind."""

    total: torch.Tensor
    count: torch.Tensor | float
    state: State


class TrialModel:
    """A copy of a model and its loss."""

    def __init__(self, model: torch.nn.Module, objective: Objective, device: torch.device) -> None:
        self.model, self.objective = _copies(model, objective)
        self.model.to(device)
        self.objective = place(self.objective, device, None)
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

    def _put_back(self) -> None:
        state = self._state()
        with torch.no_grad():
            for name in self.changed:
                if state[name].shape == self._start[name].shape:
                    state[name].copy_(self._start[name])
                else:  # a queue that grows
                    state[name].data = self._start[name].clone()

    @property
    def precision(self) -> torch.dtype:
        return self._parameters[0].dtype

    def becomes_double(self, part: Part) -> bool:
        """Compute in float64 from now on; False where that does not work, and the copy is spoilt."""
        self.model.double()
        self._remember()
        try:
            self.compute(part)
        except Exception:  # it has tensors of its own that stay in float32
            return False
        return True

    # Passes

    def compute(self, part: Part) -> Pass:
        """Loss and gradients of these samples alone."""
        return self._pass([self.one_by_one([part])[0]])

    def compute_together(self, parts: Sequence[Part]) -> Pass:
        """Loss and gradients of these parts, each on a device of its own, which gather rows from each other."""
        return self._pass(self.together(parts))

    def compute_again(self, part: Part) -> Pass:
        """The same as :meth:`compute`, after what the pass before has changed."""
        return self._pass([self._run(part, self._note)])

    def gives_sum(self, part: Part) -> bool:
        """Whether the loss comes as a sum and its count."""
        self._put_back()
        with torch.no_grad(), whole_batch.gathered_by(self._note):
            found = self.objective.as_sum(self.model, as_the_model(self.model, part[0]))[0]
        self._see_changes()
        return found is not None

    def one_by_one(self, parts: Sequence[Part]) -> list[Run]:
        """A pass over each of these parts, on one device."""
        self._put_back()
        return [self._run(part, self._note) for part in parts]

    def together(self, parts: Sequence[Part]) -> list[Run]:
        """A pass over each of these parts, on a device of its own, which gather rows from each other.

        What a device gives in its n-th call may depend on what it got in earlier ones: the calls become known one
        after the other, in as many rounds.
        """
        before: list[list[torch.Tensor]] = [[] for _ in parts]
        for number in range(_MOST_CALLS):
            given, runs, failed = list[list[torch.Tensor]](), list[Run](), list[Exception]()
            for rank, part in enumerate(parts):
                given.append([])
                self._put_back()
                try:
                    runs.append(self._run(part, functools.partial(_gather, rank, part[1], given[-1], before)))
                except Exception as error:  # a loss of too few rows may fail: only the last round counts
                    failed.append(error)
            if len({len(calls) for calls in given}) > 1:
                raise BadSettings("mh.whole_batch is called more often on one device than on another")
            if number >= len(given[0]):
                if failed:
                    raise failed[0]
                return runs
            before = given
        raise BadSettings(f"mh.whole_batch is called more than {_MOST_CALLS} times in a step")

    def _run(self, part: Part, gather: Gather) -> Run:
        batch, size = as_the_model(self.model, part[0]), part[1]
        with torch.enable_grad(), whole_batch.gathered_by(gather):
            if self.objective.sums:
                both = self.objective.in_parts(self.model, batch)[0]
                total, count = both.total, both.count
            else:
                total, count = self.objective(self.model, batch, part=True)[0] * size, size
        self._see_changes()
        state = self._state()
        return Run(total, count, {name: state[name].detach().clone() for name in self.changed})

    def _see_changes(self) -> None:
        state = self._state()
        self.changed |= {name for name, start in self._start.items() if not _equal(state[name], start)}

    def differences(self, first: Run, second: Run) -> set[str]:
        """The parameters and buffers that these passes left behind in different states."""
        return {
            name
            for name in self.changed
            if not _close(*(run.state.get(name, self._start[name]) for run in (first, second)))
        }

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asks_for_rows = True
        return tensor

    def _pass(self, runs: Sequence[Run]) -> Pass:
        total, count = sum(run.total for run in runs), sum(float(run.count) for run in runs)
        assert isinstance(total, torch.Tensor)
        computed = torch.autograd.grad(total, self._parameters, allow_unused=True, materialize_grads=True)
        return Pass([Term(float(total.detach()), count, [numbers(_sample(each)) for each in computed])])

    def find_rows(self, whole: Part, part: Part) -> tuple[Rows, int] | None:
        """Which tensors of output and target have a row for each sample, and their bytes for a sample; None: none."""
        self._put_back()
        batches = [as_the_model(self.model, batch) for batch, _ in (whole, part)]
        with modes_preserved(self.model):
            self._train()  # there may be fewer outputs in evaluation
            both = [self.objective.output_and_target(self.model, batch) for batch in batches]
        if both[0] is None or both[1] is None:
            return None
        flags, width = [], 0
        for first, second in zip(*both, strict=True):
            pairs = list(zip(tensors_in(first), tensors_in(second), strict=True))
            flags.append(tuple(a.shape[:1] == (whole[1],) and b.shape[:1] == (part[1],) for a, b in pairs))
            width += sum(a[0].numel() * a.element_size() for (a, _), rows in zip(pairs, flags[-1], strict=True) if rows)
        return (Rows(*flags), width) if any(flags[0]) else None


def _gather(
    rank: int, size: int, calls: list[torch.Tensor], before: Sequence[Sequence[torch.Tensor]], tensor: torch.Tensor
) -> torch.Tensor:
    """The rows of all devices in the next call of this one, as far as the others' are known."""
    whole_batch.check_rows(tensor, size)
    calls.append(tensor)
    if any(len(other) < len(calls) for other in before):
        return tensor
    rows = [other[len(calls) - 1] for other in before]
    return torch.cat([*rows[:rank], tensor, *rows[rank + 1 :]])


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


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Not too many of its numbers. An odd step meets every column of a matrix, whose width is mostly even."""
    step = gradient.numel() // _COMPARED
    dense = gradient.to_dense()
    return dense.flatten()[:: step | 1] if step > 1 else dense
