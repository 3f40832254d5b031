"""A job's state as bytes: the weights of a model by name, and what an optimizer remembers by number.

Keras numbers layers as a program makes them: the second model's first dense layer may be ``dense_7``. The names here
count from the beginning of the model, so that a checkpoint fits the same model in another program:
``sequential_2/dense_7/kernel`` and ``sequential_2/dense_8/kernel`` are ``dense/kernel`` and ``dense_1/kernel``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from manyhands.errors import WrongCheckpoint

Array = NDArray[Any]

_NUMBER = re.compile(r"_\d+\Z")


def names(model: Any) -> list[str]:
    """A name for each of the model's weights, in their order; the same in every program that makes this model."""
    paths = [variable.path.split("/") for variable in model.weights]
    if all(len(path) > 1 and path[0] == model.name for path in paths):
        paths = [path[1:] for path in paths]
    found: dict[tuple[str, ...], str] = {}  # by the layers' own names, from the outermost
    numbers: Counter[tuple[str, ...]] = Counter()
    given: Counter[str] = Counter()
    result = []
    for path in paths:
        for depth in range(1, len(path)):
            scope = tuple(path[:depth])
            if scope not in found:
                kind = (*scope[:-1], _NUMBER.sub("", scope[-1]))
                found[scope] = kind[-1] + (f"_{numbers[kind]}" if numbers[kind] else "")
                numbers[kind] += 1
        name = "/".join([*(found[tuple(path[:depth])] for depth in range(1, len(path))), path[-1]])
        given[name] += 1
        result.append(name if given[name] == 1 else f"{name} ({given[name]})")  # two layers may have the same name
    return result


def pack(tensors: Mapping[str, Array]) -> bytes:
    return save({name: np.array(tensor, order="C", copy=True) for name, tensor in tensors.items()})


def unpack(blob: bytes) -> dict[str, Array]:
    return load(blob)


def in_order(blob: bytes, own: Mapping[str, Sequence[int]], what: str) -> list[Array]:
    """The tensors of a blob in the order of ``own`` (shapes by name); those of something else are refused."""
    saved = unpack(blob)
    differences = [f"{name} is missing" for name in own.keys() - saved.keys()]
    differences += [f"{name} is not in {what}" for name in saved.keys() - own.keys()]
    differences += [
        f"{name} is {saved[name].shape}, {what}'s is {tuple(shape)}"
        for name, shape in own.items()
        if name in saved and saved[name].shape != tuple(shape)
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5]) + ("; ..." if len(differences) > 5 else "")
        raise WrongCheckpoint(f"these are not the weights of {what}: {shown}")
    return [saved[name] for name in own]
