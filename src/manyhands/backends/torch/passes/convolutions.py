"""Puts the chosen way of each convolution into a trace: another cuDNN plan, or a matrix product.

:mod:`..convolutions.choice` chooses, before the pass (:func:`choose_convolutions`) or during it
(:func:`tune_convolutions`); the pass replaces one operation by another. It comes last, because other passes look for
PyTorch's operations.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.convolutions import choice
from manyhands.backends.torch.convolutions.operations import REPLACEMENTS, may_choose, problems_of
from manyhands.backends.torch.convolutions.problems import Form, Problem
from manyhands.backends.torch.passes.rewriting import Rewriting


def choose_convolutions(trace: Trace) -> tuple[Trace, str | None]:
    """Use the faster way for every convolution that has one."""
    rewriting = Rewriting(trace)
    count = replaced = 0
    for node in rewriting.nodes(*REPLACEMENTS):
        chosen = [choice.chosen_for(problem) for problem in problems_of(node.target, _values(node))]
        count += len(chosen)
        faster = [way for way in chosen if way is not None and way.way is not None]
        if faster and all(any(way.result == Form.of(value) for value in _results(node)) for way in faster):
            node.target = REPLACEMENTS[node.target]
            replaced += len(faster)
    return (rewriting.done(), f"{replaced} of {count} in faster ways") if replaced else (trace, None)


def tune_convolutions(trace: Trace, calls: int) -> tuple[Trace, str | None]:
    """The same, but choose ways for convolutions on a GPU now; the function is called about ``calls`` times."""
    if not may_choose():
        return trace, None
    problems = Counter[Problem]()
    for step in trace.steps:
        if step.node.target in REPLACEMENTS:
            problems.update(
                problem
                for problem in problems_of(step.node.target, _values(step.node))
                if problem.device.type == "cuda"
            )
    if problems:
        choice.choose(problems, calls)
    return choose_convolutions(trace)


def _values(node: Node) -> tuple[Any, ...]:
    return tuple(arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)


def _results(node: Node) -> list[torch.Tensor]:
    values: Any = node.meta["val"]
    return [value for value in (values if isinstance(values, tuple) else (values,)) if value is not None]
