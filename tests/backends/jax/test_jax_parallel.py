"""``parallel`` in JAX: ``jax.jit`` with its contract, Flax's objects, tracers; tasks over Flax modules."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import numpy as np

from manyhands import jax as mh
from manyhands.errors import UndeclaredWrite


def test_it_is_compiled_once_for_each_shape_and_plain_value() -> None:
    traces: list[Any] = []

    def scaled(x: Any, scale: float, *, names: tuple[str, ...] = ()) -> Any:
        traces.append((x.shape, scale, names))
        return x * scale

    fast = mh.parallel(scaled)
    for _ in range(2):
        for size, scale, names in ((2, 2.0, ()), (3, 2.0, ()), (3, -0.0, ()), (3, 0.0, ()), (3, 0.0, ("a",))):
            result = fast(jnp.ones(size), scale, names=names)
            assert np.array_equal(np.asarray(result), np.full(size, scale, np.float32))
            assert np.signbit(result[0]) == np.signbit(scale)
    assert len(traces) == 5
    nan = [fast(jnp.ones(1), float("nan")) for _ in range(3)]
    assert len(traces) == 6
    assert all(np.isnan(value[0]) for value in nan)
    assert fast(jnp.ones(2), 1).dtype == fast(jnp.ones(2), 1.0).dtype
    assert len(traces) == 8  # 1 and 1.0 are two values


def test_a_flax_module_among_the_arguments_is_read_at_every_call() -> None:
    nnx = pytest.importorskip("flax.nnx")
    net, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3))
    given = mh.parallel(lambda net, x: net(x) * 3)
    for _ in range(3):
        assert np.allclose(given(net, x), net(x) * 3)
        net.kernel[...] = net.kernel[...] * 2


def test_random_keys_and_odd_types() -> None:
    fast = mh.parallel(lambda key, x: (jax.random.split(key)[0], jax.random.normal(key, (3,), x.dtype) * x))
    for seed in (0, 0, 1):
        key, x = jax.random.key(seed), jnp.ones(3, jnp.bfloat16)
        one, other = fast(key, x), fast.function(key, x)
        assert jnp.array_equal(jax.random.key_data(one[0]), jax.random.key_data(other[0]))
        assert one[1].dtype == jnp.bfloat16
        assert jnp.allclose(one[1], other[1], rtol=1e-2)  # two bits of bfloat16: fused code rounds less often


def test_tasks_do_as_the_thread_that_gave_them() -> None:
    device = mh.gpu(1) if mh.num_gpus() > 1 else mh.cpu()
    here = threading.get_ident()
    with jax.default_device(device), jax.enable_x64(True), mh.parallel(threads=2):
        made, where = mh.task(lambda: (jnp.ones(3), threading.get_ident()))().result()
    assert where != here
    assert made.dtype == jnp.float64
    assert made.devices() == {device}


def flax_net(seed: int) -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            rngs = nnx.Rngs(seed)
            self.linear, self.dropout, self.calls = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), 0

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.linear(x))

    return Net()


def test_tasks_share_a_module_under_a_transform() -> None:
    """``nnx.jit`` takes the attributes out of a module and puts them back: no other task may look meanwhile."""
    nnx = pytest.importorskip("flax.nnx")
    call, slope = nnx.jit(lambda net, x: net(x)), nnx.grad(lambda net, x: net(x).sum())
    x = jnp.ones((2, 4))
    for seed in range(3):
        net = flax_net(seed)
        net.eval()
        with mh.parallel(threads=4):
            answers = [mh.task(call)(net, x) for _ in range(6)]
            slopes = [mh.task(lambda net: slope(net, x))(net) for _ in range(3)]
        for answer in answers:
            np.testing.assert_array_equal(answer.result(), call(net, x))
        assert all(jnp.allclose(one.result().linear.kernel[...], 2) for one in slopes)


def test_a_task_that_changes_a_module_has_to_declare_it() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def counts(net: Any) -> None:
        net.calls += 1

    def exchanges(net: Any) -> None:
        net.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(9))

    for change in (counts, exchanges):
        net = flax_net(0)
        with pytest.raises(UndeclaredWrite, match="Net"), mh.parallel(threads=2):
            mh.task(change)(net)
        with mh.parallel(threads=2):
            mh.task(change, writes=(net,))(net)


def test_functions_in_a_tree_come_back_as_they_were() -> None:
    fast = mh.parallel(lambda layers, x: ([*layers], layers[1](x @ layers[0])))
    for activation in (jax.nn.relu, jnp.tanh, jax.nn.relu):
        layers, result = fast([jnp.eye(3), activation], -jnp.ones(3))
        assert layers[1] is activation
        assert np.allclose(result, activation(-jnp.ones(3)))
