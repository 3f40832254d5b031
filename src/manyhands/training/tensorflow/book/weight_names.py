"""Keras's names of weights: ``resnet_block2.0/conv3/kernel`` is ``resnet_block2.0.conv3.weight`` in PyTorch.

Layers have the same names in both: :mod:`.models` gives them PyTorch's.
"""

from __future__ import annotations

from manyhands.training.book.weight_names import Path, WeightNames


def _layers_within(path: Path, model: str) -> Path:
    """A block of a ResNet is one layer, which has others in it; everywhere else the dots belong to a layer's name."""
    return [".".join(path[:-1]), path[-1]] if path[0].startswith("resnet_block") else [".".join(path)]


_NAMES = WeightNames(
    layer={"kernel": "weight", "bias": "bias"},
    norm={"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"},
    separator="/",
    channels_last=True,
    path_from_common=_layers_within,
)
to_common, from_common = _NAMES.to_common, _NAMES.from_common
