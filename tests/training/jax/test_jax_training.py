"""What is JAX's own in training: NNX modules, Optax, precision, random streams, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax_cases import CLASSES, LinenNet, Net, devices, difference, fit, numbers, vectors
from test_jax_exact import Chunks

from manyhands import jax as mh
from manyhands.book import jax as datasets
from manyhands.errors import BadBatch, BadLabels, BadSettings, LossIsNotANumber
from manyhands.training.data import fashion_mnist
from manyhands.training.jax import step as sums
from manyhands.training.jax.world import World
from manyhands.training.options import Step
from manyhands.training.running_sums import Totals

# Models


class Line(mh.Module):
    def __init__(self, lr: float, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["rngs"])
        self.net = nnx.Linear(6, 1, rngs=rngs)

    def loss(self, y_hat: Any, y: Any) -> Any:
        return ((y_hat[:, 0] - y) ** 2).mean() / 2

    def configure_optimizers(self) -> Any:
        return optax.sgd(self.lr)


class Points(mh.DataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        X = np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32)
        self.X, self.y = jnp.asarray(X), jnp.asarray(X @ np.arange(6, dtype=np.float32) + 1)

    def get_dataloader(self, train: bool) -> Any:
        return self.get_tensorloader((self.X, self.y), train, slice(0, 64) if train else slice(64, None))


def test_the_books_module_and_data() -> None:
    model = Line(0.1, nnx.Rngs(0))
    assert model.hparams == model.hparams
    assert model.hparams["lr"] == 0.1
    hash(nnx.split(model)[0])
    trains = mh.Trainer(max_epochs=15, devices=devices(2), quiet=True)
    result = trains.fit(model, Points())
    assert result.rows[-1]["val_loss"] < 0.05
    assert np.allclose(model.net.kernel[...][:, 0], np.arange(6), atol=0.5)
    X, y = trains.prepare_batch(next(iter(Points().train_dataloader())))
    assert X.devices() == {mh.gpu(0)}
    assert trains.prepare_model(model).trainer is trains
    assert float(model.training_step((X, y))) == pytest.approx(float(model.validation_step([X, y])))


def test_the_callers_model_keeps_its_place_its_kind_and_its_modes() -> None:
    place = devices(3)[2]
    net = mh.to(Net(norm=True, dropout=0.5), place)
    net.eval()
    net.first.bias = nnx.Param(net.first.bias[...].astype(jnp.bfloat16))
    before = numbers(net)
    mh.Trainer(1, devices=devices(2), quiet=True, lr=0.1).fit(net, vectors(48))
    assert mh.device_of(net) == place
    assert net.first.bias.dtype == jnp.bfloat16
    assert (net.norm.use_running_average, net.dropout.deterministic) == (True, True)
    after = numbers(net)
    assert not np.array_equal(after["norm.mean"], before["norm.mean"])  # all of it was in evaluation: it was trained
    net.train()
    net.norm.use_running_average = True  # frozen by the caller
    mh.Trainer(1, devices=devices(2), quiet=True, lr=0.1).fit(net, vectors(48))
    assert np.array_equal(numbers(net)["norm.mean"], after["norm.mean"])


# Numbers


def test_layers_compute_in_bfloat16_and_keep_their_parameters() -> None:
    seen: list[Any] = []

    class Watched(Net):
        def __call__(self, X: Any) -> Any:
            output = super().__call__(X)
            seen.append(output.dtype)
            return output

    plain, _ = fit(Net(norm=True), vectors(48), 2, max_epochs=1)
    found, result = fit(Watched(norm=True), (vectors(48), vectors(48)), 2, max_epochs=1, precision="bf16")
    assert set(seen[1:]) == {jnp.dtype(jnp.bfloat16)}  # the first is a look at the shape of the answer
    assert {one.dtype for one in found.values()} == {np.dtype(np.float32)}
    assert 1e-6 < difference(found, plain) < 0.05
    assert any("bfloat16" in note for note in result.notes)


def test_long_sums_do_not_lose_small_numbers() -> None:
    total = jax.tree.map(jnp.asarray, sums.sums_of(Totals(loss_sum=2.0**24, correct=1, count=2, counted=True)))
    for _ in range(3):
        total = sums.add_batch(total, jnp.float32(0.25), jnp.int32(1), 1, 5)
    assert sums.totals_of(total, counted=True) == Totals(2.0**24 + 0.75, 4, 5, None, True)
    total = sums.add_batch(sums.add_batch(total, jnp.float32(jnp.nan), None, 1, 7), jnp.float32(jnp.inf), None, 1, 8)
    assert sums.totals_of(total, counted=True).bad_step == 7


def test_a_batch_that_is_no_number_can_be_left_out() -> None:
    X, y = vectors(48)
    X[17] = np.nan
    with pytest.warns(UserWarning, match=r"step \d is not a number .*continuing"):
        found, result = fit(Net(norm=True), (X, y), 2, step=Step(on_nan="continue"))
    assert all(np.isfinite(one).all() for one in found.values())
    assert result.rows[0]["train_loss"] is None
    with pytest.raises(LossIsNotANumber, match=r"step \d is not a number .*\b17\b"):
        fit(Net(), (X, y), 1, batch_size=8)


def test_steps_in_flight_are_few_where_threads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, most in (("8", 2), ("2", 1)):
        monkeypatch.setenv("NPROC", given)
        assert World(devices(2)).in_flight == most


def test_nothing_is_sent_without_being_said() -> None:
    """What goes to the devices in a step is sent on purpose: JAX's guard against hidden copies has nothing to say."""
    for optimize in ("auto", "off"):
        net, step = Net(norm=True), Step(optimize=optimize)
        with jax.transfer_guard_host_to_device("disallow"):
            fit(net, (vectors(48), vectors(41)), 2, schedule=lambda done: 1 - done, step=step)


def test_the_books_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = fashion_mnist.load(fashion_mnist.SUBSET_DIRECTORY)
    small = tuple(part.first(64) for part in datasets.BOOK.data(whole, 32))
    monkeypatch.setattr(datasets.BOOK, "load_data_fashion_mnist", lambda batch_size: small)
    result = mh.train(mh.lenet(), num_gpus=len(devices(2)), batch_size=32, lr=0.1, num_epochs=1)
    assert capsys.readouterr().out == f"{result}\n"
    assert str(result).endswith("sec/epoch on [virtual:0, virtual:1]")


# Linen modules and meshes


class AroundLinen(nnx.Module):
    def __init__(self) -> None:
        self.inner = linen_net(LinenNet(), train=False)

    def __call__(self, X: Any) -> Any:
        return self.inner(X)


def linen_net(module: Any, **options: Any) -> Any:
    return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(jnp.zeros((1, 6)), **options)


def test_a_linen_module_is_told_that_it_is_trained() -> None:
    """Its statistics change, dropout draws, and a test does neither; on any number of devices."""
    alone, first = fit(linen_net(LinenNet(), train=False), (vectors(48), vectors(41)), 1)
    assert np.abs(alone["BatchNorm_0.mean"]).max() > 1e-3
    three, second = fit(AroundLinen(), (vectors(48), vectors(41)), 3)
    found = {name.removeprefix("inner."): one for name, one in three.items()}
    assert difference(found, alone) < 1e-4  # in float32
    assert second.rows[-1]["val_loss"] == pytest.approx(first.rows[-1]["val_loss"], rel=1e-4)
    frozen, _ = fit(AroundLinen(), vectors(), 1, loss=lambda a, t: jax.lax.stop_gradient(a).sum(), max_epochs=1)
    assert not np.array_equal(frozen["inner.BatchNorm_0.mean"], np.zeros(8))


def test_linen_modules_that_cannot_be_trained() -> None:
    class Silent(linen.Module):
        @linen.compact
        def __call__(self, X: Any) -> Any:
            return linen.BatchNorm(use_running_average=True)(linen.Dense(CLASSES)(X))

    with pytest.raises(BadSettings, match="no parameters that could be trained: initialise it"):
        fit(nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)), vectors())
    with pytest.raises(BadSettings, match=r"Silent keeps batch_stats.*use_running_average=not train"):
        fit(linen_net(Silent()), vectors())


def test_a_mesh_that_the_caller_has_set() -> None:
    plain, _ = fit(Net(norm=True), vectors(48), 3, max_epochs=1)
    mesh = jax.make_mesh((2,), ("mine",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        net = Net(norm=True)
        before = net.first.kernel[...].sharding
        found, _ = fit(net, (vectors(48), vectors(9)), 3, max_epochs=1)
        assert net.first.kernel[...].sharding == before
        net(jnp.zeros((2, 6)))
    assert difference(found, plain) < 1e-6


# What is refused


def test_devices_of_several_kinds() -> None:
    with pytest.raises(BadSettings, match=r"several kinds \(cpu, gpu\)"):
        World([SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")])


@pytest.mark.parametrize("value", [None, 0.5, {"loss": 1.0}, mh.LossSum(np.ones(2), 2)])
def test_what_is_no_loss(value: Any) -> None:
    with pytest.raises(
        BadSettings,
        match=r"the loss returned (None: is a `return`|an? ).*(LossSum\(total, count\)|array of one number)",
    ):
        fit(Net(), vectors(), loss=lambda output, target: value)


def test_an_average_in_half_precision_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"EMA: .*float32 weights"):
        fit(nnx.Linear(6, CLASSES, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), vectors(), callbacks=[mh.EMA(0.9)])


def test_what_is_no_model() -> None:
    with pytest.raises(BadSettings, match="no parameters that could be trained"):
        fit(nnx.Sequential(nnx.relu), vectors())
    with pytest.raises(BadSettings, match=r"flax\.nnx\.Module"):
        fit(lambda X: X, vectors())


def test_data_that_the_model_does_not_take() -> None:
    X, y = vectors()
    with pytest.raises(BadBatch, match=r"a sample of the data has shape \(2,\), and Net does not take it"):
        fit(Net(), (X[:, :2], y))
    with pytest.raises(BadBatch, match=r"3 parts.* Net does not take 2 .*training_step\(batch\)"):
        fit(Net(), (X, y, np.ones(len(y))))
    with pytest.raises(BadSettings, match=r"answers with a tuple.*give the trainer loss="):
        fit(nnx.Sequential(Net(), lambda scores: (scores, scores)), vectors())


def test_random_numbers_belong_to_the_layers() -> None:
    class Asks(Net):
        def __call__(self, X: Any, rngs: Any) -> Any:
            return nnx.Dropout(0.5)(super().__call__(X), rngs=rngs)

    class MayBeGiven(Asks):
        def __call__(self, X: Any, rngs: Any = None) -> Any:
            return super().__call__(X, rngs)

    for model in (Asks(), MayBeGiven()):
        with pytest.raises(BadBatch, match=r"nnx\.Dropout\(rate, rngs=rngs\)"):
            fit(model, vectors())


def test_labels_of_a_loader_are_looked_at() -> None:
    chunks = Chunks()
    chunks.y[40] = CLASSES
    with pytest.raises(BadLabels, match=f"the model has {CLASSES} outputs"):
        fit(Net(), chunks)
    with pytest.raises(BadBatch, match="it has no samples"):
        fit(Net(), Chunks(0))
    X, y = vectors()
    with pytest.raises(BadLabels, match="float32, and class numbers are whole"):
        fit(Net(), (X, y.astype(np.float32)))
    with pytest.raises(BadLabels, match=r"give y\.reshape\(-1\)"):
        fit(Net(), [(X, y[:, None])], batch_size=64)
