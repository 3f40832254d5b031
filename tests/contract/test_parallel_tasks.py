"""Explicit tasks and what they touch: a declared write is ordered, an undeclared one to an argument is an error."""

from __future__ import annotations

import functools
import time
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from manyhands.errors import UndeclaredWrite

TIMES = 5
total: Any = None  # what some tasks reach as a global


class Slow:
    """A number in something that can be written to, read and written with a pause in between."""

    def __init__(self, make: Callable[[], Any], read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self.make, self.read, self.write = make, read, write

    def increment(self, held: Any) -> None:
        before = self.read(held)
        time.sleep(0.002)
        self.write(held, before + 1)


def _first(held: Any) -> float:
    return float(getattr(held, "detach", lambda: held)()[0])


def _set_first(held: Any, value: Any) -> None:
    held[0] = value


def stores(name: str) -> dict[str, Slow]:
    """What can hold a number, in Python and in this framework."""
    result = {
        "list": Slow(lambda: [0], _first, _set_first),
        "dict": Slow(lambda: {"n": 0}, lambda held: held["n"], lambda held, n: held.update(n=n)),
        "deque": Slow(lambda: deque([0]), lambda held: held[0], lambda held, n: (held.pop(), held.append(n))[1]),
        "set": Slow(lambda: {0}, max, lambda held, n: held.add(n)),
        "user dict": Slow(lambda: UserDict(n=0), lambda held: held["n"], lambda held, n: held.update(n=n)),
        "dataclass": Slow(lambda: Counted(0), lambda held: held.x, lambda held, n: setattr(held, "x", n)),
        "bytearray": Slow(lambda: bytearray(1), lambda held: held[0], _set_first),
        "numpy": Slow(lambda: np.zeros(3), _first, _set_first),
        "numpy view": Slow(lambda: np.zeros(6)[1::2], _first, _set_first),
    }
    return result | FRAMEWORKS[name]()


def torch_stores() -> dict[str, Slow]:
    import torch

    def copy(held: Any, value: Any) -> None:
        with torch.no_grad():
            held.fill_(value)

    def layer() -> Any:
        made = torch.nn.Linear(1, 1)
        copy(made.bias, 0.0)
        return made

    return {
        "tensor": Slow(lambda: torch.zeros(2), _first, copy),
        "parameter": Slow(lambda: torch.nn.Parameter(torch.zeros(2)), _first, copy),
        ".data": Slow(lambda: torch.zeros(2), _first, lambda held, n: copy(held.data, n)),
        "detach()": Slow(lambda: torch.zeros(2, requires_grad=True), _first, lambda held, n: copy(held.detach(), n)),
        "numpy()": Slow(lambda: torch.zeros(2), _first, lambda held, n: held.numpy().fill(n)),
        "large, .data": Slow(lambda: torch.zeros(1 << 18), _first, lambda held, n: copy(held.data, n)),
        "module": Slow(layer, lambda held: held.bias.item(), lambda held, n: copy(held.bias, n)),
    }


def tensorflow_stores() -> dict[str, Slow]:
    import keras
    import tensorflow as tf

    def layer() -> Any:
        made = keras.layers.Dense(1)
        made.build((None, 1))
        return made

    return {
        "variable": Slow(lambda: tf.Variable(0.0), float, lambda held, n: held.assign(n)),
        "assign_add": Slow(lambda: tf.Variable(0.0), float, lambda held, n: held.assign_add(n - float(held))),
        "scattered": Slow(
            lambda: tf.Variable([0.0, 0.0]), _first, lambda held, n: held.scatter_nd_update([[0]], [float(n)])
        ),
        "half": Slow(lambda: tf.Variable(0, dtype=tf.bfloat16), float, lambda held, n: held.assign(n)),
        "layer": Slow(layer, lambda held: float(held.bias[0]), lambda held, n: held.bias.assign([n])),
    }


def mxnet_stores() -> dict[str, Slow]:
    import mxnet as mx

    def layer() -> Any:
        made = mx.gluon.nn.Dense(1, in_units=1)
        made.initialize()
        return made

    def asscalar(held: Any) -> float:
        return float(held.asnumpy()[0])

    return {
        "array": Slow(lambda: mx.nd.zeros((2,)), asscalar, lambda held, n: held.__setitem__(slice(None), n)),
        "view": Slow(lambda: mx.nd.zeros((4,))[1:3], asscalar, lambda held, n: held.__setitem__(slice(0, 1), n)),
        "large": Slow(lambda: mx.nd.zeros((1 << 19,)), asscalar, lambda held, n: held.__setitem__(slice(0, 1), n)),
        "block": Slow(
            layer, lambda held: asscalar(held.bias.data()), lambda held, n: held.bias.data().__setitem__(slice(None), n)
        ),
    }


def jax_stores() -> dict[str, Slow]:
    import jax.numpy as jnp
    from flax import nnx

    def layer() -> Any:
        return nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def assign(held: Any, value: Any) -> None:
        held.bias.set_value(jnp.full(1, value))

    return {
        "array in a list": Slow(lambda: [jnp.zeros(())], lambda held: held[0], _set_first),
        "layer": Slow(layer, lambda held: float(held.bias.get_value()[0]), assign),
    }


FRAMEWORKS = {"torch": torch_stores, "tensorflow": tensorflow_stores, "mxnet": mxnet_stores, "jax": jax_stores}


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x

    def work(self, increment: Callable[[Any], None]) -> None:
        increment(self.x)


@dataclass
class Counted:
    x: Any


@dataclass(frozen=True)
class Batch:
    x: Any
    names: list[str] = field(default_factory=list)


def through_global(increment: Callable[[Any], None]) -> None:
    increment(total)


Way = Callable[[Any, Callable[[Any], None]], tuple[Callable[..., Any], tuple[Any, ...]]]

# How a task is given what it writes: the function and its arguments, of what is written and what writes it.
ARGUMENTS: dict[str, Way] = {
    "argument": lambda x, do: (do, (x,)),
    "in lists": lambda x, do: (lambda held: do(held[0][0]), ([(x,)],)),
    "in a dict": lambda x, do: (lambda held: do(held["x"]), (defaultdict(int, x=x),)),
    "in a user dict": lambda x, do: (lambda held: do(held["x"]), (UserDict(x=x),)),
    "in a deque": lambda x, do: (lambda held: do(held[0]), (deque([x]),)),
    "in a chain": lambda x, do: (lambda held: do(held["x"]), (ChainMap({}, {"x": x}),)),
    "dataclass": lambda x, do: (lambda held: do(held.x), (Batch(x),)),
    "partial": lambda x, do: (functools.partial(do, x), ()),
    "an argument's partial": lambda x, do: (lambda call: call(), (functools.partial(do, x),)),
}
# How it may take that from elsewhere, which is its author's to declare.
ELSEWHERE: dict[str, Way] = {
    "object": lambda x, do: (lambda held: do(held.x), (Holder(x),)),
    "its method": lambda x, do: (Holder(x).work, (do,)),
    "closure": lambda x, do: (lambda: do(x), ()),
    "default": lambda x, do: (lambda held=x: do(held), ()),
    "global": lambda x, do: (through_global, (do,)),
}
WAYS = ARGUMENTS | ELSEWHERE


def outcome(mh: Any, store: Slow, way: str, declared: bool) -> float | str:
    """The number after some increments as tasks, or what is said if one of them is refused."""
    global total
    held = total = store.make()
    function, arguments = WAYS[way](held, store.increment)
    try:
        with mh.parallel(threads=3):
            for _ in range(TIMES):
                mh.task(function, writes=(held,) if declared else ())(*arguments)
    except UndeclaredWrite as error:
        return str(error)
    return float(store.read(held))


def test_an_undeclared_write_is_an_error_whatever_is_written(mh: Any, native: Any) -> None:
    for name, store in stores(native.framework).items():
        said = str(outcome(mh, store, "argument", declared=False))
        assert "writes=(x,)" in said, name
        assert " a ND" not in said, name
        assert " a nd" not in said, name
        assert outcome(mh, store, "argument", declared=True) == TIMES, name


@pytest.mark.parametrize("way", ARGUMENTS)
def test_an_undeclared_write_is_an_error_whatever_holds_it(mh: Any, native: Any, way: str) -> None:
    result = stores(native.framework)
    for name in ("list", "numpy", [*result][-1]):
        assert "writes=(x,)" in str(outcome(mh, result[name], way, declared=False)), name
        assert outcome(mh, result[name], way, declared=True) == TIMES, name


@pytest.mark.parametrize("way", ELSEWHERE)
def test_what_is_taken_from_elsewhere_can_be_declared(mh: Any, native: Any, way: str) -> None:
    for name, store in stores(native.framework).items():
        assert outcome(mh, store, way, declared=True) == TIMES, name


def test_reading_is_no_writing(mh: Any, native: Any) -> None:
    """Whatever it is, and however it is reached: tasks that only read run side by side, and none fails."""
    global total
    for store in stores(native.framework).values():
        for way in WAYS:
            held = total = store.make()
            function, arguments = WAYS[way](held, lambda one, read=store.read: read(one))
            with mh.parallel(threads=2):
                for _ in range(2):
                    mh.task(function)(*arguments)


# Steps of a random program: what is touched and how it is reached, whether it is written to, and a pause before that.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.sampled_from([*ARGUMENTS]),
        st.booleans(),
        st.sampled_from([0.0, 0.001]),
    ),
    min_size=1,
    max_size=10,
)


def do_step(store: Slow, number: int, writes: bool, pause: float, results: list[float], held: Any) -> None:
    before = store.read(held)
    time.sleep(pause)
    if writes:
        store.write(held, before + number)
    results.append(float(before))


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_programs_are_those_of_plain_calls_or_refused(mh: Any, native: Any, data: Any) -> None:
    """Three places, written to in turns; at times one write is not declared, which is never silent."""
    kinds = stores(native.framework)
    names = data.draw(st.lists(st.sampled_from([name for name in kinds if name != "set"]), min_size=3, max_size=3))
    steps, threads = data.draw(STEPS), data.draw(st.integers(1, 3))
    written = [number for number, step in enumerate(steps) if step[2]]
    forgotten = data.draw(st.sampled_from([None, None, *written]))

    def run(give: Callable[..., Any]) -> list[float]:
        places = [kinds[name].make() for name in names]
        kept: list[list[float]] = [[] for _ in steps]
        for number, (place, way, writes, pause) in enumerate(steps):
            store, held = kinds[names[place % 3]], places[place % 3]
            do = functools.partial(do_step, store, number + 1, writes, pause, kept[number])
            function, arguments = WAYS[way](held, do)
            declared = (kept[number],) if not writes or number == forgotten else (kept[number], held)
            give(function, declared, arguments)
        mh.waitall()
        last = [[float(kinds[name].read(place))] for name, place in zip(names, places, strict=True)]
        return [result for results in (*kept, *last) for result in results]

    expected = run(lambda function, _, arguments: function(*arguments))
    try:
        with mh.parallel(threads=threads):
            result = run(lambda function, declared, arguments: mh.task(function, writes=declared)(*arguments))
    except UndeclaredWrite:
        assert forgotten is not None
    else:
        assert result == expected
        assert forgotten is None


class Point(NamedTuple):
    x: Any
    y: Any


class Native(dict[str, Any]):
    name = "own"


def test_what_holds_futures_arrives_as_what_it_was(mh: Any, native: Any) -> None:
    kept = Native(a=1)
    kept.name = "changed"
    with mh.parallel(threads=2):
        one = mh.task(int)(1)
        kept["a"] = one
        for value, expected in (
            (OrderedDict(b=one, a=2), OrderedDict(b=1, a=2)),
            (defaultdict(list, a=one), defaultdict(list, a=1)),
            (Point(one, 2), Point(1, 2)),
            (deque([one, 2], maxlen=5), deque([1, 2], maxlen=5)),
            (UserDict(a=one), UserDict(a=1)),
            (ChainMap({"a": one}, {"b": 2}), ChainMap({"a": 1}, {"b": 2})),
            ({one}, {1}),
            (Batch(one), Batch(1)),
            ([(one,)], [(1,)]),
        ):
            arrived = mh.task(lambda held: held)(value).result()
            assert type(arrived) is type(expected)
            assert arrived == expected
        assert mh.task(lambda held: held)(defaultdict(list, a=one)).result()["new"] == []
        arrived = mh.task(lambda held: (type(held), dict(held), held.name))(kept).result()
        assert arrived == (Native, {"a": 1}, "changed")
        assert mh.task(lambda call: call())(functools.partial(pow, one, 3)).result() == 1
        assert mh.task(functools.partial(pow, one))(3).result() == 1
