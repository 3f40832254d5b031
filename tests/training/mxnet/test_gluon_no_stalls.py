"""A step asks for nothing that the host would have to wait for, and the engine has at most two steps ahead of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
from gluon_cases import contexts, mlp, vectors

from manyhands.training.callbacks import events
from manyhands.training.callbacks.callback import NO_CALLBACKS, CallbackPlan
from manyhands.training.data import sources
from manyhands.training.data.order import Cursor
from manyhands.training.loop import Loop
from manyhands.training.mxnet import optimizers, replicas, step
from manyhands.training.mxnet.learner import GluonLearner
from manyhands.training.mxnet.objective import objective_for
from manyhands.training.options import Settings, Step
from manyhands.training.schedules import one_cycle

# Everything in MXNet's library that comes back only when something has been computed.
WAITING = ("MXNDArraySyncCopyToCPU", "MXNDArrayWaitToRead", "MXNDArrayWaitToWrite", "MXNDArrayWaitAll")


class Waits:
    """Writes down each wait: for the sums of which step, or None for anything else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int | None]] = []
        self.step = 0
        self._sums: dict[int, int] = {}
        self._kept: list[Any] = []  # an address that is used again would hide something
        for name in WAITING:
            monkeypatch.setattr(mx.base._LIB, name, self._watched(getattr(mx.base._LIB, name)))
        set_out = step.RunningSums._on_the_way

        def watched(sums: Any) -> Any:
            coming = set_out(sums)
            self._sums[coming.handle.value] = self.step
            self._kept.append(coming)
            return coming

        monkeypatch.setattr(step.RunningSums, "_on_the_way", watched)

    def _watched(self, wait: Any) -> Any:
        def call(*arguments: Any) -> Any:
            handle = getattr(arguments[0], "value", None) if arguments else None
            self.found.append((self.step, self._sums.get(handle)))
            return wait(*arguments)

        return call


def learner(settings: Settings, devices: int, data: Any = None, loss: Any = None, **net: Any) -> GluonLearner:
    model = mlp(**net)
    model.cast("float64")
    model.collect_params().reset_ctx(contexts(devices))
    assert replicas.distinct(model)[0].list_ctx() == contexts(devices)
    how: Any = {"scheduled": True, "devices": contexts(devices)}
    trainer = optimizers.trainer_for(model, "adam", settings.lr, **how)
    source = sources.source(data or vectors(80))
    return GluonLearner(model, trainer, objective_for(model, loss), settings, source, None, contexts(devices))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "callbacks, clipping and an empty shard": {"gradient_clip_val": 0.1, "step": Step(shares=[1, 0])},
}
CALLBACKS = CallbackPlan(every=(2,), rates=True)


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_no_step_but_that_of_two_ago(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**{"max_epochs": 1, "batch_size": 8, **CASES[name]})
    one = learner(settings, 2, norm=True)
    monkeypatch.setattr(events, "_SHOW_EVERY", 0.0)  # so that the metrics are looked at after every step
    said: list[Any] = []
    callbacks = CALLBACKS if CASES[name] else NO_CALLBACKS
    loop = Loop(one, settings, said.append, schedule=one_cycle, callbacks=callbacks)
    waits = Waits(monkeypatch)

    def counted(window: Any, batch: Any, factor: float | None) -> None:
        waits.step = window.step
        step(window, batch, factor)

    step = one.step
    monkeypatch.setattr(one, "step", counted)
    assert loop._make_steps()
    assert loop.cursor == Cursor(0, 80, 10, 10)
    assert len(waits.found) >= 8  # from the third step on
    assert all(of is not None and of <= now - 2 for now, of in waits.found)
    assert [event for event in said if event["kind"] == "progress"][-1]["loss"] is not None
    assert [event["step"] for event in said if event["kind"] == "steps"] == ([2, 4, 6, 8] if callbacks.every else [])
    assert one.read()[0].count == 80


def test_a_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = mx.nd.arange(4)
    for wait in (
        lambda: x.asnumpy(), lambda: x.sum().asscalar(), lambda: bool(x[0] > 1), x.wait_to_read,
        mx.nd.waitall, lambda: str(x),
    ):  # fmt: skip
        waits = Waits(monkeypatch)
        wait()
        assert waits.found
        assert waits.found[0] == (0, None)
