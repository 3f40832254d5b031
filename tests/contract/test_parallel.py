"""``parallel``, ``task`` and what they tell: the same in every framework, whoever finds the parallelism."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import run_command

from manyhands.cli import main
from manyhands.errors import EngineError

READ_ONCE = ("jax", "tensorflow")  # traced functions: what they read from Python besides their arguments is read once


@pytest.fixture
def reads_python(framework: str) -> None:
    if framework in READ_ONCE:
        pytest.skip("it is traced once: the contract of jax.jit and tf.function")


def square(native: Any, size: int = 3, start: float = 0.0) -> Any:
    return native.tensor([[start + (row * size + column) / 10 for column in range(size)] for row in range(size)])


def same(native: Any, one: Any, other: Any) -> None:
    """The same structure, and the same numbers."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert sorted(one) == sorted(other)
        assert list(one) == list(other) or native.framework in READ_ONCE  # their trees sort keys
        one, other = list(one.values()), [other[key] for key in one]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(native, left, right)
    elif native.backend.is_tensor(one):
        numbers, wanted = _flat(native.values(one)), _flat(native.values(other))
        assert numbers == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    else:
        assert one == other


def _flat(values: Any) -> list[float]:
    return [number for part in values for number in _flat(part)] if isinstance(values, list) else [values]


def functions(native: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    weights = [square(native, start=number) for number in range(3)]
    x, y = square(native), square(native, start=1.0)

    def branches(x: Any) -> Any:
        results = []
        for weight in weights:
            z = x
            for _ in range(3):
                z = native.product(z, weight) * 0.1
            results.append(z)
        return results[0] + results[1] - results[2]

    def chain(x: Any) -> Any:
        for _ in range(6):
            x = native.product(x, x) * 0.1 + 1.0
        return x

    def trees(batch: dict[str, Any], scale: float, *, names: tuple[str, ...] = ("a",)) -> dict[str, Any]:
        total = batch["x"] * scale + batch["rest"][0]
        return dict.fromkeys(names, total) | {"parts": [total * 2.0, (batch["x"] - 1.0,)]}

    return {
        "branches": (branches, (x,)),
        "chain": (chain, (x,)),
        "trees": (trees, ({"x": x, "rest": [y]}, 2.5)),
    }


@pytest.mark.parametrize("which", ["branches", "chain", "trees"])
def test_it_gives_what_the_plain_function_gives(mh: Any, native: Any, which: str) -> None:
    function, arguments = functions(native)[which]
    fast = mh.parallel(function, pure=True)
    assert {"parallel", "task"} <= set(mh.__all__)
    assert fast.__name__ == which
    for _ in range(3):
        same(native, fast(*arguments), function(*arguments))
    explanation = fast.explain()
    assert f"{which}: run as" in explanation
    if native.backend.CAPABILITIES.plans_lanes:
        assert "plain execution" in explanation
        assert " ms" in explanation


def test_values_that_are_no_tensors_come_back_as_they_were(mh: Any, native: Any) -> None:
    if native.framework == "tensorflow":
        pytest.skip("tf.function makes tensors of numbers and texts")
    fast = mh.parallel(lambda x, scale, *, names=("a",): (x * scale, scale, names, None, len))
    for scale in (2.0, 3.5, 2.0):
        found, expected = (made(square(native), scale, names=("b", "c")) for made in (fast, fast.function))
        same(native, found, expected)


def test_other_shapes_and_other_values_are_other_calls(mh: Any, native: Any) -> None:
    def scaled(x: Any, scale: float, deep: bool = False) -> Any:
        return native.product(x, x) * scale if deep else x * scale

    fast = mh.parallel(scaled)
    for size in (2, 3, 2):
        for scale in (2.0, 3.0):
            same(native, fast(square(native, size), scale), scaled(square(native, size), scale))
    same(native, fast(square(native), 2.0, deep=True), scaled(square(native), 2.0, deep=True))


def test_what_is_traced_once_reads_python_once(mh: Any, native: Any) -> None:
    """And once more for another shape, and for another plain value."""
    if native.framework not in READ_ONCE:
        pytest.skip("it reads Python at every call")
    box, traces = {"scale": 2.0}, []

    def scaled(x: Any, scale: float) -> Any:
        traces.append((tuple(x.shape), scale))
        return x * scale * box["scale"]

    fast = mh.parallel(scaled)
    for box["scale"] in (2.0, 3.0):
        for size, scale in ((2, 2.0), (3, 2.0), (3, 4.0)):
            same(native, fast(square(native, size), scale), square(native, size) * (2 * scale))
    same(native, fast(square(native, 4), 1.0), square(native, 4) * 3.0)
    assert traces == [((2, 2), 2.0), ((3, 3), 2.0), ((3, 3), 4.0), ((4, 4), 1.0)]


@pytest.mark.usefixtures("reads_python")
def test_what_it_takes_from_outside_may_change(mh: Any, native: Any) -> None:
    box = {"scale": 2.0, "weight": square(native)}

    def function(x: Any) -> Any:
        return native.product(x, box["weight"]) * box["scale"]

    fast, x = mh.parallel(function), square(native, start=1.0)
    for _ in range(2):
        same(native, fast(x), function(x))
    box["scale"] = 3.0
    same(native, fast(x), function(x))
    box["weight"] = square(native, start=5.0)
    for _ in range(2):
        same(native, fast(x), function(x))


@pytest.mark.usefixtures("reads_python")
def test_effects_on_python_happen_at_every_call(mh: Any, native: Any) -> None:
    seen: list[int] = []

    def noting(x: Any) -> Any:
        seen.append(len(seen))
        return x + float(len(seen))

    fast, x = mh.parallel(noting), square(native)
    for number in range(5):
        same(native, fast(x), x + float(number + 1))
    assert seen == list(range(5))


def test_an_error_is_the_functions_own(mh: Any, native: Any) -> None:
    def failing(x: Any, limit: int) -> Any:
        if limit > 1:
            raise ArithmeticError(f"{limit} is too much")
        return x * float(limit)

    fast, x = mh.parallel(failing), square(native)
    same(native, fast(x, 1), x * 1.0)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="3 is too much"):
            fast(x, 3)
    same(native, fast(x, 1), x * 1.0)


def test_the_result_is_where_plain_execution_puts_it(mh: Any, native: Any, two: list[Any]) -> None:
    def function(x: Any, y: Any) -> dict[str, Any]:
        return {"x": x * 2.0, "y": y * y}

    x, y = mh.to(square(native), two[0]), mh.to(square(native), two[1])
    several = [(x, y)] if native.framework != "jax" else []  # jax.jit takes arguments of one device
    for arguments in ((x, x), (y, y), *several):
        fast = mh.parallel(function)
        plain = function(*arguments)
        for _ in range(3):
            result = fast(*arguments)
            same(native, result, plain)
            assert [mh.device_of(value) for value in result.values()] == [
                mh.device_of(value) for value in plain.values()
            ]


def test_the_graph_and_the_timeline_can_be_looked_at(mh: Any, native: Any, tmp_path: Path) -> None:
    if not native.backend.CAPABILITIES.plans_lanes:
        pytest.skip("its own runtime schedules functions")
    function, arguments = functions(native)["branches"]
    fast = mh.parallel(function, pure=True)
    for ask in (fast.explain, lambda: fast.draw(tmp_path / "no.svg")):
        with pytest.raises(EngineError, match="call the function first"):
            ask()
    fast(*arguments)
    picture = fast.draw(tmp_path / "graph.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.rstrip().endswith("</svg>")
    assert picture.count("<g>") >= 3  # repeated blocks are drawn once
    trace = json.loads(fast.timeline(tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) >= 9
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert fast.timeline(tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_runtime_of_its_own_says_who_schedules(mh: Any, native: Any, tmp_path: Path) -> None:
    if native.backend.CAPABILITIES.plans_lanes:
        pytest.skip("manyhands schedules functions")
    fast = mh.parallel(lambda x: x * 2.0)
    fast(square(native))
    scheduler, profiler = {
        "jax": ("jax.jit; XLA", "jax.profiler"),
        "tensorflow": ("tf.function; TensorFlow", "tf.profiler"),
        "mxnet": ("written; MXNet's engine", "mx.profiler"),
    }[native.framework]
    assert f"run as {scheduler}" in fast.explain()
    picture, trace = tmp_path / "graph.svg", tmp_path / "trace.json"
    questions: list[Callable[[], Any]] = [
        lambda: fast.draw(picture),
        lambda: fast.timeline(trace),
        lambda: fast.timeline(trace, simulated=False),
        lambda: fast.forecast(2),
        lambda: fast.planned,
        fast.measure,
        fast.simulate,
    ]
    for question in questions:
        with pytest.raises(EngineError, match=f"own runtime schedules .*{profiler}"):
            question()
    assert not [*tmp_path.iterdir()]


def test_every_framework_has_the_same_interface(mh: Any, native: Any) -> None:
    methods = {"draw", "explain", "forecast", "function", "measure", "planned", "simulate", "timeline"}
    fast = mh.parallel(lambda x: x * 2.0)
    assert methods <= set(dir(fast))
    own = ["dynamic"] if native.backend.CAPABILITIES.plans_lanes else []  # PyTorch's
    options = ["function", "pure", *own, "reuse_outputs", "memory", "compile", "synchronous", "threads"]
    assert list(inspect.signature(mh.parallel).parameters) == options
    assert list(inspect.signature(fast.timeline).parameters) == ["path", "simulated"]
    assert list(inspect.signature(fast.forecast).parameters) == ["devices", "lanes", "bandwidth", "latency"]
    decorated = mh.parallel()(lambda x: x * 3.0)
    same(native, decorated(square(native)), square(native) * 3.0)
    assert pickle.loads(pickle.dumps(mh.parallel(len))).function is len


def test_options_that_a_framework_has_not_are_refused(mh: Any, native: Any) -> None:
    if native.backend.CAPABILITIES.plans_lanes:
        return
    for option in ({"reuse_outputs": True}, {"memory": 2.0}, {"compile": True}, {"synchronous": True}, {"threads": 2}):
        with pytest.raises(EngineError, match=next(iter(option))):
            mh.parallel(lambda x: x, **option)


def test_what_is_no_function_is_told_what_to_write(mh: Any) -> None:
    with pytest.raises(EngineError, match=r"takes a function, not an int: write parallel\(threads=3\)"):
        mh.parallel(3)
    with pytest.raises(EngineError, match=r"takes a function, not a list: write parallel\(fn\)\(x\), not"):
        mh.parallel([len])


@pytest.mark.parametrize("threads", ["2", 1.5, True])
def test_threads_are_a_whole_number(mh: Any, threads: Any) -> None:
    with pytest.raises(EngineError, match=r"parallel\(threads=.*\): .* a whole number of tasks that run at once"):
        mh.parallel(threads=threads)


@pytest.mark.parametrize("memory", ["a", None, True, float("nan"), 0.5])
def test_memory_is_a_number_from_one_on(mh: Any, memory: Any) -> None:
    with pytest.raises(EngineError, match="memory="):
        mh.parallel(len, memory=memory)


# Tasks given explicitly


def test_tasks_take_futures_and_tensors(mh: Any, native: Any) -> None:
    x = square(native)
    with mh.parallel(threads=2):
        first, second = mh.task(native.product)(x, x), mh.task(lambda t: t * 2.0)(x)
        both = mh.task(lambda parts: parts["a"] + parts["b"][0])({"a": first, "b": [second]})
        mh.waitall()
        assert both.done()
        same(native, both.result(), native.product(x, x) + x * 2.0)
    same(native, mh.task(native.product)(x, x).result(), native.product(x, x))  # without a scope: a plain call


# The command

SCRIPT = {
    "torch": "import torch\ndef inputs(): return torch.ones(3, 3)\n",
    "jax": "import jax.numpy as np\ndef inputs(): return np.ones((3, 3))\n",
    "tensorflow": "import tensorflow as tf\ndef inputs(): return tf.ones((3, 3))\n",
    "mxnet": "import mxnet as mx\ndef inputs(): return mx.nd.ones((3, 3))\n",
}


@pytest.mark.once
@pytest.mark.neutral
def test_the_command_explains_a_function_of_a_script(native: Any, framework: str, tmp_path: Path) -> None:
    script, picture = tmp_path / "script.py", tmp_path / "graph.svg"
    script.write_text(SCRIPT[framework] + "def twice(x): return x * 2 + 1\n")
    planned = native.backend.CAPABILITIES.plans_lanes
    draw = ("--draw", str(picture)) if planned else ()
    result = run_command("parallel", f"{script}:twice", "--framework", framework, *draw)
    assert result.returncode == 0, result.stderr
    assert "twice: run as" in result.stdout
    assert not planned or picture.read_text().startswith("<svg")


@pytest.mark.parametrize("option", [["--devices", "2"], ["--draw", "a.svg"], ["--timeline", "a.json"]], ids=str)
def test_the_command_shows_plans_only_where_manyhands_plans(
    native: Any, framework: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["parallel", "nowhere.py:function", "--framework", framework, *option])
    assert code == 1
    planned = native.backend.CAPABILITIES.plans_lanes
    assert ("there is no file" if planned else f"{option[0]}: {framework}'s own runtime") in capsys.readouterr().err
