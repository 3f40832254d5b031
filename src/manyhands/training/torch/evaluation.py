"""Evaluation and prediction: what one rank computes on data that is not trained on.

Each rank works on its shard of every batch, in evaluation mode. Unless the loss is known to be a mean over samples
(:meth:`.objective.Objective.is_mean`), the ranks take turns with whole batches instead, so that the loss is the same on
any number of them. Losses are summed on the device and read at the end. Outputs, where they are wanted
(:data:`~manyhands.training.learner.Take`), are copied to the host asynchronously and waited for one batch later. The
first rank joins the shards of a batch, so that it has every sample once and in order::

    batch 0   rank 0: rows 0-255   rank 1: rows 256-511   ->  take(outputs of 0-511, targets of 0-511)
    batch 1   rank 0: rows 512-600 rank 1: rows 601-689   ->  take(outputs of 512-689, ...)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from manyhands import tree
from manyhands.backends.protocol import Arrival
from manyhands.backends.torch import compat
from manyhands.backends.torch import devices as backend
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, whole_batches, windows
from manyhands.training.data.roles import LABELS, ModelInputs, input_count
from manyhands.training.evaluation.metrics import (
    MetricCalls,
    PendingOutputs,
    Pieces,
    batch_size_for,
    check_rows,
    evaluate_with_metrics,
    ignore_progress,
    named_results,
    whole_size,
)
from manyhands.training.learner import Say, Take
from manyhands.training.loss.own_step import LossSum
from manyhands.training.running_sums import Totals, add
from manyhands.training.torch.data import dict_batches, feed
from manyhands.training.torch.data.batches import Batch, Shard, map_tensors
from manyhands.training.torch.data.feed import Division
from manyhands.training.torch.data.sources import Arrays, Samples, Source, Stream
from manyhands.training.torch.job import HALVES, Job, NumberFormat, placement_preserved
from manyhands.training.torch.objective import Objective, mixes_samples, place, takes_number, widen
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import randomness
from manyhands.training.torch.state.module_state import evaluation_mode
from manyhands.training.torch.step import logged, steps
from manyhands.training.torch.step.logged import LIGHTNING
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.workers import job_bytes

if TYPE_CHECKING:
    from manyhands.training.torch.fast.captured_forward import Forward
    from manyhands.training.torch.fast.recorder import CudaRecorder

_HOST = torch.device("cpu")
_ALIVE_EVERY = 0.2  # seconds


class Evaluation:
    """A model and data on this rank's device; an :class:`~manyhands.training.evaluation.metrics.Evaluates`."""

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        number_format: NumberFormat,
        batch_size: int,
        data: Source,
        objective: Objective,
        recorder: CudaRecorder | None = None,
    ) -> None:
        """``recorder``: what records passes of this device, where they may be replayed."""
        self.model, self.world, self.number_format = model, world, number_format
        self.batch_size, self.data, self.objective = batch_size, data, objective
        self._sums = RunningSums(world.device)
        self._counts = self._sums.sums.new_zeros(())
        self._recorded_outputs = _RecordedOutputs(model)
        self._forward: dict[str, Forward] = {
            "measure": self._measure,
            "measure with outputs": functools.partial(self._measure, with_outputs=True),
            "predict": self._predict,
        }
        self._inputs: ModelInputs | None = None
        if recorder is not None:
            from manyhands.training.torch.fast.captured_forward import CapturedForward

            self._forward = {
                name: CapturedForward(function, recorder, model, self._sums) for name, function in self._forward.items()
            }

    @property
    def rank(self) -> int:
        return self.world.rank

    def from_first(self, data: bytes) -> bytes:
        return self.world.value_of_first(data)

    @torch.no_grad()
    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals:
        """Loss and accuracy over all ranks; every sample counts once, and ``take`` gets the outputs and targets."""
        objective = self.objective
        self._sums.reset()
        self._counts.zero_()
        outputs = _Outputs(self.world, take)
        whole = not objective.is_mean(self.model) or mixes_samples(self.model)
        if getattr(objective, "is_default", False) and not whole:  # of a dict it is the loss in the model's output
            whole = _are_dicts(self.data)
        measure = self._forward["measure" if take is None else "measure with outputs"]
        with evaluation_mode(self.model), contextlib.nullcontext() if take is None else self._recorded_outputs:
            for number, shard in enumerate(self._shards(whole=whole, by_name=True)):
                pair = None if shard is None else measure((shard.whole, number), shard.size)
                outputs.add(pair, 0 if shard is None else shard.size)
                alive()
        outputs.finish()
        of_all = add(self.world.values(self._sums.read()))
        return of_all.with_weight(sum(float(part) for part in self.world.gather(self._counts)))

    def _measure(self, numbered: tuple[Batch, int], size: int, *, with_outputs: bool = False) -> Any:
        """Add the loss of a batch; returns outputs and targets, where they are wanted."""
        batch, self.objective.batch_idx = numbered
        batch, pair = self.number_format.cast(batch), None
        with self.number_format.scope(self.world.device):
            with logged.collect() as values:
                both, loss, correct = self.objective.as_sum(self.model, batch)
            if with_outputs:
                pair = self._round(self._recorded_outputs.take(batch)), target_of(self.model, batch)
        both = both or LossSum(loss.double() * size, size)
        self._counts += both.count
        self._sums.log(values, size)
        self._sums.add(both.total, correct, size, 0, weight=1 / size)
        return pair

    def try_first_batch(self) -> None:
        """Evaluate the first batch and forget it: what would fail after the first epoch fails before it.

        A copy of the model that shares its weights computes, so nothing that the job has changes. A loader with its
        own order is not read; a model that is compiled, that plots or that cannot be copied is not tried.
        """
        data, device = self.data, self.world.device
        compiled = any(map(compat.is_compiled, self.model.modules()))
        if compiled or isinstance(data, Stream) or hasattr(self.model, "plot"):
            return
        try:
            weights = {id(weight): weight for weight in self.model.parameters()}
            model, objective = copy.deepcopy((self.model, self.objective), weights)
        except Exception:  # whatever a part of it raises
            return
        size = min(whole_size(data, self.batch_size), data.count)
        if isinstance(data, Samples) and data.workers:  # read there: a file that is open here would be shared with them
            one = dataclasses.replace(data, workers=1, options={**data.options, "persistent_workers": False}, look=None)
            batch = next(one.batches([np.arange(size)], seed=0, draws=0))
        else:
            batch = data.few(size)
        batch = map_tensors(lambda tensor: tensor.to(device), batch)
        trial = Evaluation(model, self.world, self.number_format, size, data, objective)
        with randomness.preserve(device), torch.no_grad(), evaluation_mode(model):
            trial._measure((batch, 0), size)

    @torch.no_grad()
    def predict(self, inputs: ModelInputs | None, alive: Callable[[], None], take: Take) -> None:
        """The model's outputs for all samples, or what its ``predict_step`` returns."""
        self._inputs = inputs
        outputs = _Outputs(self.world, take)
        with evaluation_mode(self.model):
            for number, shard in enumerate(self._shards()):
                computed = None if shard is None else self._forward["predict"]((shard.whole, number), shard.size)
                outputs.add(None if shard is None else (computed, None), 0 if shard is None else shard.size)
                alive()
        outputs.finish()

    def _predict(self, numbered: tuple[Batch, int], size: int) -> Any:
        batch, number = numbered
        batch = self.number_format.cast(batch)
        step = own_predict_step(self.model)
        with self.number_format.scope(self.world.device):
            if step is None:
                return self._round(predict(self.model, batch, self._inputs))
            return self._round(step(batch, number) if takes_number(step) else step(batch))

    def _shards(self, *, whole: bool = False, by_name: bool = False) -> Iterator[Shard | None]:
        """This rank's shard of every batch, in the order of the data; or its turn of the ``whole`` batches.

        ``by_name``: dicts are not divided either, for the model may compute the loss of all that is in them.
        """
        data = self.data
        if isinstance(data, Stream):
            batches = whole_batches(feed.stream_windows(data, Cursor()), whole or (is_by_name if by_name else False))
            shards = feed.stream_shards(batches, Division(self.world))
            return (shard for _, shard in loader_batches.check_agreement(shards, self.world.all_have))
        assert data.count is not None
        size = whole_size(data, self.batch_size) if whole else batch_size_for(self.batch_size)
        every = list(windows(Cursor(), data.count, size, whole=whole))
        return feed.shards(data, np.arange(data.count), every, Division(self.world))

    def _round(self, outputs: Any) -> Any:
        """Outputs that are in half precision only because the trainer computes in it, as float32."""
        if self.number_format.autocast is None:
            return outputs
        return map_tensors(widen, outputs)


def is_by_name(batch: Batch) -> bool:
    return isinstance(batch, Mapping)


def _are_dicts(data: Source) -> bool:
    """Whether the batches of these data are dicts; False for a loader, whose batches are checked one by one."""
    if isinstance(data, Arrays):
        return isinstance(data.prepare, dict_batches.Named)
    return isinstance(data, Samples) and is_by_name(data.few(1))


class _RecordedOutputs:
    """Records the model's output while an objective calls it; a model that is called several times is called again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self._seen = model, list[Any]()

    def __enter__(self) -> None:
        self._hook = self.model.register_forward_hook(lambda _, __, output: self._seen.append(output))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def take(self, batch: Batch) -> Any:
        """The output for the batch that the objective has just seen."""
        seen = list(self._seen)
        output = seen[0] if len(seen) == 1 else predict(self.model, batch)
        self._seen.clear()
        return output


class _Outputs:
    """Outputs and targets of every batch, on their way to ``take`` of the first rank (None: they are not wanted)."""

    def __init__(self, world: World, take: Take | None) -> None:
        self.world, self.take_pair = world, take
        self._late = PendingOutputs(self._arrive)

    def add(self, pair: tuple[Any, Any] | None, size: int = 0) -> None:
        """This rank's part of the next batch: outputs and targets, or None where it has no samples."""
        if self.take_pair is None:
            return
        if pair is not None:
            pair = (_with_rows(pair[0]), pair[1])
            check_rows(pair[0], size)
        leaves, structure = tree.flatten(pair)
        self._late.add(([_start_copy(leaf) for leaf in leaves], structure))

    def finish(self) -> None:
        self._late.finish()

    def _arrive(self, coming: tuple[list[Any], Any]) -> None:
        moving, structure = coming
        pair = structure.unflatten(leaf.result() if isinstance(leaf, Arrival) else leaf for leaf in moving)
        if self.world.size > 1:
            parts = self.world.values_at_first(job_bytes.dumps(map_tensors(_compact, pair)))
            pair = _join_parts([pickle.loads(part) for part in parts]) if self.world.first else None
        if pair is not None and self.take_pair is not None:
            self.take_pair(*pair)


def _start_copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        return backend.start_move(leaf.detach(), _HOST)
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of the memory that it is a view of."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor


def _join_parts(parts: list[tuple[Any, Any] | None]) -> Any:
    pieces = Pieces(join_arrays)
    for part in parts:
        if part is not None:
            pieces.add(part)
    return pieces.whole()


def join_arrays(arrays: list[Any]) -> Any:
    """Tensors, or NumPy's arrays, as one."""
    return torch.cat(arrays) if isinstance(arrays[0], torch.Tensor) else np.concatenate(arrays)


def _with_rows(output: Any) -> Any:
    """The output without the named parts that belong to a batch, not to its samples.

    Models of Hugging Face return such parts beside their scores: the loss, and the cache of keys and values.
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, type):  # its dicts are dataclasses, too
        names = [field.name for field in dataclasses.fields(output) if field.init]
        left_out = dict.fromkeys(name for name in names if _is_of_batch(getattr(output, name, None)))
        return dataclasses.replace(output, **left_out) if left_out else output
    if isinstance(output, Mapping) and any(map(_is_of_batch, output.values())):
        return {name: part for name, part in output.items() if not _is_of_batch(part)}
    return output


def _is_of_batch(part: Any) -> bool:
    """Whether it has no rows: a single number, or an object that is no array. Texts may belong to samples."""
    leaves, _ = tree.flatten(part)
    return bool(leaves) and not any(isinstance(leaf, str) or getattr(leaf, "shape", ()) for leaf in leaves)


# Batches


def predict(model: torch.nn.Module, batch: Batch, inputs: ModelInputs | None = None) -> Any:
    """The model's output for a batch: ``model(*inputs)``, or ``model(**inputs)`` for a dict.

    ``inputs``: which parts of a batch these are; None: all but the target.
    """
    if isinstance(batch, Mapping):
        left_out = () if inputs is not None and inputs.targets is False else LABELS
        return dict_batches.output_of(model, {name: part for name, part in batch.items() if name not in left_out})
    if not isinstance(batch, (tuple, list)):
        return model(batch)
    return model(*batch[: _inputs(model, batch) if inputs is None else inputs.count(len(batch))])


def own_predict_step(model: torch.nn.Module) -> Callable[..., Any] | None:
    """The model's ``predict_step``; None without one of its own: Lightning's base class has one that calls forward."""
    step: Any = getattr(model, "predict_step", None)
    return None if step is None or step.__module__.startswith(LIGHTNING) else step


def target_of(model: torch.nn.Module, batch: Batch) -> Any:
    """The part of a batch that metrics compare the outputs with; None where there is none."""
    if isinstance(batch, Mapping):
        return dict_batches.target_of(model, batch)
    return batch[-1] if isinstance(batch, (tuple, list)) and _inputs(model, batch) < len(batch) else None


def _inputs(model: torch.nn.Module, batch: Any) -> int:
    return input_count(model.forward, len(batch))


# Jobs: a job that evaluates or predicts goes the way of a training, in the calling process on one device, in worker
# processes on several, or in the processes of a launcher. Workers send outputs in pieces, through the first rank.


def compute(job: Job, here: World, take: Take | None, alive: Callable[[], None]) -> dict[str, Any] | None:
    """This rank's part: returns the totals over all ranks; a prediction goes to ``take`` and returns None."""
    precision = job.settings.precision
    number_format = NumberFormat(HALVES.get(precision), dtype=torch.float64 if precision == "fp64" else None)
    model = job.model.to(here.device, number_format.dtype)
    here.broadcast_([*model.parameters(), *model.buffers()])
    randomness.seed_all(randomness.mixed_seed(job.settings.seed, here.rank))
    data = feed.resident(job.train, here.device)
    objective = place(job.objective, here.device, number_format.dtype)
    recorder = steps.recorder_for(here.device) if job.settings.step.optimize != "off" else None
    evaluation = Evaluation(model, here, number_format, job.settings.batch_size, data, objective, recorder)
    if job.purpose == "predict":
        assert take is not None
        evaluation.predict(job.inputs, alive, take)
        return None
    totals, values = evaluate_with_metrics(evaluation, job.metrics, alive)
    assert totals is not None
    return named_results(totals, values)


def in_process(job: Job, here: World, take: Take | None) -> dict[str, Any] | None:
    """In the calling process; the model, and the caller's random numbers, are then as they were."""
    with randomness.preserve(here.device), placement_preserved(job.model):
        return compute(job, here, take, ignore_progress)


def in_worker(job: Job, here: World, say: Say) -> dict[str, Any]:
    """In a worker process: returns its last message. Outputs are sent before, piece by piece."""
    spoke = 0.0

    def alive() -> None:
        nonlocal spoke
        if time.monotonic() - spoke > _ALIVE_EVERY:
            spoke = time.monotonic()
            say({"kind": "alive", "step": 0})

    def send(outputs: Any, _: Any) -> None:
        say({"kind": "outputs", "step": 0, "bytes": job_bytes.dumps(outputs)})

    alive()
    return {"kind": "done", "step": 0, "metrics": compute(job, here, send, alive)}


def with_workers(job: Job, ranks: list[torch.device], take: Take | None) -> dict[str, Any] | None:
    """The caller's side of a job in worker processes."""
    from manyhands.training.torch.workers import pool

    def event(event: dict[str, Any]) -> None:
        if event["kind"] == "outputs" and take is not None:
            take(pickle.loads(event["bytes"]), None)

    metrics: dict[str, Any] | None = pool.pool_for(ranks).run(job, event)["metrics"]
    return metrics


# Metrics


def own_meter(metric: Any) -> MetricCalls | None:
    """A metric with ``update(outputs, targets)``, ``compute()`` and ``reset()``, as torchmetrics has them.

    It is copied to the host, and told that it is the only process: it sees every sample already.
    """
    if isinstance(metric, type) or not all(hasattr(metric, name) for name in ("update", "compute", "reset")):
        return None
    metric = copy.deepcopy(metric)
    if isinstance(metric, torch.nn.Module):
        metric = metric.cpu()
        for part in metric.modules():
            if hasattr(part, "distributed_available_fn"):
                part.distributed_available_fn = lambda: False

    def update(outputs: Any, targets: Any) -> None:
        metric.update(dict_batches.logits_of(outputs, outputs), targets)

    return MetricCalls(metric.reset, update, metric.compute)
