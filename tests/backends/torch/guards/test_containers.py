"""What tracing has changed is put back, whatever the classes of containers make of their methods."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch

from manyhands.backends.torch import planning
from manyhands.backends.torch.guards.containers import put_back
from manyhands.parallel.function import Parallel


class FrozenDict(dict[str, Any]):
    """Settings that refuse changes, as those of a diffusion model."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("frozen")

    __setitem__ = __delitem__ = update = clear = pop = setdefault = _refuse  # type: ignore[assignment]


class Doubling(list[int]):
    def __setitem__(self, *_: object) -> None:
        raise TypeError("append only")


@pytest.mark.parametrize(
    ("holder", "change"),
    [
        ({"a": 1, "b": 2}, lambda holder: holder.pop("a")),
        (OrderedDict(a=1, b=2), lambda holder: holder.move_to_end("a")),
        (Counter(a=3), lambda holder: holder.update("aab")),
        (FrozenDict(a=1), lambda holder: dict.update(holder, a=2, b=3)),
        (Doubling([1, 2]), lambda holder: holder.append(3)),
        (deque([1, 2], maxlen=2), lambda holder: holder.append(3)),
        ({1, 2}, lambda holder: holder.add(3)),
        (bytearray(b"ab"), lambda holder: holder.extend(b"c")),
        (numpy.arange(3), lambda holder: holder.__imul__(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_content_and_order_are_as_before(holder: Any, change: Any) -> None:
    before = dict(holder) if isinstance(holder, dict) else holder.copy()
    change(holder)
    put_back(holder, before)
    if isinstance(holder, dict):
        assert list(holder.items()) == list(before.items())
    else:
        assert list(holder) == list(before)


def test_a_dict_whose_order_is_its_own_stays_usable() -> None:
    holder = OrderedDict(a=1, b=2)
    before = dict(holder)
    del holder["a"]
    put_back(holder, before)
    holder.move_to_end("a")
    assert list(reversed(holder)) == ["a", "b"]


def test_what_has_not_changed_is_not_written_to() -> None:
    fixed = numpy.arange(3)
    fixed.flags.writeable = False
    put_back(fixed, fixed.copy())


def test_an_optimizers_first_step_beside_settings_that_refuse_changes() -> None:
    """Its state is made in the first call: of tracing it nothing may remain, or it would hold tensors without data."""
    config, array = FrozenDict(scale=2.0), numpy.arange(3.0)
    array.flags.writeable = False

    def trained(parallel: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(x) * config["scale"] + float(array[1])).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        call = Parallel(step, planning) if parallel else step
        for _ in range(3):
            call(torch.ones(4, 3))
        return net.weight.detach()

    assert torch.equal(trained(parallel=True), trained(parallel=False))
