"""Options that contradict each other are refused by name, in every framework; none is dropped silently."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_bench import MOST, Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import BadBatch, BadDevice, BadSettings, LossIsNotANumber, NoSuchDevice, UnknownOption
from manyhands.training.options import Checkpoints, Step, Workers


def test_the_run_says_whose_batch_statistics_they_are(bench: Bench) -> None:
    """By default each device's. In JAX a step is one program over the whole batch: what it does not do, it refuses."""
    run = bench.fit(epochs=1).run
    recorded = json.loads((Path(run) / "config.json").read_text())["settings"]["step"]["batch_stats"]
    if bench.framework != "jax":
        assert recorded == "per_device"
        bench.mh.Trainer(step=Step(batch_stats="per_device"))
        return
    assert recorded == "global"
    with pytest.raises(BadSettings, match=r"Step\(batch_stats='per_device'\): a step in JAX is one program over"):
        bench.mh.Trainer(step=Step(batch_stats="per_device"))


# The learning rate


def test_lr_is_the_rate_of_an_optimizer_that_the_trainer_makes(bench: Bench) -> None:
    """By name, as a class, and as a partial with other options: the same Adam, and none with another rate."""
    make, data = bench.own.adam, bench.data(samples=32)
    results = [
        bench.fit(epochs=1, optimizer=optimizer, lr=0.01, data=data)
        for optimizer in ("adam", "Adam", make, functools.partial(make, **{}))
    ]
    first, *others = [bench.weights(result.run) for result in results]
    assert [largest_difference(first, other) for other in others] == [0, 0, 0]
    slower = bench.weights(bench.fit(epochs=1, optimizer="adam", lr=0.001, data=data).run)
    assert largest_difference(first, slower) > 1e-3


def test_without_lr_an_optimizer_has_its_own_default(bench: Bench) -> None:
    if bench.framework == "jax":  # those of Optax have none
        with pytest.raises(BadSettings, match="optimizer=adam has no default learning rate: give lr="):
            bench.fit(epochs=1, optimizer="adam")
        return
    for optimizer, lr in (("adam", 0.001), (None, 0.1)):
        by_default, as_given = (bench.fit(epochs=1, optimizer=optimizer, lr=rate) for rate in (None, lr))
        assert largest_difference(bench.weights(by_default.run), bench.weights(as_given.run)) == 0


def test_a_finished_optimizer_has_its_own_rate(bench: Bench) -> None:
    with pytest.raises(BadSettings, match=r"lr=0\.3 and optimizer=.*its own learning rate\. Leave out lr, or give"):
        bench.mh.Trainer(1, optimizer=bench.recipes.nesterov(0.05), lr=0.3)
    fixed = functools.partial(bench.own.adam, **{"lr" if bench.framework == "torch" else "learning_rate": 0.05})
    with pytest.raises(BadSettings, match=r"lr=0\.3 and optimizer=partial\(\w+, \w+=0\.05\): "):
        bench.mh.Trainer(1, optimizer=fixed, lr=0.3)


def test_so_has_one_that_the_model_makes(bench: Bench) -> None:
    class Configured(bench.mh.Module):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()

    for options, said in (
        ({"lr": 0.3}, r"lr=0\.3 and configure_optimizers of Configured"),
        ({"optimizer": "sgd"}, "optimizer= and configure_optimizers of Configured both give an optimizer"),
        ({"optimizer": bench.recipes.nesterov(0.05)}, "optimizer= and configure_optimizers of Configured both"),
    ):
        trainer = bench.mh.Trainer(1, quiet=True, **options, **bench.on(1))
        with pytest.raises(BadSettings, match=said):
            trainer.fit(bench.with_net(Configured()), bench.data())


def test_the_books_module_leaves_its_rate_to_the_trainer(bench: Bench) -> None:
    """Without a rate of its own; with one, two that differ contradict each other."""
    how: dict[str, Any] = {"quiet": True, "precision": "fp32", **bench.on(1)}
    data = bench.data(samples=32)
    plain = bench.fit(epochs=1, optimizer=None, lr=0.3, data=data).rows[-1]["train_loss"]
    for own, lr in ((None, 0.3), (0.3, None), (0.3, 0.3)):
        model = bench.with_net(bench.mh.Module())
        if own is not None:
            model.lr = own
        loss = bench.mh.Trainer(1, lr=lr, **how).fit(model, data).rows[-1]["train_loss"]
        assert loss == pytest.approx(plain, rel=1e-5)
    model.lr = 0.1
    with pytest.raises(BadSettings, match=r"lr=0\.3 was given to the trainer, and the model has lr=0\.1"):
        bench.mh.Trainer(1, lr=0.3, **how).fit(model, data)


# The size of a batch


def test_two_sizes_of_a_batch(bench: Bench) -> None:
    with pytest.raises(BadSettings, match="batch_size=32 was given to the trainer, and the data come in batches of 16"):
        bench.fit(epochs=1, batch_size=32, data=bench.data(batch_size=16))
    assert bench.fit(epochs=1, batch_size=np.int64(16), data=bench.data(batch_size=16)).rows[-1]["samples"] == 64


# Other options

SCHEDULE = "schedule=.*: a schedule is a function from how much of the training is done"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_gpus": 2, "devices": ["cpu"]}, r"num_gpus=2 and devices=\['cpu'\]: give one of the two"),
        (
            {"checkpoints": Checkpoints(every=5)},
            r"Checkpoints\(every=5\) without a folder for the checkpoints: give run=",
        ),
        (
            {"step": {"accumulate": 2}},
            r"step=\{'accumulate': 2\}: give a Step object, as step=mh\.Step\(\.\.\.\)",
        ),
        ({"workers": Workers}, r"workers=Workers: give a Workers object, as workers=mh\.Workers\(\.\.\.\)"),
        ({"accumulate": 2}, r"no option accumulate: write Trainer\(step=mh\.Step\(accumulate=2\)\)"),
        ({"ranks_per_device": 2}, r"called per_device here\. Write Trainer\(workers=mh\.Workers\(per_device=2\)\)"),
        ({"sync_batchnorm": True}, r"write Trainer\(step=mh\.Step\(batch_stats='global'\)\)"),
        ({"acumulate": 2}, r"did you mean Trainer\(step=mh\.Step\(accumulate=\.\.\.\)\)\?"),
        ({"learning_rate": 0.1}, "Trainer has no option learning_rate: it is called lr here"),
        ({"patience": 3}, r"patience: it is a callback.*mh\.EarlyStopping"),
        ({"weight_decay": 0.1}, "weight_decay: it belongs to the optimizer"),
        ({"banana": 1}, "banana: there are max_epochs, num_gpus"),
        ({"verbose": 1}, "no option verbose: progress is shown; quiet=True shows none"),
        ({"optimizer": "adamm"}, r"optimizer='adamm': .* Did you mean 'adam.*'\? It has .*sgd"),
        *[({"schedule": given}, SCHEDULE) for given in (0.1, str)],
        *[({"num_gpus": count}, r"num_gpus=.*0 for the CPU") for count in (-1, 1.5, True, "2")],
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"precision": "16-mixed"}, "precision='16-mixed'.*'fp16'"),
        ({"precision": "32-true"}, "Did you mean 'fp32'"),
        ({"seed": -1}, "seed=-1"),
        ({"gradient_clip_val": -1}, "gradient_clip_val=-1"),
        ({"resume": "auto"}, "resume='auto'.*run="),
        ({"run": 5}, "run=5: give the path"),
    ],
)
def test_options_that_no_job_can_have(bench: Bench, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said) as raised:
        bench.mh.Trainer(**{"max_epochs": 1, **options})
    assert isinstance(raised.value, UnknownOption) == ("option" in str(raised.value).split(":")[0])


@pytest.mark.neutral
def test_fit_as_other_trainers_have_it(bench: Bench) -> None:
    trainer, X = bench.mh.Trainer(1), np.zeros((4, 2), dtype=np.float32)
    validation = "fit has no option validation_data: it is called validation here"
    epochs = r"fit has no option epochs: it is called max_epochs here\. Write Trainer\(max_epochs=3\)"
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((X, X, X), {}, TypeError, r"fit takes a model, its training data and its validation data, each \(X, y\)"),
        ((X, X), {}, BadBatch, r"fit\(model, X, y\) takes y for validation data: give both as one"),
        ((((X, X), (X, X)), (X, X)), {}, BadBatch, "a pair with validation data beside them"),
        (((X, X),), {"epochs": 3}, TypeError, epochs),
        ((), {"train_dataloaders": X}, TypeError, "fit has no option train_dataloaders: it is called data here"),
        (((X, X),), {"validation_data": X}, TypeError, validation),
    ]
    for data, options, error, said in cases:
        with pytest.raises(error, match=said):
            trainer.fit(None, *data, **options)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_the_model_comes_first(bench: Bench, method: str) -> None:
    X, y = bench.arrays(np.zeros((4, 3), np.float32), np.zeros(4, np.int64))
    trainer, model = bench.mh.Trainer(1, quiet=True), bench.recipes.model("mlp", 0)
    for data in ((X, y), X, [(X, y)]):
        with pytest.raises(BadSettings, match=rf"{method} got .*the model comes first, {method}\(model, data\)"):
            getattr(trainer, method)(data, model)


@pytest.mark.neutral
def test_validation_data_beside_the_training_data(bench: Bench) -> None:
    train, validation = bench.data()
    how: dict[str, Any] = {"quiet": True, "precision": "fp32", **bench.on(1)}
    fits = ((train, validation), {}), ((train,), {"validation": validation}), (((train, validation),), {})
    rows = [
        bench.mh.Trainer(1, **how).fit(bench.recipes.model("mlp", 0), *data, **named).rows[-1] for data, named in fits
    ]
    assert len({(row["val_loss"], row["val_acc"]) for row in rows}) == 1
    assert rows[0]["val_loss"] is not None


def test_a_trainer_of_the_users_own_is_told_the_same(bench: Bench) -> None:
    class Mine(bench.mh.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(2, **options)

    assert Mine(seed=3).seed == 3
    with pytest.raises(UnknownOption, match="Mine has no option learning_rate"):
        Mine(learning_rate=0.1)


# Schedules and losses


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda done: "much", r"schedule\(0\) gave a str: a schedule is a function"),
        (lambda done: -1.0, r"schedule\(0\) gave -1\.0: a factor of the learning rate is zero or more"),
        (lambda done: np.nan, r"schedule\(0\) gave nan"),
    ],
)
def test_what_a_schedule_gives(bench: Bench, schedule: Any, said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        bench.fit(epochs=1, schedule=schedule)


def test_a_loss_beside_a_training_step(bench: Bench) -> None:
    class Stepping(bench.mh.Module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch)

    trainer, model = bench.mh.Trainer(1, loss=lambda output, target: output), bench.with_net(Stepping())
    with pytest.raises(BadSettings, match="loss= and training_step of Stepping, which computes its loss itself"):
        trainer.fit(model, bench.data())


# Data


def fit(bench: Bench, X: Any, y: Any) -> Any:
    trainer = bench.mh.Trainer(1, batch_size=16, quiet=True, precision="fp32", **bench.on(1))
    return trainer.fit(bench.recipes.model("mlp", 0), (X, y))


def test_data_with_nan_are_named(bench: Bench) -> None:
    X, y = bench.images(32)
    X.reshape(32, 28, 28)[17, 3, 4] = np.nan
    X.reshape(32, 28, 28)[21, 0, :2] = np.inf
    said = r"X has 3 numbers that are NaN or infinite, in 2 of 32 samples \(the first is sample 17\)"
    with pytest.raises(LossIsNotANumber, match=said):
        fit(bench, X, y)


def test_a_list_of_labels(bench: Bench) -> None:
    X, y = bench.images(32)
    as_list, as_array = (fit(bench, X, labels).rows[-1]["train_loss"] for labels in (y.tolist(), y))
    assert as_list == as_array
    for text in (list("abcdefgh") * 4, np.array(list("abcdefgh") * 4)):
        with pytest.raises(BadBatch, match=r"np\.unique\(y, return_inverse=True\)"):
            fit(bench, X, text)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_the_run_says_what_auto_was(bench: Bench, precision: str) -> None:
    """In PyTorch and JAX, where the trainer chooses; elsewhere it is always the model's own."""
    run = bench.fit(epochs=1, precision=precision).run
    config = json.loads((Path(run) / "config.json").read_text())
    if precision == "auto" and bench.framework in ("torch", "jax"):
        assert config["chosen"]["precision"]
        assert config["chosen"]["why"]
    else:
        assert "chosen" not in config


# What people type: devices as a text or a number, losses as classes


def names(bench: Bench, devices: Any) -> list[str]:
    return bench.mh.Trainer(1, devices=devices).device_names


def test_devices_as_a_text_or_a_number(bench: Bench) -> None:
    made = [f"virtual:{number}" for number in range(MOST)]
    assert names(bench, "cpu:2") == names(bench, 2) == names(bench, "2") == made[:2]
    assert names(bench, made[:2]) == names(bench, ",".join(made[:2])) == made[:2], "as they are printed"
    assert names(bench, "cpu") == names(bench, "cpu:1") == names(bench, ["cpu"]) == names(bench, ["CPU:0"]) == ["cpu"]
    assert bench.mh.Trainer(1, num_gpus=0).device_names == ["cpu"]
    # Virtual devices stand in for GPUs; PyTorch has none here, as most machines without a GPU.
    assert names(bench, "gpu") == names(bench, "all") == (["cpu"] if bench.framework == "torch" else made)
    for wrong in ("tpu", 0):
        with pytest.raises(BadDevice, match="devices="):
            names(bench, wrong)
    with pytest.raises(NoSuchDevice, match="devices='gpu:99': there is no gpu:99 here"):
        names(bench, "gpu:99")


@pytest.mark.neutral
def test_the_same_text_is_the_same_job(bench: Bench) -> None:
    """``devices="cpu:2"`` trains, and its run is the one of ``--devices cpu:2``."""
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "precision": "fp32", "quiet": True}
    trainer = bench.mh.Trainer(1, devices="cpu:2", **options)
    result = trainer.fit(bench.recipes.model("mlp", 0), bench.data())
    assert result.devices == ["virtual:0", "virtual:1"]
    again = bench.fit(2, epochs=1, optimizer="adamw", lr=0.01)
    # Sums over devices may be in another order.
    assert result.rows[-1]["train_loss"] == pytest.approx(again.rows[-1]["train_loss"], rel=1e-5)


def test_losses_by_name_and_as_classes(bench: Bench) -> None:
    """ "mse" is the same number in every framework, also where its own class is another one."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (32, 28, 28)).astype(np.uint8)
    y = random.normal(size=(32, 10)).astype(np.float32)
    model = bench.recipes.model("mlp", 0)
    errors = bench.scores(model, images) - y
    X = bench.in_layout(images.astype(np.float32) / 255)
    meant = [("mse", (errors**2).mean()), ("mae", np.abs(errors).mean()), ("L1", np.abs(errors).mean())]
    meant += [(loss, times * (errors**2).mean()) for loss, times in bench.own.squares]
    for loss, value in meant:
        trainer = bench.mh.Trainer(1, batch_size=16, lr=0.0, loss=loss, quiet=True, precision="fp32", devices="cpu")
        assert trainer.fit(bench.recipes.model("mlp", 0), (X, y)).rows[-1]["train_loss"] == pytest.approx(value, 1e-4)
