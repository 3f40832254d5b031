"""What training means, written once and held against every framework."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import StopAt, Stopped, same_rate
from training_bench import Bench, counting

from manyhands.cli.parity import LIMIT, compare, largest_difference
from manyhands.errors import BadLabels, BadRunFolder, BadSettings, LossIsNotANumber, WrongCheckpoint
from manyhands.training.options import Checkpoints, Step

CLOSE = 1e-5


# What comes of it


def test_a_model_learns(bench: Bench) -> None:
    result = bench.fit(epochs=3, data=bench.data(samples=400, tested=100))
    losses = [row["train_loss"] for row in result.rows]
    assert losses[-1] < 0.8 * losses[0]
    assert result.val_acc > 0.3
    assert [row["samples"] for row in result.rows] == [400] * 3
    assert str(result).startswith(f"val_acc {result.val_acc:.3f}, ")
    assert str(result).endswith("sec/epoch on [cpu]")


@pytest.mark.neutral
def test_the_run_folder_tells_it_all(bench: Bench) -> None:
    result = bench.fit(epochs=2)
    run = Path(result.run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.rows
    assert json.loads((run / "config.json").read_text())["settings"]["max_epochs"] == 2
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000004", "step-00000008"}


def test_the_trained_weights_are_in_the_callers_model(bench: Bench) -> None:
    model = bench.recipes.model("mlp", 0)
    images = np.zeros((4, 28, 28), dtype=np.uint8) + np.arange(4, dtype=np.uint8)[:, None, None] * 60
    before = bench.scores(model, images)
    trainer = bench.mh.Trainer(1, lr=0.1, quiet=True, precision="fp32", run=bench.new_run(), **bench.on(2))
    trainer.fit(model, bench.data())
    after = bench.scores(model, images)
    assert np.abs(after - before).max() > 1e-4
    run = bench.folder / "run1"
    with pytest.raises(BadRunFolder, match=r"mh\.load_weights\(model, "):
        bench.mh.load_model(run)  # a run of one's own model: it is not known here how to make it
    for where in (run, run / "checkpoints" / "step-00000004"):
        loaded = bench.mh.load_weights(bench.recipes.model("mlp", 1), where)
        assert not getattr(loaded, "training", False), "for evaluation"
        np.testing.assert_allclose(bench.scores(loaded, images), after, atol=1e-5)
    with pytest.raises(WrongCheckpoint, match="another model"):
        bench.mh.load_weights(bench.recipes.model("lenet", 1), run)
    (run / "config.json").write_text(json.dumps({"train": {"model": "mlp"}}))
    loaded = bench.mh.load_model(run)
    assert not getattr(loaded, "training", False), "for evaluation"
    np.testing.assert_allclose(bench.scores(loaded, images), after, atol=1e-5)


# The same answer


def test_options_keep_the_answer(bench: Bench) -> None:
    data = bench.data(samples=50)  # the last batch is short
    step = Step() if "shares" in bench.mh.Trainer.refused else Step(shares=[0.2, 0.8])
    alone = bench.fit(1, epochs=1, data=data, gradient_clip_val=0.05)
    both = bench.fit(2, epochs=1, data=data, gradient_clip_val=0.05, step=step)
    assert largest_difference(bench.weights(both.run), bench.weights(alone.run)) < CLOSE
    assert both.rows[-1]["train_loss"] == pytest.approx(alone.rows[-1]["train_loss"], rel=1e-4)


def test_a_seed_gives_the_same_training_again(bench: Bench) -> None:
    one, again, other = bench.fit(seed=3), bench.fit(seed=3), bench.fit(seed=4)
    assert largest_difference(bench.weights(one.run), bench.weights(again.run)) == 0
    assert largest_difference(bench.weights(one.run), bench.weights(other.run)) > 1e-4


def test_no_pass_is_made_before_the_first_step(bench: Bench) -> None:
    """Over training data, on one device: neither to look at labels nor to try the loss."""
    how = {"quiet": True, "precision": "fp32", **bench.on(1)}
    net = bench.recipes.model("mlp", 0)
    bench.mh.Trainer(1, **how).fit(net, bench.data(samples=16))  # layers that have seen no sample get their shapes
    model, calls = counting(bench.framework, net)

    def first_step(done: float) -> float:
        raise Stopped(len(calls))

    for options in ({}, {"loss": lambda *_: calls.append("loss")}):
        calls.clear()
        with pytest.raises(Stopped, match=r"^0$"):
            bench.mh.Trainer(1, schedule=first_step, **how, **options).fit(model, bench.data(samples=16)[0])


# Stop and go on


def test_a_stopped_run_goes_on_where_it_was(bench: Bench) -> None:
    """Stopped in the middle of an epoch; on the same number of devices it ends with the same bits."""
    data = bench.data(samples=50)  # the last batch is short
    whole = bench.fit(epochs=3, schedule=same_rate, data=data)
    stopped = bench.new_run()
    with pytest.raises(Stopped):
        bench.fit(epochs=3, schedule=StopAt(6), checkpoints=Checkpoints(every=1), run=stopped, data=data)
    for devices in (1, 2):
        run = shutil.copytree(stopped, bench.new_run())
        went_on = bench.fit(devices, epochs=3, schedule=same_rate, resume="auto", run=run, data=data)
        difference = largest_difference(bench.weights(run), bench.weights(whole.run))
        assert difference == 0 if devices == 1 else difference < CLOSE
        assert [row["epoch"] for row in went_on.rows] == [1, 2, 3]
        assert [row["samples"] for row in went_on.rows] == [50] * 3
        for row, straight in zip(went_on.rows, whole.rows, strict=True):
            assert row["train_loss"] == pytest.approx(straight["train_loss"], rel=1e-4)


# Bad input


def test_a_loss_that_is_no_number_stops_and_is_named(bench: Bench) -> None:
    with pytest.raises(LossIsNotANumber, match=r"step \d+ .*epoch 1, samples"):
        bench.fit(epochs=1, optimizer=bench.recipes.nesterov(1e30), data=bench.data(samples=100))


def test_a_mean_over_nothing_is_no_number(bench: Bench) -> None:
    own = bench.own.loss
    with pytest.raises(LossIsNotANumber, match=r"mh\.LossSum.*the count of this batch may be 0"):
        bench.fit(2, epochs=1, loss=lambda a, b: bench.mh.LossSum(own(a, b) * 0, 0), data=bench.data(samples=16))


def test_or_goes_on_as_asked(bench: Bench) -> None:
    if bench.framework == "mxnet":
        pytest.skip("MXNet's trainer stops at a NaN")
    with pytest.warns(UserWarning, match="not a number"):
        bench.fit(
            epochs=1, optimizer=bench.recipes.nesterov(1e30), data=bench.data(samples=100), step=Step(on_nan="continue")
        )


def test_labels_that_the_model_has_no_output_for(bench: Bench) -> None:
    with pytest.raises(BadLabels, match="0 to 9"):
        bench.fit(epochs=1, data=bench.data(label=11))


def test_a_batch_smaller_than_the_devices(bench: Bench) -> None:
    with pytest.raises(BadSettings, match="smaller than the number of devices"):
        bench.fit(3, epochs=1, data=bench.data(batch_size=2))


def test_gpus_that_are_missing_are_noted(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench.mh.Trainer(1, num_gpus=1000).fit(bench.recipes.model("mlp", 0), bench.data(samples=32))
    (note,) = (note for note in result.notes if note.startswith("num_gpus=1000: there "))
    assert capsys.readouterr().err.count(note) == 1


# On three devices: in PyTorch these are processes, which stay for the next test


def test_three_devices_are_one_device(bench: Bench) -> None:
    """A net with convolutions, even and uneven, with a short last batch, as ``parity`` does it."""
    arrays = bench.data(samples=100)[0]
    name = "mlp" if bench.framework == "jax" else "lenet"  # XLA's convolutions in float64 take half a minute on a CPU
    differences = [*compare(bench.recipes, lambda: bench.recipes.model(name, 0), arrays, 3, steps=5)]
    assert all(difference <= LIMIT for *_, difference in differences), differences


def test_fewer_samples_than_devices_in_the_last_batch(bench: Bench) -> None:
    data = bench.data(samples=9, batch_size=4)
    alone, three = bench.fit(1, epochs=2, data=data), bench.fit(3, epochs=2, data=data)
    assert largest_difference(bench.weights(three.run), bench.weights(alone.run)) < CLOSE
    assert three.rows[-1]["samples"] == 9


# Steps as the book writes them: they plot their metrics, and a validation step returns nothing


@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_validation_step_plots_are_the_figures_of_the_epoch(bench: Bench, devices: int) -> None:
    class Plotting(bench.mh.Module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            self.plot("loss", loss, train=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            scores = self(*batch[:-1])
            self.plot("loss", self.loss(scores, batch[-1]), train=False)
            self.plot("acc", bench.own.share_right(scores, batch[-1]), train=False)

    how: dict[str, Any] = {"quiet": True, "precision": "fp32", **bench.on(devices)}
    stop = bench.mh.EarlyStopping("val_acc", patience=9, mode="max")
    row = bench.mh.Trainer(1, callbacks=[stop], **how).fit(bench.with_net(Plotting()), bench.data()).rows[-1]
    plain = bench.mh.Trainer(1, **how).fit(bench.with_net(bench.mh.Module()), bench.data()).rows[-1]
    for name in ("train_loss", "val_loss", "val_acc"):
        assert row[name] == pytest.approx(plain[name], rel=1e-5), name


def test_a_step_with_other_arguments_is_refused_by_name(bench: Bench) -> None:
    if bench.framework == "torch":
        pytest.skip("PyTorch's steps may take the number of the batch, and that of the optimizer")

    class OfTheBook(bench.mh.Module):  # type: ignore[misc, name-defined]
        def training_step(self, params: Any, batch: Any, state: Any) -> Any:
            return state.apply_fn(params, *batch)

    how: dict[str, Any] = {"quiet": True, **bench.on(1)}
    with pytest.raises(BadSettings, match=r"takes \(params, batch, state\).*def training_step\(self, batch\)"):
        bench.mh.Trainer(1, **how).fit(bench.with_net(OfTheBook()), bench.data())
