"""The name of a function in explanations and progress lines."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from manyhands.parallel.explain import name_of


def doubled(x: int) -> int:
    return 2 * x


def decorated(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function, assigned=())  # as torch.no_grad() does to a module: its own name stays
    def decorate_context(*arguments: int) -> int:
        return function(*arguments)

    return decorate_context


class Net:
    def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (doubled, "doubled"),
        (functools.partial(doubled, 3), "doubled"),
        (decorated(doubled), "doubled"),
        (decorated(functools.partial(decorated(doubled), 3)), "doubled"),
        (Net(), "Net"),
        (decorated(Net()), "Net"),
        (Net().__call__, "__call__"),
    ],
)
def test_a_function_is_called_what_its_author_calls_it(function: Callable[..., int], name: str) -> None:
    assert name_of(function) == name


def test_a_function_that_wraps_itself_has_a_name() -> None:
    def endless() -> None: ...

    endless.__wrapped__ = endless  # type: ignore[attr-defined]
    assert name_of(endless) == "endless"
