"""What the built-in models share in all frameworks: widths, and the arguments of a residual block."""

from __future__ import annotations

from typing import Any

RESNET18: dict[str, Any] = {"widths": (64, 128, 256, 512), "blocks": 2}
SMALL_RESNET: dict[str, Any] = {"widths": (16, 32, 64), "blocks": 1}


def residual_width(in_channels: int, out_channels: int | None, *, use_1x1conv: bool, strides: int) -> int:
    """The output channels of ``Residual(...)``; refuses a block whose output cannot be added to its input."""
    asked = f"Residual({in_channels}, {out_channels}"
    if isinstance(out_channels, bool):
        raise TypeError(
            f"{asked}): the second number is the channels that come out. "
            f"Write Residual({in_channels}, use_1x1conv={out_channels})"
        )
    changed = strides != 1 or out_channels not in (None, in_channels)
    if changed and not use_1x1conv:
        raise ValueError(
            f"{asked}, strides={strides}) changes the shape, so its input cannot be added to its output as it is: "
            "write use_1x1conv=True"
        )
    return in_channels if out_channels is None else out_channels
