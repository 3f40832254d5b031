"""A model of the user's own goes from one framework to another by a table of names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from training_bench import Bench, run_of

from manyhands.cli import main
from manyhands.cli.convert import rename_weights
from manyhands.errors import BadSettings, WrongCheckpoint
from manyhands.training.data.sources import as_numpy

Tensors = dict[str, NDArray[Any]]
random = np.random.RandomState(3)
X = random.normal(size=(4, 1, 5, 5)).astype("float32")
OF_TORCH: Tensors = {
    "conv.weight": random.normal(size=(2, 1, 3, 3)).astype("float32"),
    "conv.bias": random.normal(size=2).astype("float32"),
    "dense.weight": random.normal(size=(3, 18)).astype("float32"),
    "dense.bias": random.normal(size=3).astype("float32"),
}
# The channels of an image come first in PyTorch and MXNet, and last in JAX and TensorFlow: so a flat one is in another
# order there.
TO_JAX = {
    "conv.kernel": ["conv.weight", {"permute": [2, 3, 1, 0]}],
    "conv.bias": "conv.bias",
    "dense.kernel": ["dense.weight", {"reshape": [3, 2, 3, 3]}, {"permute": [2, 3, 1, 0]}, {"reshape": [18, 3]}],
    "dense.bias": "dense.bias",
}
TO_TENSORFLOW = {name.replace(".", "/"): name for name in TO_JAX}
FROM_LAST = {
    "conv.weight": ["conv/kernel", {"permute": [3, 2, 0, 1]}],
    "conv.bias": "conv/bias",
    "dense.weight": ["dense/kernel", {"reshape": [3, 3, 2, 3]}, {"permute": [3, 2, 0, 1]}, {"reshape": [3, 18]}],
    "dense.bias": "dense/bias",
}
PLAIN = {name: name for name in OF_TORCH}


def reference() -> NDArray[Any]:
    """The model's answers, computed by hand from PyTorch's weights."""
    windows = np.lib.stride_tricks.sliding_window_view(X[:, 0], (3, 3), (1, 2))
    maps = np.einsum("nijkl,ckl->ncij", windows, OF_TORCH["conv.weight"][:, 0])
    maps = np.maximum(maps + OF_TORCH["conv.bias"][:, None, None], 0)
    return maps.reshape(len(X), -1) @ OF_TORCH["dense.weight"].T + OF_TORCH["dense.bias"]


def model(framework: str) -> tuple[Any, NDArray[Any]]:
    """The model, and the images as it takes them."""
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    if framework == "torch":
        from torch import nn

        layers = {"conv": nn.Conv2d(1, 2, 3), "relu": nn.ReLU(), "flat": nn.Flatten(), "dense": nn.Linear(18, 3)}
        net = nn.Sequential()
        for name, layer in layers.items():
            net.add_module(name, layer)
        return net, X
    if framework == "jax":
        from flax import nnx

        class Net(nnx.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                self.conv = nnx.Conv(1, 2, (3, 3), padding="VALID", rngs=nnx.Rngs(0))
                self.dense = nnx.Linear(18, 3, rngs=nnx.Rngs(0))

            def __call__(self, X: Any) -> Any:
                return self.dense(nnx.relu(self.conv(X)).reshape(len(X), -1))

        return Net(), last
    if framework == "tensorflow":
        import keras
        from keras import layers as of_keras

        conv, dense = of_keras.Conv2D(2, 3, activation="relu", name="conv"), of_keras.Dense(3, name="dense")
        return keras.Sequential([of_keras.Input((5, 5, 1)), conv, of_keras.Flatten(), dense]), last
    from mxnet.gluon import nn as of_gluon

    class Block(of_gluon.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.dense = of_gluon.Conv2D(2, 3, in_channels=1), of_gluon.Dense(3, in_units=18)

        def forward(self, X: Any) -> Any:
            return self.dense(self.conv(X).relu())

    block = Block()
    block.initialize()
    return block, X


def test_from_pytorch_over_jax_tensorflow_and_mxnet_to_pytorch(bench: Bench) -> None:
    """The same answers in each; every framework's suite shows those of its own."""
    run = run_of(bench.folder / "torch", OF_TORCH)
    ways = {"jax": TO_JAX, "tensorflow": TO_TENSORFLOW, "mxnet": FROM_LAST, "torch": PLAIN}
    for framework, names in ways.items():
        table, made = bench.folder / f"{framework}.json", bench.folder / f"to_{framework}"
        table.write_text(json.dumps({"names": names}))
        assert main(["convert", str(run), "--to", framework, "--names", str(table), "--out", str(made)]) == 0
        run = made
        if framework == bench.framework:
            net, images = model(framework)
            net = bench.mh.load_weights(net, run)
            found = as_numpy(bench.mh.Trainer(1, quiet=True, **bench.on(1)).predict(net, images))
            np.testing.assert_allclose(found, reference(), rtol=1e-4, atol=1e-5)
    for name, tensor in bench.weights(run).items():
        np.testing.assert_array_equal(tensor, OF_TORCH[name])


WRONG = [
    ({**PLAIN, "extra": "dense.wieght"}, [], "holds conv.weight"),
    ({"conv.bias": "conv.bias"}, ["dense.bias"], r"does not map conv.weight \[2, 1, 3, 3\], dense.weight \[3, 18\]"),
    ({"a": ["conv.bias", {"permute": [1, 0]}]}, [], r"'a' from 'conv.bias': permute \[1, 0\]: axes don't match"),
    ({"a": ["conv.bias", "turn"]}, [], "not a table of names: .* for an entry give the old name"),
]


@pytest.mark.neutral
@pytest.mark.parametrize(("names", "unused", "words"), WRONG)
def test_what_a_table_lacks_is_named(names: dict[str, Any], unused: list[str], words: str) -> None:
    with pytest.raises((WrongCheckpoint, BadSettings), match=words):
        rename_weights(OF_TORCH, {"names": names, "unused": unused})
