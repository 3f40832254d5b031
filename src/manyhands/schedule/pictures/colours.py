"""One colour for each operation and figure, the same in every picture."""

from __future__ import annotations

import zlib

# Of curves: what is drawn, and the text beside it.
LOSS, ACCURACY, INK = "#4e79a7", "#e15759", "#444444"

_FAMILIES = {
    "#4e79a7": ("mm", "matmul", "dot", "linear", "einsum", "dense", "fully_connected"),
    "#f28e2b": ("conv",),
    "#59a14f": ("norm",),
    "#b07aa1": ("attention", "softmax", "loss"),
    "#9c755f": ("copy", "memcpy", "device_put"),
    "#499894": ("pool",),
    "#b6992d": ("sum", "mean", "var", "amax", "argmax"),
    "#79706e": ("cat", "stack", "index", "gather", "embedding"),
    "#e15759": ("relu", "gelu", "sigmoid", "silu", "tanh", "threshold"),
}
_OTHERS = ("#d37295", "#a0568c", "#6b8e23", "#2f6b9a", "#c4763b", "#8a6fa8", "#3d7a5a", "#a8554e")


def colour_of(operation: str) -> str:
    """Each family (products, convolutions, ...) has a colour; any other operation gets one by its name.

    >>> colour_of("addmm") == colour_of("bmm") != colour_of("convolution")
    True
    """
    name = operation.lower()
    for colour, words in _FAMILIES.items():
        if any(word in name for word in words):
            return colour
    return _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]
