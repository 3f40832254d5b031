"""Stable names for the weights of a Keras model, for checkpoints.

Keras numbers layers as a program makes them: the second model's first dense layer may be ``dense_7``. The names here
count from the beginning of the model, so that a checkpoint fits the same model in another program:
``sequential_2/dense_7/kernel`` and ``sequential_2/dense_8/kernel`` are ``dense/kernel`` and ``dense_1/kernel``.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_NUMBER = re.compile(r"_\d+\Z")


def names(model: Any) -> list[str]:
    """A name for each of the model's weights, in their order; the same in every program that makes this model."""
    paths = [variable.path.split("/") for variable in model.weights]
    if all(len(path) > 1 and path[0] == model.name for path in paths):
        paths = [path[1:] for path in paths]
    by_scope: dict[tuple[str, ...], str] = {}  # by the layers' own names, from the outermost
    numbers: Counter[tuple[str, ...]] = Counter()
    uses: Counter[str] = Counter()
    result = []
    for path in paths:
        for depth in range(1, len(path)):
            scope = tuple(path[:depth])
            if scope not in by_scope:
                kind = (*scope[:-1], _NUMBER.sub("", scope[-1]))
                by_scope[scope] = kind[-1] + (f"_{numbers[kind]}" if numbers[kind] else "")
                numbers[kind] += 1
        name = "/".join([*(by_scope[tuple(path[:depth])] for depth in range(1, len(path))), path[-1]])
        uses[name] += 1
        result.append(name if uses[name] == 1 else f"{name} ({uses[name]})")  # two layers may have the same name
    return result
