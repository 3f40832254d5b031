"""``parallel`` in JAX: jaxprs as graphs, what ``jax.jit`` may not be used for, Flax's objects, tracers."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np

from manyhands import jax as mh
from manyhands.backends.jax import planning
from manyhands.backends.runtime import Traced, call_of
from manyhands.errors import UndeclaredWrite

NUMBERS, DICE = itertools.count(), random.Random(1)


def traced(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Traced, Any]:
    call = call_of(planning, function, arguments, keywords)
    assert call is not None
    return planning.trace(call), call


def test_calls_inside_are_looked_into_and_needs_are_kept() -> None:
    def function(x: Any, y: Any) -> Any:
        return jax.nn.relu(x @ x) + jax.jit(jnp.sin)(y)

    found, call = traced(function, jnp.ones((3, 3)), jnp.ones((3, 3)))
    names = [task.name for task in found.tasks]
    assert {"dot_general", "max", "sin", "add"} <= set(names)
    assert not {"jit", "pjit", "custom_jvp_call"} & set(names)
    by_name = {task.name: task for task in found.tasks}
    assert by_name["max"].reads & by_name["dot_general"].writes
    assert by_name["add"].reads >= by_name["sin"].writes
    assert not by_name["sin"].reads & by_name["max"].writes
    assert by_name["dot_general"].seconds > 0
    assert found.run is not None
    np.testing.assert_allclose(found.run(call.tensors), function(*call.tensors), rtol=1e-6)


def test_the_compiled_form_keeps_arguments_values_and_order() -> None:
    state = {"z": jnp.ones(3), "a": jnp.zeros(3)}

    def function(state: dict[str, Any], x: Any, n: int) -> Any:
        return {"x": x, "n": n, "none": None, "new": {key: value + n for key, value in state.items()}, "half": 0.5}

    found, call = traced(function, state, x := jnp.arange(2), 3)
    assert found.run is not None
    result = found.run(call.tensors)
    assert list(result) == ["x", "n", "none", "new", "half"]
    assert list(result["new"]) == ["z", "a"]
    assert result["x"] is x
    assert result["n"] == 3
    assert type(result["n"]) is int
    assert type(result["half"]) is float
    assert result["new"]["a"].tolist() == [3, 3, 3]


def test_a_function_over_several_devices_is_not_compiled() -> None:
    if mh.num_gpus() < 2:
        pytest.skip("needs two devices: MANYHANDS_VIRTUAL_DEVICES=3")

    def function(x: Any, y: Any) -> Any:
        return jax.device_put(x @ x, mh.gpu(1)) + y @ y

    x, y = mh.to(jnp.ones((3, 3)), mh.gpu(0)), mh.to(jnp.ones((3, 3)), mh.gpu(1))
    fast = mh.parallel(function)
    for _ in range(2):
        assert mh.device_of(fast(x, y)) == mh.gpu(1)
    assert "computes on one device" in fast.explain()
    found, _ = traced(function, x, y)
    assert [(task.name, task.device, task.kind) for task in found.tasks] == [
        ("dot_general", "virtual:0", "compute"),
        ("device_put", "virtual:1", "copy"),
        ("dot_general", "virtual:1", "compute"),
        ("add", "virtual:1", "compute"),
    ]
    fast = mh.parallel(lambda x: jax.device_put(x, mh.gpu(1)))  # jax.jit would leave it where it is
    for _ in range(2):
        assert mh.device_of(fast(x)) == mh.gpu(1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x if x.sum() > 0 else -x, "TracerBoolConversionError"),
        (lambda x: jnp.asarray(np.asarray(x) + 1), "TracerArrayConversionError"),
        (lambda x: x[x > 0], "NonConcreteBooleanIndexError"),
        (lambda x: jax.debug.callback(lambda: None) or x + 1, "calls back to the host"),
        (lambda x: print("seen") or x, "prints"),
        (lambda x: x + float(np.random.rand()), "random numbers"),
        (lambda x: x + next(NUMBERS), "an iterator"),
        (lambda x: x + DICE.random(), "random numbers"),  # its state is in C, where nobody looks
        (lambda x: np.zeros(2), "a result is a ndarray"),
    ],
)
def test_the_reason_is_told_and_plain_execution_used(function: Callable[..., Any], reason: str) -> None:
    fast = mh.parallel(function)
    for _ in range(2):
        fast(jnp.ones(3))
    told = fast.explain()
    assert "plain execution" in told.splitlines()[0]
    assert reason in told


def test_printing_is_not_swallowed(capsys: pytest.CaptureFixture[str]) -> None:
    fast = mh.parallel(lambda x: print("seen") or x)
    for _ in range(4):
        fast(jnp.ones(3))
    assert capsys.readouterr().out.split() == ["seen"] * 4


def test_numpy_arrays_are_not_frozen() -> None:
    table = np.ones(3)
    fast = mh.parallel(lambda x, given: x + given)
    for number in range(3):
        table[:] = number
        assert fast(jnp.zeros(3), table).tolist() == [number] * 3
    assert "make it a tensor" in fast.explain()
    closed = mh.parallel(lambda x: x + table)
    for number in range(3):
        table[:] = number
        for _ in range(2):
            assert closed(jnp.zeros(3)).tolist() == [number] * 3


def test_flax_modules_are_watched() -> None:
    nnx = pytest.importorskip("flax.nnx")
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    fast, x = mh.parallel(net), jnp.ones((4, 3))
    closed = mh.parallel(lambda x: net(x) * 2)
    given = mh.parallel(lambda net, x: net(x) * 3)
    for _ in range(3):
        assert np.allclose(fast(x), net(x))
        assert np.allclose(closed(x), net(x) * 2)
        assert np.allclose(given(net, x), net(x) * 3)
        net.kernel[...] = net.kernel[...] * 2
    moving = mh.parallel(lambda x: norm(x, use_running_average=False))
    for _ in range(4):  # its statistics change at every call: jax.jit would lose that
        moving(jnp.ones((4, 3)))
    assert np.allclose(norm.mean[...], 1 - 0.99**4, atol=1e-5)
    assert "which is outside it" in moving.explain()


def test_under_jit_grad_and_vmap_it_is_the_function() -> None:
    fast = mh.parallel(lambda x: (x**2).sum())
    x = jnp.arange(3.0)
    assert jax.grad(fast)(x).tolist() == [0, 2, 4]
    assert jax.jit(fast)(x) == 5
    assert jax.vmap(fast)(jnp.ones((2, 3))).tolist() == [3, 3]


def test_random_keys_and_odd_types() -> None:
    fast = mh.parallel(lambda key, x: (jax.random.split(key)[0], jax.random.normal(key, (3,), x.dtype) * x))
    for seed in (0, 0, 1):
        key, x = jax.random.key(seed), jnp.ones(3, jnp.bfloat16)
        one, other = fast(key, x), fast.function(key, x)
        assert jnp.array_equal(jax.random.key_data(one[0]), jax.random.key_data(other[0]))
        assert one[1].dtype == jnp.bfloat16
        assert jnp.allclose(one[1], other[1], rtol=1e-2)  # two bits of bfloat16: fused code rounds less often


@jax.tree_util.register_pytree_node_class
class Pair:
    """Its structure cannot be compared: a NumPy array is part of it."""

    def __init__(self, value: Any, names: Any) -> None:
        self.value, self.names = value, names

    def tree_flatten(self) -> Any:
        return (self.value,), self.names

    @classmethod
    def tree_unflatten(cls, names: Any, values: Any) -> Any:
        return cls(values[0], names)


def test_arguments_that_cannot_be_known_again_are_no_error() -> None:
    fast = mh.parallel(lambda pair: pair.value * len(pair.names))
    for count in (2, 2, 3):
        assert fast(Pair(jnp.ones(1), np.arange(count))).tolist() == [count]
    assert "arguments cannot be compared" in fast.explain()


def test_a_weak_type_is_another_signature() -> None:
    fast = mh.parallel(lambda x: x + jnp.ones((), jnp.bfloat16))
    for value in (jnp.asarray(2.0), jnp.asarray(2.0, jnp.float32)):
        for _ in range(2):
            assert fast(value).dtype == fast.function(value).dtype


def test_tasks_do_as_the_thread_that_gave_them() -> None:
    device = mh.gpu(1) if mh.num_gpus() > 1 else mh.cpu()
    here = threading.get_ident()
    with jax.default_device(device), jax.enable_x64(True), mh.parallel(threads=2):
        made, where = mh.task(lambda: (jnp.ones(3), threading.get_ident()))().result()
    assert where != here
    assert made.dtype == jnp.float64
    assert made.devices() == {device}


def test_planning_stops_where_outside_is_another_at_every_call() -> None:
    box = [jnp.zeros(2)]
    fast = mh.parallel(lambda x: x + box[0])
    for number in range(12):
        box[0] = jnp.full(2, float(number))
        assert fast(jnp.zeros(2)).tolist() == [number, number]
    assert "changes on every call" in fast.explain()


def test_arguments_are_not_kept_alive() -> None:
    fast = mh.parallel(lambda x: x * 2.0 + 1.0)
    x = jnp.ones(3)
    gone = weakref.ref(x)
    fast(x)
    del x
    gc.collect()
    assert gone() is None


class Model:
    def __init__(self) -> None:
        self.weight = jnp.ones(3)

    @mh.parallel
    def scaled(self, x: Any) -> Any:
        return x * self.weight


def test_methods_and_objects_as_arguments() -> None:
    one, other, x = Model(), Model(), jnp.arange(3.0)
    other.weight = other.weight * 5
    found, call = traced(Model.scaled.function, one, x)
    assert found.run is not None
    assert found.run(call.tensors).tolist() == [0, 1, 2]
    for _ in range(2):
        assert one.scaled(x).tolist() == [0, 1, 2]
        assert other.scaled(x).tolist() == [0, 5, 10]
    one.weight = jnp.full(3, 2.0)
    assert one.scaled(x).tolist() == [0, 2, 4]


def test_arguments_that_are_never_the_same_are_not_planned_for_ever() -> None:
    fast = mh.parallel(lambda x, number: x + number if x[0] >= 0 else x)  # cannot be traced: quick to plan
    for number in range(70):
        assert fast(jnp.zeros(1), number).tolist() == [number]
    assert "arguments change on every call" in fast.explain()


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
            slopes = [mh.task(lambda net=net: slope(net, x))() for _ in range(3)]
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


def test_batches_of_numpy_are_tensors() -> None:
    fast, batch = mh.parallel(lambda x, y: jnp.sum(x * y)), np.ones(3, np.float32)
    for number in range(3):
        batch[:] = number
        assert fast(jnp.ones(3), batch).item() == 3 * number
    assert "run as jax.jit" in fast.explain()
    if mh.num_gpus() > 1:
        there = mh.to(jnp.ones(3), mh.gpu(1))
        for _ in range(2):
            assert mh.device_of(fast(there, batch)) == mh.gpu(1)
        assert "run as jax.jit" in fast.explain()


def test_numpy_arrays_that_a_compiled_function_would_treat_otherwise() -> None:
    def function(x: Any, counts: Any) -> Any:
        counts += 1
        return x + 1

    fast, counts = mh.parallel(function), np.zeros(2, np.float32)
    for _ in range(3):
        fast(jnp.ones(3), counts)
    assert counts.tolist() == [3, 3]
    assert "changes a NumPy array" in fast.explain()
    for dtype in (np.float64, object):
        fast = mh.parallel(lambda x, numbers: x + numbers[0])
        for _ in range(2):
            fast(jnp.ones(3), np.zeros(2, dtype))
        assert f"ndarray of {np.dtype(dtype)}" in fast.explain()


def test_states_of_flax_go_in_and_come_out() -> None:
    nnx = pytest.importorskip("flax.nnx")
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class State:
        weights: Any
        graph: Any
        apply: Any = struct.field(pytree_node=False)

    def step(state: State, x: Any) -> State:
        def loss(weights: Any) -> Any:
            return jnp.mean(state.apply(nnx.merge(state.graph, weights)(x)) ** 2)

        slope = jax.grad(loss)(state.weights)
        return state.replace(weights=jax.tree.map(lambda old, new: old - new, state.weights, slope))

    graph, weights = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    fast = mh.parallel(step)
    state = plain = State(weights, graph, jnp.tanh)
    for number in range(3):
        x = jnp.full((4, 3), float(number))
        state, plain = fast(state, x), step(plain, x)
    assert "run as jax.jit" in fast.explain()
    assert state.apply is jnp.tanh
    assert type(state.weights["kernel"]) is nnx.Param
    assert np.allclose(state.weights["kernel"][...], plain.weights["kernel"][...])

    def in_place(weights: Any) -> Any:
        weights["bias"][...] += 1
        return weights["bias"][...] * 2

    fast = mh.parallel(in_place)
    assert [float(fast(weights)[0]) for _ in range(4)] == [2, 4, 6, 8]


def test_functions_in_a_tree_come_back_as_they_were() -> None:
    fast = mh.parallel(lambda layers, x: ([*layers], layers[1](x @ layers[0])))
    for activation in (jax.nn.relu, jnp.tanh, jax.nn.relu):
        layers, result = fast([jnp.eye(3), activation], -jnp.ones(3))
        assert layers[1] is activation
        assert np.allclose(result, activation(-jnp.ones(3)))
        assert "run as jax.jit" in fast.explain()


def test_a_setting_of_random_numbers_is_another_signature() -> None:
    fast = mh.parallel(lambda x: x + jax.random.uniform(jax.random.key(0)))
    for kind in ("threefry2x32", "rbg", "threefry2x32"):
        with jax.default_prng_impl(kind):
            expected = 1 + jax.random.uniform(jax.random.key(0))
            assert [float(fast(jnp.ones(()))) for _ in range(2)] == [float(expected)] * 2


def test_a_donated_argument_is_no_trouble() -> None:
    fast, x = mh.parallel(jax.jit(lambda x: x + 1, donate_argnums=0)), jnp.zeros(3)
    for _ in range(3):
        x = fast(x)
    assert x.tolist() == [3, 3, 3]
    assert "donates an argument" in fast.explain()
