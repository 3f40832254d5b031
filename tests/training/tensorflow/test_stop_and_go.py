"""A job that stops and goes on ends where it would have ended, bit by bit; what is learned comes home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import convnet, fit, images, mlp, tensors, vectors

from manyhands.cli import parity
from manyhands.errors import BadSettings, LossIsNotANumber, WrongCheckpoint
from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints, Step


class Interrupted(Exception):
    pass


def stops_at(step: int) -> Any:
    """A schedule that is interrupted; the schedule is asked once before every step."""
    asked = iter(range(1000))

    def schedule(done: float) -> float:
        if next(asked) == step:
            raise Interrupted
        return 1.0 - 0.5 * done

    return schedule


def adam(rate: float) -> Any:
    return keras.optimizers.Adam(rate)


def model() -> Any:
    return mlp(lambda: layers.BatchNormalization(), lambda: layers.Dropout(0.2))


def test_stopped_in_the_middle_of_an_epoch_and_resumed_the_weights_are_bit_equal(tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": adam, "checkpoints": Checkpoints(every=2), "step": Step(shares=[1, 3])}
    whole, stopped = model(), model()
    result = fit(whole, vectors(), 2, run=tmp_path / "whole", schedule=lambda d: 1.0 - 0.5 * d, **how)
    with pytest.raises(Interrupted):
        fit(stopped, vectors(), 2, run=tmp_path / "run", schedule=stops_at(7), **how)
    resumed = model()
    again = fit(resumed, vectors(), 2, run=tmp_path / "run", resume="auto", schedule=lambda d: 1.0 - 0.5 * d, **how)
    for a, b in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row["samples"] for row in again.rows] == [row["samples"] for row in result.rows] == [64, 64]
    assert again.rows[-1]["train_loss"] == pytest.approx(result.rows[-1]["train_loss"], rel=1e-12)


def test_on_another_number_of_devices_it_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": adam, "checkpoints": Checkpoints(every=2)}
    whole, stopped, resumed = mlp(), mlp(), mlp()
    fit(whole, vectors(), 1, **{"optimizer": adam}, schedule=lambda done: 1.0 - 0.5 * done)
    with pytest.raises(Interrupted):
        fit(stopped, vectors(), 1, run=tmp_path, schedule=stops_at(5), **how)
    fit(resumed, vectors(), 2, run=tmp_path, resume="auto", schedule=lambda done: 1.0 - 0.5 * done, **how)
    assert parity.largest_difference(tensors(resumed), tensors(whole)) < 1e-12


def test_what_was_learned_comes_home_also_when_the_job_is_interrupted() -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        fit(model, vectors(48), 2, schedule=stops_at(3))
    assert not np.array_equal(mlp().get_weights()[0], model.get_weights()[0])


def test_an_optimizer_of_the_callers_goes_on_with_what_it_remembers() -> None:
    kept = keras.optimizers.SGD(0.05, momentum=0.9)
    twice, once = mlp(), mlp()
    data = vectors(16)  # one batch an epoch: the order does not matter
    fit(twice, data, 2, epochs=1, optimizer=kept, schedule=lambda done: 0.5)
    fit(twice, data, 1, epochs=1, optimizer=kept, schedule=lambda done: 0.5)
    fit(once, data, 1, epochs=2, schedule=lambda done: 0.5)
    assert parity.largest_difference(tensors(twice), tensors(once)) < 1e-12
    assert int(kept.iterations) == 2
    assert float(kept.learning_rate) == pytest.approx(0.05)
    with pytest.raises(BadSettings, match="another model"):
        fit(mlp(lambda: layers.Dense(2)), data, optimizer=kept)


def test_a_checkpoint_of_another_model_is_refused_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    fit(mlp(), vectors(), epochs=1, run=tmp_path)
    other = mlp(lambda: layers.Dense(5))
    before = other.get_weights()
    with pytest.raises(WrongCheckpoint, match=r"dense_1/kernel is \(8, 3\)"):
        fit(other, vectors(), resume=tmp_path)
    for a, b in zip(before, other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_that_come_alone_are_trained_with_a_fresh_optimizer(tmp_path: Path) -> None:
    fit(mlp(), vectors(), epochs=1, run=tmp_path / "run")
    found = store.load(tmp_path / "run" / "checkpoints")
    state = {**found.state, "optimizer_type": None}
    store.save(tmp_path / "alone", found.step, state, {"model": found.blobs["model"]})
    assert len(fit(mlp(), vectors(), epochs=2, resume=tmp_path / "alone").rows) == 1


def test_a_loss_that_is_no_number_stops_the_job_or_leaves_no_trace() -> None:
    X, y = vectors(48)
    X[5] = np.nan
    with pytest.raises(LossIsNotANumber, match=r"step \d+ .*samples"):
        fit(mlp(), (X, y), 2, epochs=1)
    X, y = images(40)
    X[5] = np.inf
    model = convnet()
    result = fit(model, (X, y), 1, step=Step(on_nan="continue"))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert result.rows[-1]["train_loss"] is None
