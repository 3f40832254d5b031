"""The textbook's classes, models and functions for MXNet, written with Gluon's own layers.

A new model has shapes but, as always in Gluon, no weights: ``initialise`` draws them, ``net.initialize()`` too, and a
trainer does for parameters without values. They work in both of MXNet's modes, with ``mx.np`` (``npx.set_np()``) and
with ``mx.nd``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from manyhands.backends.mxnet import devices as _backend
from manyhands.book import NAMES, models, recipes
from manyhands.book.models import Size
from manyhands.book.recipes import Predictor, Recipes
from manyhands.book.vocabulary import *  # noqa: F403
from manyhands.training.data.sources import Arrays, Batch
from manyhands.training.loss.own_step import default
from manyhands.training.mxnet import checks, replicas
from manyhands.training.mxnet import trainer as _trainer
from manyhands.training.mxnet.objective import count_right
from manyhands.training.mxnet.replicas import initialise

# Models


def _convolution(inputs: int | None, outputs: int, size: int, strides: int = 1, padding: int = 0) -> Any:
    return nn.Conv2D(outputs, size, strides, padding, in_channels=inputs or 0)


def _normalisation(width: int) -> Any:
    return nn.BatchNorm(in_channels=width)


class Residual(models.Residual, nn.HybridBlock):  # type: ignore[misc]
    __doc__ = models.Residual.__doc__

    def __init__(self, *channels: int, use_1x1conv: bool = False, strides: int = 1, **of_block: Any) -> None:
        super().__init__(**of_block)
        self._build(_convolution, _normalisation, *channels, use_1x1conv=use_1x1conv, strides=strides)
        self.relu = nn.Activation("relu")  # a layer, because the function has another name in each of MXNet's modes

    def hybrid_forward(self, F: Any, X: Any) -> Any:
        return self._output(X)


def _chain(layers: Mapping[str, Any], size: Size) -> nn.HybridSequential:
    net = nn.HybridSequential()
    for name, layer in layers.items():
        net.register_child(_chain(models.numbered(layer), size) if isinstance(layer, list) else layer, name)
    return net


_models = models.Models(
    convolution=_convolution,
    linear=lambda inputs, outputs: nn.Dense(outputs, in_units=inputs),
    norm=_normalisation,
    residual=Residual,
    relu=functools.partial(nn.Activation, "relu"),
    pool=functools.partial(nn.MaxPool2D, 2),
    average=nn.GlobalAvgPool2D,
    flatten=nn.Flatten,
    chain=_chain,
)
resnet18, lenet = _models.resnet18, _models.lenet
MODELS = _models.by_name()


# Module and DataModule


class Module(recipes.Module, gluon.Block):  # type: ignore[misc]
    @default
    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return gluon.loss.SoftmaxCrossEntropyLoss()(y_hat, y).mean()

    @default
    def configure_optimizers(self) -> gluon.Trainer:
        return gluon.Trainer(self.collect_params(), "sgd", {"learning_rate": getattr(self, "lr", 0.1)})

    def apply_init(self, inputs: Any, init: mx.init.Initializer | None = None) -> None:
        """Draw the parameters, and run the model once, so that those of every layer exist."""
        self.initialize(init or mx.init.Xavier(), force_reinit=True)
        self(*inputs)

    def set_scratch_params_device(self, device: mx.Context) -> None:
        """Move arrays that stand in the model as plain attributes: parameters of layers written from scratch.

        Those of modules inside it, also in lists, go with them. Each has a gradient afterwards.
        """
        for name, value in list(vars(self).items()):
            if isinstance(value, mx.nd.NDArray):
                with autograd.pause():
                    moved = value.as_in_context(device).detach()
                moved.attach_grad()
                setattr(self, name, moved)
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(part, Module):
                    part.set_scratch_params_device(device)


class DataModule(recipes.DataModule):
    native = staticmethod(replicas.native)


# The trainer, and the functions of the book and of the command


class Trainer(recipes.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__

    def prepare_model(self, model: Any) -> Any:
        """The model on all of the trainer's devices, knowing its trainer; its scratch parameters on the first."""
        model.trainer = self
        if self.gpus:
            for parameter in replicas.distinct(model):
                replicas.place(parameter, self.gpus)
            if hasattr(model, "set_scratch_params_device"):
                model.set_scratch_params_device(self.gpus[0])
        return model


class _Recipes(Recipes):
    framework = "mxnet"
    backend = _backend
    trainer = Trainer
    batch_stats = None
    count = staticmethod(count_right)
    tensors = staticmethod(replicas.model_tensors)

    @staticmethod
    def native(leaf: Any) -> Any:
        return leaf if _backend.is_tensor(leaf) else replicas.native(leaf)

    def scale_images(self, batch: Batch) -> Batch:
        images, labels = batch
        return images.reshape((-1, 1, *images.shape[1:])).astype("float32") / 255, labels.astype("int64")

    def from_first(self, make: Callable[[], Any]) -> Any:
        """There is one process: a launcher's several are refused, before they make folders."""
        checks.refuse_launcher()
        return make()

    def model(self, name: str, seed: int) -> Any:
        return initialise(MODELS[name](), seed)

    def nesterov(self, rate: float) -> Any:
        """MXNet's momentum remembers the rate, so a change acts later than in PyTorch; decay differs slightly, too."""
        return mx.optimizer.NAG(learning_rate=rate, momentum=0.9, wd=5e-4)

    def restore(self, model: Any, weights: bytes) -> None:
        checks.check_values(model)
        replicas.restore_model(model, weights)

    @contextlib.contextmanager
    def in_float64(self, make: Callable[[], Any], data: Arrays) -> Iterator[Any]:
        model = make()
        with replicas.numpy_like(replicas.of_model(model)):
            checks.make_parameters(model, data, 0)
            model.cast("float64")
            yield model

    # Accuracy

    @contextlib.contextmanager
    def predictors(self, net: Any, devices: Sequence[mx.Context | None]) -> Iterator[Sequence[Predictor]]:
        """A block answers on the device of its input, wherever it has a replica."""
        here = [device for device in devices if device is not None]
        with replicas.on(net, here) if here and _backend.is_model(net) else contextlib.nullcontext():
            yield [net] * len(devices)


BOOK = _Recipes()
train, load_data_fashion_mnist, split_batch = BOOK.train, BOOK.load_data_fashion_mnist, BOOK.split_batch
load_model, load_weights, accuracy = BOOK.load_model, BOOK.load_weights, BOOK.accuracy
evaluate_accuracy_gpu, evaluate_accuracy_gpus = BOOK.evaluate_accuracy_gpu, BOOK.evaluate_accuracy_gpus
__all__ = ["Trainer", "load_model", "load_weights", *NAMES]
