"""Flax's names of weights: ``resnet_block2.layers.0.conv3.kernel`` is ``resnet_block2.0.conv3.weight`` in PyTorch."""

from __future__ import annotations

from manyhands.training.book.weight_names import Path, WeightNames

# Parts of the names that only Flax has: what holds a Sequential's layers, and the first layers of a ResNet.
_LAYERS, _STEM = "layers", "stem"


def _without_containers(path: Path, model: str) -> Path:
    return [part for part in path if part not in (_LAYERS, _STEM)]


def _with_containers(path: Path, model: str) -> Path:
    """``["fc", "1"]`` is ``["fc", "layers", "1"]``: a number is one of a Sequential's layers."""
    inside = [part for name in path for part in ([_LAYERS, name] if name.isdecimal() else [name])]
    return [_STEM, *inside] if "resnet" in model and path[0].isdecimal() else inside


_NAMES = WeightNames(
    layer={"kernel": "weight", "bias": "bias"},
    norm={"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"},
    channels_last=True,
    path_to_common=_without_containers,
    path_from_common=_with_containers,
)
to_common, from_common = _NAMES.to_common, _NAMES.from_common
