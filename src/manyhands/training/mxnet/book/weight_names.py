"""MXNet's names of weights: ``resnet_block2.0.bn1.gamma`` is ``resnet_block2.0.bn1.weight`` in PyTorch.

Everything but batch normalisation has the same name and layout in both.
"""

from __future__ import annotations

from manyhands.training.book.weight_names import WeightNames

_NAMES = WeightNames(
    layer={"weight": "weight", "bias": "bias"},
    norm={"gamma": "weight", "beta": "bias", "running_mean": "running_mean", "running_var": "running_var"},
)
to_common, from_common = _NAMES.to_common, _NAMES.from_common
