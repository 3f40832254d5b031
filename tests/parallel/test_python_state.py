"""What a function takes from outside: found, named when it changes, and not looked for in other people's code."""

from __future__ import annotations

import functools
import itertools
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from manyhands.errors import CannotTrace
from manyhands.parallel.python_state import Outside

SCALE = 2.0


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, x: Any) -> Any:
        return x * self.value

    def method(self, x: Any) -> Any:
        return x * self.value


def outside(function: Callable[..., Any], *arguments: Any) -> Outside:
    return Outside(function, arguments, lambda _: None)


def uses_global(x: float) -> float:
    return x * SCALE


def test_globals_closures_defaults_and_attributes_are_watched() -> None:
    numbers, box, table, weight = [1.0, 2.0], Box(3.0), {"a": [1]}, 5.0

    def inner(x: float, *, held: list[float] = numbers) -> float:
        return x * held[0] + weight

    def function(x: float) -> float:
        return inner(x) + box.value + table["a"][0] + (lambda: uses_global(x))()

    watched = outside(function)
    assert watched.holds()
    changes: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("held", lambda: numbers.__setitem__(1, 9.0), lambda: numbers.__setitem__(1, 2.0)),
        ("length", lambda: numbers.append(1.0), lambda: numbers.pop()),
        ("box.value", lambda: setattr(box, "value", 4.0), lambda: setattr(box, "value", 3.0)),
        ("table.a", lambda: table["a"].__setitem__(0, 7), lambda: table["a"].__setitem__(0, 1)),
        ("SCALE", lambda: globals().update(SCALE=3.0), lambda: globals().update(SCALE=2.0)),
    ]
    for name, change, back in changes:
        change()
        assert name in str(watched.changed())
        assert not watched.holds(), name
        back()
        assert watched.holds(), name
    weight = 6.0
    assert watched.changed() == "weight"


@pytest.mark.parametrize("make", [lambda box: box, lambda box: box.method, lambda box: functools.partial(box.method)])
def test_objects_methods_and_partials(make: Callable[[Box], Any]) -> None:
    box = Box(1.0)
    watched = outside(make(box))
    assert watched.reaches(box)
    box.value = 2.0
    assert not watched.holds()


def test_equal_plain_values_are_the_same_and_others_are_not() -> None:
    box = Box(1000.5)
    watched = outside(box)
    box.value = float("1000.5")
    assert watched.holds()
    for other in (1000.25, True, None, "1000.5"):
        box.value = other
        assert not watched.holds()
    zero = Box(0.0)
    watched = outside(zero)
    zero.value = -0.0
    assert not watched.holds()


def test_arguments_that_are_objects_are_watched_and_cycles_end() -> None:
    box = Box([])
    box.value.append(box)
    watched = outside(lambda x: x, box)
    assert watched.holds()
    del box.value
    assert "value" in str(watched.changed())


def test_installed_code_is_not_looked_into() -> None:
    decoder = json.JSONDecoder()
    watched = outside(lambda text: decoder.decode(text))
    assert watched.reaches(decoder)
    assert not watched.reaches(json.decoder.scanner)
    assert len(watched._facts) < 20


def test_a_framework_says_what_its_objects_are() -> None:
    box = Box(1.0)
    watched = Outside(lambda x: box, (), lambda value: () if isinstance(value, Box) else None)
    box.value = 2.0
    assert watched.holds()
    assert watched.reaches(box)


def test_queues_sets_and_bytes_are_watched_and_iterators_refused() -> None:
    queue, words, buffer = deque([1]), {"a"}, bytearray(b"x")
    watched = outside(lambda: (queue, words, buffer))
    for change, back in (
        (lambda: queue.append(2), queue.pop),
        (lambda: words.add("b"), lambda: words.discard("b")),
        (lambda: buffer.__setitem__(0, 1), lambda: buffer.__setitem__(0, ord("x"))),
    ):
        change()
        assert not watched.holds()
        back()
        assert watched.holds()
    numbers = itertools.count()
    with pytest.raises(CannotTrace, match="numbers, an iterator"):
        outside(lambda: next(numbers))


def test_too_much_is_said() -> None:
    many = [[[number] for number in range(900)] for _ in range(30)]
    assert outside(lambda: many).too_large()


class Settings:
    scale = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


def test_classes_and_slots_are_watched() -> None:
    class Inner:
        shift = 1.0

    one, slotted = Settings(), Slotted()

    def function(x: float) -> float:
        return x * Settings.scale + Inner.shift + one.scale + slotted.scale

    watched = outside(function)
    changes: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("one.scale", lambda: setattr(Settings, "scale", 3.0), lambda: setattr(Settings, "scale", 2.0)),
        ("Inner.shift", lambda: setattr(Inner, "shift", 2.0), lambda: setattr(Inner, "shift", 1.0)),
        ("slotted.scale", lambda: setattr(slotted, "scale", 3.0), lambda: setattr(slotted, "scale", 2.0)),
        ("attributes", lambda: setattr(one, "scale", 3.0), lambda: delattr(one, "scale")),
    ]
    for name, change, back in changes:
        change()
        assert name in str(watched.changed())
        back()
        assert watched.holds(), name


def test_methods_are_looked_into_as_far_as_code_uses_them() -> None:
    factors, others = [2.0], [1.0]

    class Scaled:
        factor = 3.0

        def __call__(self, x: float) -> float:
            return x * self.scale() * self.shared

        def scale(self) -> float:
            return self.named()

        @classmethod
        def named(cls) -> float:
            return cls.factor * factors[0]

        @property
        def shared(self) -> float:
            return factors[0]

        def never(self) -> float:
            return others[0]

    watched = outside(Scaled())
    others.append(2.0)  # no code that was seen comes to it
    assert watched.holds()
    factors[0] = 5.0
    assert not watched.holds()
    factors[0] = 2.0
    assert watched.holds()
    Scaled.factor = 4.0
    assert watched.changed() == "Scaled.factor"
    Scaled.factor = 3.0
    assert watched.holds()
    Scaled.scale = lambda self: 1.0  # type: ignore[method-assign]
    assert watched.changed() == "Scaled.scale"


def test_attributes_of_functions_are_watched() -> None:
    def function(x: float) -> float:
        function.calls = 1  # type: ignore[attr-defined]
        return x

    watched = outside(function)
    function(1.0)
    assert "attributes" in str(watched.changed())
