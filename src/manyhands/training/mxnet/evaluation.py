"""Evaluation and prediction on all devices, outputs on their way to the host, and MXNet's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mxnet as mx

from manyhands import tree
from manyhands.training.data.order import Cursor
from manyhands.training.data.roles import Inputs, input_count
from manyhands.training.data.sources import Batch
from manyhands.training.evaluation.metrics import MetricCalls
from manyhands.training.evaluation.pieces import PendingOutputs, Pieces, batch_size_for, check_rows, whole_size
from manyhands.training.learner import Take
from manyhands.training.mxnet.feed import Feed, Shards
from manyhands.training.mxnet.objective import Objective, checked_output
from manyhands.training.mxnet.running_sums import RunningSums
from manyhands.training.mxnet.step import evaluate
from manyhands.training.options import Settings
from manyhands.training.running_sums import Figures

_AHEAD = 2  # batches whose outputs may be on their way: MXNet would queue copies without end


def _outputs(take: Take | None) -> PendingOutputs:
    """Outputs and targets of every batch, as MXNet's arrays in the host's memory, on their way to ``take``."""

    def deliver(pieces: Pieces) -> None:
        pair = pieces.whole()
        for leaf in tree.flatten(pair)[0]:
            leaf.wait_to_read()
        assert take is not None
        take(*pair)

    return PendingOutputs(None if take is None else deliver, _AHEAD)


def _pieces(model: Any, shards: Sequence[Batch], computed: Sequence[Any]) -> Pieces:
    """The outputs and targets of a batch, in the order of the samples; an output that is None is computed."""
    pieces = Pieces(joined)
    for shard, output in zip(shards, computed, strict=True):
        outputs = predicted(model, shard) if output is None else output
        check_rows(outputs, len(shard[0]))
        pieces.add(tree.map_leaves(_to_host, (outputs, target_of(model, shard))))
    return pieces


def figures(
    objective: Objective,
    feed: Feed,
    settings: Settings,
    alive: Callable[[], None],
    take: Take | None = None,
) -> Figures:
    """Loss and accuracy on all devices, each sample counted once; the model is on them already."""
    sums, outputs = RunningSums(feed.devices[0], over_all=True), _outputs(take)
    for shards in _batches(feed, settings, whole=not objective.is_gluons):
        computed = evaluate(objective, shards, sums)
        if take is not None:
            outputs.add(_pieces(objective.model, [shard for shard in shards if shard is not None], computed))
        alive()
    outputs.finish()
    return sums.read()


def predict(model: Any, inputs: Inputs, feed: Feed, settings: Settings, alive: Callable[[], None], take: Take) -> None:
    """The model's outputs for all samples, computed on all devices."""
    outputs = _outputs(take)
    for shards in _batches(feed, settings):
        present = [inputs.of(shard) for shard in shards if shard is not None]
        computed = [checked_output(model, shard) for shard in present]
        outputs.add(_pieces(model, [shard[:1] for shard in present], computed))
        alive()
    outputs.finish()


def _batches(feed: Feed, settings: Settings, *, whole: bool = False) -> Iterator[Shards]:
    """Every batch in the order of the data; ``whole``, for a loss that is not known to be a mean over samples."""
    size = whole_size(feed.source, settings.batch_size) if whole else batch_size_for(settings.batch_size)
    return (shards for _, shards in feed.batches(Cursor(), size, settings.seed, whole=whole))


def predicted(model: Any, batch: Batch) -> Any:
    """The model's output for a batch with a target."""
    return checked_output(model, batch[: input_count(call_of(model), len(batch))])


def target_of(model: Any, batch: Batch) -> Any:
    """The last part of a batch; None if it is an input."""
    return batch[-1] if input_count(call_of(model), len(batch)) < len(batch) else None


def call_of(model: Any) -> Any:
    """The function whose arguments are the block's inputs; ``hybrid_forward`` has another argument before them."""
    kind = type(model)
    if isinstance(model, mx.gluon.HybridBlock) and kind.forward is mx.gluon.HybridBlock.forward:
        return lambda x, *args: None  # MXNet says only then how many it takes
    return model.forward


def _to_host(leaf: Any) -> Any:
    return leaf.as_in_context(mx.cpu())


def joined(arrays: list[Any]) -> Any:
    """Arrays of either of MXNet's kinds as one."""
    if isinstance(arrays[0], mx.np.ndarray):
        return mx.np.concatenate(arrays, axis=0)
    return mx.nd.concat(*arrays, dim=0)


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
