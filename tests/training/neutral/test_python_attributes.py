"""Python attributes that a model's code changes: seen, put back, saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from manyhands.training.python_attributes import Attributes


def net() -> Any:
    return SimpleNamespace(calls=0, rate=0.5, ready=False, losses=[1.0], seen={"a": 1}, other=object(), _kept=3)


def test_what_changes_is_seen_and_put_back_in_place() -> None:
    model = net()
    attributes, losses = Attributes([("Net", model)], ignored=("_kept",)), model.losses
    assert not attributes.changed()
    model.calls += 1
    model.losses.append(2.0)
    model.new = 7
    model.ready, model._kept, model.other = True, 4, object()
    assert attributes.changed() == {("Net", "calls"): 1, ("Net", "losses"): [1.0, 2.0], ("Net", "new"): 7}
    attributes.put()
    assert (model.calls, model.losses, hasattr(model, "new")) == (0, [1.0], False)
    assert model.losses is losses
    assert model.ready, "flags stay: they say that something was set up"
    assert not attributes.changed()


def test_elements_that_cannot_be_compared_count_by_identity() -> None:
    model = net()
    model.losses[:] = [object()]
    attributes = Attributes([("Net", model)])
    assert not attributes.changed()
    model.losses[0] = object()
    assert list(attributes.changed()) == [("Net", "losses")]


def test_of_several_devices_the_first_one_counts() -> None:
    model = net()
    attributes = Attributes([("Net", model)])

    def work() -> int:
        model.calls += 1
        model.losses.append(float(model.calls))
        return int(model.calls)

    assert attributes.of_first([work] * 3) == [1, 1, 1]
    assert attributes.of_first([work]) == [2]
    assert (model.calls, model.losses) == (2, [1.0, 1.0, 2.0])


def test_checkpoints_take_plain_values_along() -> None:
    model, again = net(), net()
    attributes = Attributes([("Net", model)])
    model.calls, model.seen["b"] = 5, 2
    model.losses.append(object())
    values, others = attributes.saved()
    assert others == ["Net.losses"]
    seen = again.seen
    Attributes([("Net", again)]).restore([*values, ["Gone", "calls", 1]])
    assert (again.calls, again.seen) == (5, {"a": 1, "b": 2})
    assert again.seen is seen
