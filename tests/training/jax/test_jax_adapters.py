"""Training a part of a model, in micro-batches, with optax's schedules; and Linen modules as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax_cases import CLASSES, LinenNet, Net, difference, fit, numbers, same, vectors
from support import StopAt, Stopped, same_rate
from test_jax_exact import weighted

from manyhands import jax as mh
from manyhands.book.jax import BOOK
from manyhands.cli import parity
from manyhands.errors import BadSettings
from manyhands.training.checkpoints import store, tensors
from manyhands.training.jax.skeleton import Skeleton, by_name
from manyhands.training.options import Checkpoints, Step


class WithAdapter(nnx.Module):
    """A base whose first layer has a LoRA beside it."""

    def __init__(self) -> None:
        self.base = Net(norm=True)
        rngs = nnx.Rngs(4)
        self.base.first = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.base.first.lora.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(2), (2, 8))

    def __call__(self, X: Any) -> Any:
        return self.base(X)


def is_adapter(name: str) -> bool:
    return "lora_" in name


def test_an_adapter_is_trained_and_its_base_stays_as_it_is(tmp_path: Path) -> None:
    before = numbers(WithAdapter())
    how: dict[str, Any] = {"step": Step(wrt=nnx.LoRAParam), "optimizer": "adam", "lr": 0.05, "schedule": same_rate}
    how |= {"checkpoints": Checkpoints(every=2), "precision": "fp64"}
    alone, result = fit(WithAdapter(), vectors(), 1, run=tmp_path / "whole", **how)
    for name, value in alone.items():
        frozen = not is_adapter(name) and "norm.mean" not in name and "norm.var" not in name
        assert np.array_equal(value, before[name]) == frozen, name
    assert any("28 numbers trained" in note for note in result.notes)
    kept = tensors.unpack(store.load(tmp_path / "whole" / "checkpoints").blobs["optimizer"])
    assert all(is_adapter(name) for name in kept if kept[name].ndim)
    several, _ = fit(WithAdapter(), vectors(), 3, **{**how, "checkpoints": Checkpoints()})
    assert difference(several, alone) < 1e-9
    with pytest.raises(Stopped):
        fit(WithAdapter(), vectors(), 1, run=tmp_path / "run", **{**how, "schedule": StopAt(6)})
    resumed, _ = fit(WithAdapter(), vectors(), 1, run=tmp_path / "run", resume="auto", **how)
    assert same(resumed, alone)


def test_a_filter_by_path_and_one_that_picks_nothing() -> None:
    net = Net()
    trained = Skeleton(net, nnx.PathContains("last")).numbers(net)["parameters"]
    assert list(by_name(trained)) == ["last.bias", "last.kernel"]
    with pytest.raises(BadSettings, match=r"picks no variable of the model, which has Param: give a filter"):
        fit(Net(), vectors(), step=Step(wrt=nnx.LoRAParam))


def test_micro_batches_make_the_update_of_the_whole_batch() -> None:
    options: dict[str, Any] = {"precision": "fp64", "optimizer": optax.adam(0.05), "loss": weighted}
    data = vectors(32)  # a batch is 6, 6 and 4 samples
    whole, first = fit(Net(), data, 1, **options)
    parts, second = fit(Net(), data, 2, step=Step(accumulate=3, optimize="off"), **options)
    assert difference(parts, whole) < 1e-9
    for name in ("train_loss", "train_acc"):
        assert second.rows[-1][name] == pytest.approx(first.rows[-1][name], rel=1e-9)


def test_statistics_and_dropout_in_micro_batches_are_the_same_on_any_number_of_devices() -> None:
    options: dict[str, Any] = {"precision": "fp64", "step": Step(accumulate=2)}
    alone, _ = fit(Net(norm=True, dropout=0.2), vectors(32), 1, **options)
    three, _ = fit(Net(norm=True, dropout=0.2), vectors(32), 3, **options)
    assert difference(three, alone) < 1e-9


# Linen


class Named(linen.Module):
    @linen.compact
    def __call__(self, X: Any) -> Any:
        by_name = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "classes"))
        return linen.Dense(CLASSES, kernel_init=by_name)(X)


def test_linen_weights_with_names_of_axes_come_back_with_them() -> None:
    X, y = vectors()
    module, X = Named(), X.astype(np.float32)
    variables = module.init(jax.random.key(0), X[:1])
    trainer = mh.Trainer(1, batch_size=len(X), optimizer=optax.sgd(0.1), quiet=True)
    trainer.fit(module.bind(variables), (X, y))

    def loss(variables: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(module.apply(variables, X), y).mean()

    expected = jax.tree.map(lambda weight, slope: weight - 0.1 * slope, variables, jax.grad(loss)(variables))
    trained = dict(trainer.model.variables)
    assert jax.tree.structure(trained) == jax.tree.structure(expected)
    for ours, plain in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_linen_module_is_trained_as_it_is() -> None:
    """Its statistics and dropout are those of training, and what was learned is bound to it."""
    X, y = vectors(48)
    module = LinenNet()
    variables = jax.jit(module.init, static_argnames="train")(jax.random.key(1), jnp.asarray(X[:1]), train=False)
    trainer = mh.Trainer(2, lr=0.1, batch_size=16, quiet=True)
    trainer.fit(module.bind(variables), (X, y))
    learned = trainer.model.variables
    assert jax.tree.structure(learned) == jax.tree.structure(variables)
    assert np.abs(learned["batch_stats"]["BatchNorm_0"]["mean"]).max() > 1e-3
    assert not np.array_equal(learned["params"]["Dense_0"]["kernel"], variables["params"]["Dense_0"]["kernel"])
    output = trainer.model(jnp.asarray(X), train=False)
    np.testing.assert_array_equal(output, module.apply(learned, jnp.asarray(X), train=False))
    np.testing.assert_allclose(trainer.predict(trainer.model, X), output, rtol=1e-5, atol=1e-6)
    with pytest.raises(BadSettings, match="holds no weights"):
        trainer.predict(module, X)
    fresh = mh.Trainer(1, lr=0.1, quiet=True)
    fresh.fit(module, [(X[:16], y[:16]), (X[16:32], y[16:32]), (X[32:], y[32:])])
    assert jax.tree.structure(fresh.model.variables) == jax.tree.structure(variables)


class Sowing(linen.Module):
    """Adds two terms to its loss, as Flax's examples do."""

    @linen.compact
    def __call__(self, X: Any, train: bool = False) -> Any:
        hidden = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(X))
        self.sow("losses", "penalty", (hidden**2).mean())
        self.sow("losses", "penalty", 2 * jnp.abs(hidden).mean())
        return linen.Dense(CLASSES)(hidden)


def test_losses_that_a_linen_module_sows_are_added() -> None:
    X, y = vectors(48)
    X, module = X.astype(np.float32), Sowing()
    variables = jax.jit(module.init)(jax.random.key(0), X[:1])
    given = {"params": variables["params"], "batch_stats": variables["batch_stats"]}

    def loss(params: Any) -> Any:
        output, sown = module.apply({**given, "params": params}, X, train=True, mutable=["batch_stats", "losses"])
        return optax.softmax_cross_entropy_with_integer_labels(output, y).mean() + sum(jax.tree.leaves(sown["losses"]))

    value, slopes = jax.jit(jax.value_and_grad(loss))(given["params"])
    expected = jax.tree.map(lambda weight, slope: weight - 0.1 * slope, given["params"], slopes)
    trainer = mh.Trainer(1, devices=2, batch_size=48, optimizer=optax.sgd(0.1), quiet=True)
    result = trainer.fit(module.bind(variables), (X, y))
    assert result.rows[0]["train_loss"] == pytest.approx(float(value), rel=1e-5)
    for ours, plain in zip(jax.tree.leaves(trainer.model.variables["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)
    with pytest.raises(BadSettings, match=r"sow\('losses', \.\.\.\) and accumulate: .*Leave out accumulate, or"):
        mh.Trainer(1, lr=0.1, batch_size=16, quiet=True, step=Step(accumulate=2)).fit(module, (X, y))


def test_a_linen_module_gets_the_weights_of_a_run(tmp_path: Path) -> None:
    X, y = vectors(48)
    module = LinenNet()
    trainer = mh.Trainer(1, lr=0.1, batch_size=16, quiet=True, run=tmp_path / "run")
    assert not [note for note in trainer.fit(module, (X, y)).notes if "Python code" in note]
    other = module.bind(module.init(jax.random.key(9), jnp.asarray(X[:1]), train=False))
    loaded = mh.load_weights(other, tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(loaded.variables), dict(trainer.model.variables)))
    with pytest.raises(BadSettings, match=r"holds no weights: give .*module\.bind\(variables\)"):
        mh.load_weights(module, tmp_path / "run")


def test_parity_of_a_linen_module_with_dicts() -> None:
    (X, y), trainer = vectors(20), BOOK.trainer(1)
    trainer.prepare_data({"X": X.astype(np.float32), "label": y})
    ((_, _, apart),) = parity.compare(BOOK, Named, trainer.train_source, 2)
    assert apart <= parity.LIMIT
