"""Evaluation and prediction on all devices, outputs on their way to the host, and MXNet's own metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from manyhands import tree
from manyhands.backends.mxnet import devices as backend
from manyhands.training.data.order import Cursor
from manyhands.training.data.roles import ModelInputs, input_count
from manyhands.training.data.sources import Batch
from manyhands.training.evaluation.metrics import (
    MetricCalls,
    PendingOutputs,
    Pieces,
    batch_size_for,
    check_rows,
    whole_size,
)
from manyhands.training.learner import Take
from manyhands.training.mxnet.objective import Objective, checked_output
from manyhands.training.mxnet.step import Feed, RunningSums, evaluate
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals

_AHEAD = 2  # batches whose outputs may be on their way: MXNet would queue copies without end


@dataclass
class Evaluation:
    """A model that is on its devices, and data for it."""

    objective: Objective
    feed: Feed
    settings: Settings
    rank = 0

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals:
        """Loss and accuracy, each sample counted once."""
        sums, outputs = RunningSums(self.feed.devices[0], over_all=True), _outputs(take)
        # A loss that is not known to be a mean over samples gets whole batches.
        for shards in self._batches(whole=not self.objective.is_gluons):
            computed = evaluate(self.objective, shards, sums)
            if take is not None:
                outputs.add(self._pieces(shards, computed))
            alive()
        outputs.finish()
        return sums.read()

    def predict(self, inputs: ModelInputs, alive: Callable[[], None], take: Take) -> None:
        """The model's outputs for all samples."""
        outputs = _outputs(take)
        for shards in self._batches():
            present = [inputs.of(shard) for shard in shards]
            computed = [checked_output(self.objective.model, shard) for shard in present]
            outputs.add(self._pieces([shard[:1] for shard in present], computed))
            alive()
        outputs.finish()

    def from_first(self, data: bytes) -> bytes:
        return data

    def _batches(self, *, whole: bool = False) -> Iterator[list[Batch]]:
        """The shards of every batch in the order of the data, of the devices that have some."""
        size = self.settings.batch_size
        size = whole_size(self.feed.source, size) if whole else batch_size_for(size)
        for _, shards in self.feed.batches(Cursor(), size, self.settings.seed, whole=whole):
            yield [shard for shard in shards if shard is not None]

    def _pieces(self, shards: Sequence[Batch], computed: Sequence[Any]) -> Pieces:
        """The outputs and targets of a batch, in the order of the samples; an output that is None is computed."""
        model, pieces = self.objective.model, Pieces(backend.join)
        for shard, output in zip(shards, computed, strict=True):
            inputs = input_count(call_of(model), len(shard))
            outputs = checked_output(model, shard[:inputs]) if output is None else output
            check_rows(outputs, len(shard[0]))
            pair = outputs, shard[-1] if inputs < len(shard) else None
            pieces.add(tree.map_leaves(lambda leaf: leaf.as_in_context(mx.cpu()), pair))
        return pieces


def _outputs(take: Take | None) -> PendingOutputs:
    """Outputs and targets of every batch, as MXNet's arrays in the host's memory, on their way to ``take``."""

    def deliver(pieces: Pieces) -> None:
        pair = pieces.whole()
        for leaf in tree.flatten(pair)[0]:
            leaf.wait_to_read()
        assert take is not None
        take(*pair)

    return PendingOutputs(None if take is None else deliver, _AHEAD)


def call_of(model: Any) -> Any:
    """The function whose arguments are the block's inputs; ``hybrid_forward`` takes a module and parameters, too."""
    if isinstance(model, mx.gluon.HybridBlock) and type(model).forward is mx.gluon.HybridBlock.forward:
        return functools.partial(model.hybrid_forward, mx.nd, **model._reg_params)
    return model.forward


def own_meter(metric: Any) -> MetricCalls | None:
    if isinstance(metric, str):
        try:
            metric = mx.metric.create(metric)
        except AssertionError:  # MXNet has none of this name
            return None
    if not isinstance(metric, mx.metric.EvalMetric):
        return None

    def result() -> Any:
        name, value = metric.get()
        return dict(zip(name, value, strict=True)) if isinstance(name, list) else value

    return MetricCalls(metric.reset, lambda outputs, targets: metric.update([targets], [outputs]), result)
