"""The same mistake gets the same message from every framework.

Each expected message is written out once, and every framework's suite compares its own with it; ``NAME`` stands for
the framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manyhands.errors import ManyhandsError
from manyhands.placement.moves import VIRTUAL_DEVICES

VIRTUAL = int(os.environ.get(VIRTUAL_DEVICES) or 0)

NO_GPU = (
    "NoSuchDevice: there is no {kind}:99: NAME sees {all}. mh.try_gpu(99) falls back to the CPU",
    "This process has {count} virtual devices: MANYHANDS_VIRTUAL_DEVICES=100 makes 100",
)
ONE_DEVICE = "BadDevice: a list of devices is needed, 'cpu' is one device: write ['cpu']"
NO_LIST = "BadDevice: a list of devices is needed, 3 is none: for example mh.try_all_gpus()"
TWICE = (
    "DuplicateDevices: cpu appears more than once in [cpu, cpu]: two replicas or shards on one device would be one and "
    "the same memory. Name each device once; for several devices on a machine without GPUs set "
    "MANYHANDS_VIRTUAL_DEVICES=2"
)
NOT_A_DEVICE = "BadDevice: 3 is not a device of NAME: give one of its own, or a name such as 'gpu:1'"
NOT_THE_HOST = f"BadDevice: cpu:99 is not a device: the host is just 'cpu'. Did you mean 'virtual:99'? {NO_GPU[1]}"

PLACEMENT: list[tuple[Callable[[Any, Any], object], str]] = [
    (
        lambda mh, x: mh.to(x, "tpu"),
        "BadDevice: 'tpu' is not the name of a device: write 'cpu', 'gpu' (the first), 'gpu:1' or 'virtual:1'",
    ),
    (lambda mh, x: mh.to(x, "cpu:99"), NOT_THE_HOST),
    (lambda mh, x: mh.to(x, "cpu(99)"), NOT_THE_HOST),
    (lambda mh, x: mh.to(x, "gpu:99"), NO_GPU[0]),
    (lambda mh, x: mh.to(x, "cuda:99"), NO_GPU[0]),
    (lambda mh, x: mh.to(x, mh.gpu(99)), NO_GPU[0]),
    (lambda mh, x: mh.memory("gpu:99"), NO_GPU[0]),
    (lambda mh, x: mh.memory(mh.gpu(99)), NO_GPU[0]),
    (lambda mh, x: mh.to(x, "virtual:99"), f"NoSuchDevice: there is no virtual:99. {NO_GPU[1]}"),
    (lambda mh, x: mh.to(x, 3), NOT_A_DEVICE),
    (lambda mh, x: mh.to(x, None), NOT_A_DEVICE.replace("3", "None")),
    (lambda mh, x: mh.synchronize(3), NOT_A_DEVICE),
    (
        lambda mh, x: mh.gpu(-1),
        "BadDevice: a device is numbered 0, 1, 2, ...; -1 is not one of these (no negative numbers)",
    ),
    (lambda mh, x: mh.split(x, "cpu"), ONE_DEVICE),
    (lambda mh, x: mh.split(x, 3), NO_LIST),
    (lambda mh, x: mh.split(x, None), NO_LIST.replace("3", "None")),
    (
        lambda mh, x: mh.split(x, []),
        "BadDevice: the list of devices is empty: give at least one, for example try_all_gpus()",
    ),
    (lambda mh, x: mh.split(x, ["cpu", "cpu"]), TWICE),
    (lambda mh, x: mh.split(x, ["cpu"], shares=[1, 2]), "BadShares: 2 shares for 1 device: give one share per device"),
    (
        lambda mh, x: mh.split((x, x[:1]), ["cpu"]),
        "BadBatch: the parts of the batch do not have the same number of samples: batch[0] has 2, batch[1] has 1",
    ),
    (
        lambda mh, x: mh.device_of("text"),
        "NotATensor: a str has no device: there is no tensor of NAME in it. A model whose parameters are not made yet "
        "has none either",
    ),
    (lambda mh, x: mh.gather([], "cpu"), "BadBatch: there are no shards to put together"),
    (lambda mh, x: mh.virtual_devices(0), "VirtualDevicesError: 0 virtual devices cannot be made: ask for 1 to 64"),
]

NO_DATA = "NotATensor: a value of type KIND cannot be read as data: give DATA"
X, Y = np.ones((8, 3), np.float32), np.zeros(8, np.int64)

TRAINING: list[tuple[Callable[[Any, Any], object], str]] = [
    (
        lambda mh, model: mh.Trainer(devices=["gpu:99"]),
        "NoSuchDevice: devices=['gpu:99']: there is no gpu:99 here (manyhands devices shows what there is). Write cpu, "
        "or cpu:2 for two virtual CPU devices",
    ),
    (lambda mh, model: mh.Trainer(devices=["cpu:99"]), NOT_THE_HOST),
    (lambda mh, model: mh.Trainer(devices=["cpu", "cpu"]), TWICE),
    (lambda mh, model: mh.Trainer(devices=[3.5]), NOT_A_DEVICE.replace("3", "3.5")),
    (
        lambda mh, model: mh.Trainer(num_gpus=3, devices=["cpu"]),
        "BadSettings: num_gpus=3 and devices=['cpu']: give one of the two options",
    ),
    (
        lambda mh, model: mh.Step(batch_stats="local"),
        "BadSettings: Step(batch_stats='local'): choose one of per_device, global",
    ),
    (
        lambda mh, model: mh.Step(shares="even"),
        "BadSettings: shares='even': give one number per device, 'measured', or None",
    ),
    (lambda mh, model: mh.Trainer(lr="x"), "BadSettings: lr='x' is not a learning rate: give a number of zero or more"),
    (lambda mh, model: mh.Trainer(loss=3), "BadSettings: loss=3 is of type int: give a function"),
    (
        lambda mh, model: mh.Trainer(epochs=3),
        "UnknownOption: Trainer has no option epochs: it is called max_epochs here",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).fit(None, (X, Y)),
        "BadSettings: a model of type NoneType cannot be trained: give MODEL",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).fit(type(model), (X, Y)),
        "BadSettings: the class CLASS cannot be trained: give MODEL made of it, CLASS(...) and not CLASS",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).fit(model, X),
        "BadBatch: a batch (inputs, target) is needed, and this one has only one part: give both, or a model with "
        "its own training_step(batch)",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).fit(model, (X, Y[:5])),
        "BadBatch: the arrays of a data set must have the same number of samples, these have [8, 5]",
    ),
    (
        lambda mh, model: mh.Trainer(1, devices="cpu", quiet=True).fit(model, (X, Y + 9)),
        "BadLabels: labels go from 9 to 9, but the model has 4 outputs: they must be 0 to 3",
    ),
    (lambda mh, model: mh.Trainer(1, quiet=True).fit(model, None), NO_DATA.replace("KIND", "NoneType")),
    (lambda mh, model: mh.Trainer(1, quiet=True).fit(model, "x.csv"), NO_DATA.replace("KIND", "str")),
    (lambda mh, model: mh.Trainer(1, quiet=True).fit(model, (X[0, 0], Y[0])), NO_DATA.replace("KIND", "float32")),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).fit(model, (X.tolist(), Y.tolist())),
        "NotATensor: lists of numbers cannot be read as data: make arrays of them, (np.array(X), np.array(y))",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True, loss=lambda *both: None).fit(model, (X, Y)),
        "BadSettings: the loss returned None: is a `return` missing? Return the mean loss over the samples, one number "
        "per sample, or mh.LossSum(total, count)",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True, loss="mse").fit(model, (X, Y.astype(np.float32))),
        "BadBatch: the model's output for a sample has shape (4,), and its target (): the loss compares each number of "
        "the output with one target; give targets of the output's shape",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True, metrics=["nonsense"]),
        "BadSettings: metric 'nonsense' is of type str: give metrics={{\"mae\": function}} or a list: functions "
        "f(outputs, targets), or metric objects of the framework",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True).predict(None, X),
        "BadSettings: a model of type NoneType cannot be trained: give MODEL",
    ),
    (
        lambda mh, model: mh.Trainer(1, quiet=True, resume="/nonexistent").fit(model, (X, Y)),
        "NoCheckpoint: there is no run or checkpoint at /nonexistent",
    ),
]
MODELS = {
    "torch": "a torch.nn.Module",
    "jax": "a flax.nnx.Module",
    "tensorflow": "a keras.Model or a keras.Layer",
    "mxnet": "a gluon.Block",
}
DATA = {"torch": "(X, y) tensors or arrays, a Dataset, or a DataLoader"}
DATA |= dict.fromkeys(("jax", "tensorflow", "mxnet"), "(X, y) arrays, or a loader that gives batches (X, y)")


def _message(mistake: Callable[[Any, Any], object], mh: Any, value: Any) -> str:
    with pytest.raises(ManyhandsError) as caught:
        mistake(mh, value)
    return f"{type(caught.value).__name__}: {caught.value}"


def _expected(text: str, framework: str, mh: Any) -> str:
    kind = "virtual" if VIRTUAL else "gpu"
    every = ", ".join(["cpu", *(f"{kind}:{number}" for number in range(mh.num_gpus()))])
    filled = text.format(kind=kind, all=every, count=VIRTUAL or "no")
    return filled.replace("NAME", framework).replace("MODEL", MODELS[framework]).replace("DATA", DATA[framework])


@pytest.mark.parametrize(("mistake", "expected"), PLACEMENT)
def test_placement(framework: str, mh: Any, native: Any, mistake: Callable[[Any, Any], object], expected: str) -> None:
    assert _message(mistake, mh, native.tensor([[1.0], [2.0]])) == _expected(expected, framework, mh)


@pytest.mark.parametrize(("mistake", "expected"), TRAINING)
def test_training(framework: str, mh: Any, native: Any, mistake: Callable[[Any, Any], object], expected: str) -> None:
    model = native.model()
    words = _expected(expected, framework, mh).replace("CLASS", type(model).__name__)
    assert _message(mistake, mh, model) == words


def test_a_door_says_what_it_does_not_have(framework: str, mh: Any) -> None:
    with pytest.raises(AttributeError) as caught:
        _ = mh.Trainr
    assert str(caught.value) == f"module 'manyhands.{framework}' has no attribute 'Trainr'"
