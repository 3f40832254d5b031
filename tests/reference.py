"""Weights and logits that every framework has to agree on.

``reference.json`` holds, for each built-in model, the names and shapes of its weights in the common form
(PyTorch's) and the logits that PyTorch gives for four images. The weights themselves are drawn here, from NumPy's
Philox, whose stream is fixed by its specification. ``python tests/reference.py`` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_suffix(".json")
MODELS = ("lenet", "mlp", "small-resnet", "resnet18")


def weights(model: str) -> dict[str, NDArray[np.float32]]:
    """The weights of a model by their common names."""
    return {
        name: _drawn(number, name, tuple(shape))
        for number, (name, shape) in enumerate(_read()[model]["shapes"].items())
    }


def logits(model: str) -> NDArray[np.float32]:
    """What PyTorch answers to :func:`images`, in evaluation mode."""
    return np.array(_read()[model]["logits"], dtype=np.float32)


def images() -> NDArray[np.uint8]:
    """Four grey images of 28 by 28, in bytes."""
    raw = np.random.Philox(key=7).random_raw(4 * 28 * 28)
    return (raw >> np.uint64(56)).astype(np.uint8).reshape(4, 28, 28)


def _drawn(number: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    raw = np.random.Philox(key=number).random_raw(int(np.prod(shape)))
    values = ((raw >> np.uint64(40)).astype(np.float64) / 2**24 * 2 - 1).reshape(shape)  # from -1 to 1
    if name.endswith("running_var"):
        values = 1 + 0.5 * values
    elif len(shape) == 1:
        values = (1.0 if _is_scale(name) else 0.0) + 0.1 * values
    else:
        values = values * (3 / np.prod(shape[1:])) ** 0.5
    return values.astype(np.float32)


def _is_scale(name: str) -> bool:
    """Whether a vector is a factor (of a normalisation) rather than an offset."""
    return name.endswith(".weight")


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def _write() -> None:
    import torch

    from manyhands.book.models import WEIGHT_NAMES
    from manyhands.book.torch import MODELS as TORCH

    written: dict[str, Any] = {}
    for model in MODELS:
        net = TORCH[model](num_classes=10).eval()
        own = WEIGHT_NAMES["torch"].to_common(
            {name: tensor.numpy() for name, tensor in net.state_dict().items()}, model
        )
        written[model] = {"shapes": {name: tensor.shape for name, tensor in own.items()}}
        FILE.write_text(json.dumps(written))
        drawn = {name: torch.from_numpy(one) for name, one in weights(model).items()}
        net.load_state_dict(drawn, strict=False)
        with torch.no_grad():
            answer = net.double()(torch.from_numpy(images())[:, None].double() / 255)
        written[model]["logits"] = [[round(float(one), 6) for one in row] for row in answer]
    FILE.write_text(json.dumps(written, indent=0) + "\n")


if __name__ == "__main__":
    _write()
