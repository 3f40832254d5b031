"""Facts about dicts are asked again only where the dict has changed: no change may go unnoticed."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from manyhands.backends.torch.guards.dict_versions import DictVersions, has_version  # noqa: E402
from manyhands.backends.torch.guards.facts import Fact, Facts  # noqa: E402
from manyhands.backends.torch.guards.state import Outside  # noqa: E402

CHANGES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "another value": lambda one: one.__setitem__("a", 2),
    "another key": lambda one: one.__setitem__("b", 1),
    "a key less": lambda one: one.pop("a"),
    "empty": lambda one: one.clear(),
    "update": lambda one: one.update(a=3),
    "setdefault": lambda one: one.setdefault("c", 3),
    "|=": lambda one: one.__ior__({"a": 4}),
    "popitem": lambda one: one.popitem(),
}


def test_versions_are_read_where_python_has_them() -> None:
    versions = DictVersions([{}])
    assert bool(versions.now()) is (sys.version_info < (3, 13))


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(int)])
@pytest.mark.parametrize("change", CHANGES)
def test_the_dict_that_changed_is_named(kind: Callable[[], dict[Any, Any]], change: str) -> None:
    dicts = [kind() for _ in range(300)]
    for one in dicts:
        one["a"] = 1
    versions = DictVersions(dicts)
    before = versions.now()
    assert versions.now() == before
    CHANGES[change](dicts[123])
    changed = versions.changed(before, versions.now())
    assert 123 in changed
    assert not before or list(changed) == [123]


def test_a_module_by_every_way_to_change_it() -> None:
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(50)], nn.BatchNorm1d(3))
    layer: Any = net[7]
    weight = layer.weight
    changes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "mode": (lambda: layer.eval(), lambda: layer.train()),
        "parameter": (
            lambda: setattr(layer, "weight", nn.Parameter(torch.ones(3, 3))),
            lambda: setattr(layer, "weight", weight),
        ),
        "its dict": (
            lambda: layer._parameters.update(weight=nn.Parameter(torch.ones(3, 3))),
            lambda: layer._parameters.update(weight=weight),
        ),
        "attribute": (lambda: object.__setattr__(layer, "more", 1), lambda: object.__delattr__(layer, "more")),
        "setting": (lambda: vars(net[50]).update(eps=1.0), lambda: vars(net[50]).update(eps=1e-5)),
        "buffer": (
            lambda: net[50].register_buffer("other", torch.ones(1)),
            lambda: net[50]._buffers.pop("other"),
        ),
        "hook": (lambda: layer.register_forward_hook(print), lambda: layer._forward_hooks.clear()),
        "layer": (lambda: net.__setitem__(3, nn.Linear(3, 3)), lambda: None),
    }
    outside = Outside(lambda x: net(x))
    assert outside.holds()
    for name, (change, undo) in changes.items():
        change()
        assert not outside.holds(), name
        assert not outside.holds(), f"{name}, asked again"
        undo()
        assert outside.holds() or name == "layer", f"{name} is as it was"


def test_addresses_and_forms_of_tensors() -> None:
    layer = nn.Linear(3, 4)
    weight, data = layer.weight, layer.weight.data
    outside = Outside(lambda x: layer(x))
    assert outside.holds()
    weight.data = data.clone()
    assert not outside.holds(), "another memory"
    weight.data = data
    assert outside.holds()
    weight.data = data[:2]
    assert not outside.holds(), "the same memory, smaller"
    outside.forms_are_guarded([weight])
    assert outside.holds(), "who guards its form is asked as well"


def test_unrelated_changes_of_a_dict_cost_no_plan() -> None:
    names = {"used": 1, "not used": 1}
    facts = Facts([Fact("used", "item", names, "used", 1)])
    assert facts.hold()
    names["not used"] = 2
    assert facts.hold()
    names["used"] = True  # equal, but not the same
    assert not facts.hold()
    names["used"] = 1
    assert facts.hold()


def test_what_the_methods_of_a_dict_read_is_guarded() -> None:
    class Counting(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            return len(log)

    log: list[int] = []
    counting = Counting(a=0)
    assert not has_version(counting)
    outside = Outside(lambda: counting["a"])
    assert outside.holds()
    log.append(1)
    assert not outside.holds()
    log.pop()
    assert outside.holds()
    counting["a"] = 1
    assert not outside.holds(), "what is stored counts, too"
