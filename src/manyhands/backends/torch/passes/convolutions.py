"""Puts the chosen ways of convolutions into a trace: other plans of cuDNN, and matrix products.

The ways were chosen before (:mod:`..convolutions.choice`); here one name is replaced by another. It comes last: other
passes look for PyTorch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.convolutions import choice
from manyhands.backends.torch.convolutions.operations import INSTEAD, problems_of
from manyhands.backends.torch.convolutions.problems import Form
from manyhands.backends.torch.passes.rewriting import Rewriting


def choose_convolutions(trace: Trace) -> tuple[Trace, str | None]:
    """Every convolution that has a faster way, in that way."""
    rewriting = Rewriting(trace)
    count = found = 0
    for node in rewriting.nodes(*INSTEAD):
        chosen = [choice.chosen_for(problem) for problem in problems_of(node.target, _values(node))]
        count += len(chosen)
        ours = [one for one in chosen if one is not None and one.way is not None]
        if ours and all(any(one.result == Form.of(value) for value in _results(node)) for one in ours):
            node.target = INSTEAD[node.target]
            found += len(ours)
    return (rewriting.done(), f"{found} of {count} in faster ways") if found else (trace, None)


def _values(node: Node) -> tuple[Any, ...]:
    return tuple(arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)


def _results(node: Node) -> list[torch.Tensor]:
    values: Any = node.meta["val"]
    return [value for value in (values if isinstance(values, tuple) else (values,)) if value is not None]
