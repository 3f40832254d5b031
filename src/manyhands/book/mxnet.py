"""The models that examples and experiments train, written with Gluon's own layers.

Images are 28 by 28 (Fashion-MNIST) unless a docstring says more. A new model has shapes but, as always in Gluon, no
weights: ``initialise`` draws them, ``net.initialize()`` too, and a trainer does for parameters without values.
They work in both of MXNet's modes, with ``mx.np`` (``npx.set_np()``) and with ``mx.nd``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from manyhands.backends.mxnet import devices as _backend
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import RESNET18, SMALL_RESNET, residual_width
from manyhands.book.trainer import BookTrainer, Plotting, fashion_mnist_arrays, train_fashion_mnist
from manyhands.book.vocabulary import HyperParameters
from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data import fashion_mnist
from manyhands.training.data.sources import Arrays, Batch
from manyhands.training.loss.own_step import default
from manyhands.training.mxnet import checks, modes, state
from manyhands.training.mxnet import trainer as _trainer
from manyhands.training.mxnet.modes import native
from manyhands.training.mxnet.objective import count_right
from manyhands.training.mxnet.state import initialise
from manyhands.training.mxnet.step import replicas
from manyhands.training.options import Step
from manyhands.training.result import Result

# Models


class Residual(nn.HybridBlock):  # type: ignore[misc]
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2)`` halves the image and doubles the channels. With one
    number, ``Residual(128, ...)``, it is the number of channels that come out; those that come in are
    seen at the first call.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
        **of_block: Any,
    ) -> None:
        super().__init__(**of_block)
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        known = 0 if out_channels is None else in_channels
        self.conv1 = nn.Conv2D(width, 3, strides, padding=1, in_channels=known)
        self.conv2 = nn.Conv2D(width, 3, padding=1, in_channels=width)
        self.conv3 = nn.Conv2D(width, 1, strides, in_channels=known) if use_1x1conv else None
        self.bn1 = nn.BatchNorm(in_channels=width)
        self.bn2 = nn.BatchNorm(in_channels=width)
        self.relu = nn.Activation("relu")  # a layer, because the function has another name in each of MXNet's modes

    def hybrid_forward(self, F: Any, X: Any) -> Any:
        Y = self.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return self.relu(Y + around)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> nn.HybridSequential:
    """The names of the parts are the book's, in PyTorch, so that weights can move between the frameworks."""
    width = widths[0]
    stem = nn.Conv2D(width, 3, strides=1, padding=1, in_channels=in_channels)
    net = _sequential(stem, nn.BatchNorm(in_channels=width), nn.Activation("relu"))
    for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
        first = Residual(before, after) if number == 1 else Residual(before, after, use_1x1conv=True, strides=2)
        rest = [Residual(after, after) for _ in range(blocks - 1)]
        net.register_child(_sequential(first, *rest), f"resnet_block{number}")
    net.register_child(nn.GlobalAvgPool2D(), "global_avg_pool")
    net.register_child(_sequential(nn.Flatten(), nn.Dense(num_classes, in_units=widths[-1])), "fc")
    return net


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return _sequential(
        nn.Conv2D(6, 5, padding=2, in_channels=in_channels),
        nn.Activation("relu"),
        nn.MaxPool2D(2),
        nn.Conv2D(16, 5, in_channels=6),
        nn.Activation("relu"),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Dense(120, in_units=16 * 5 * 5),
        nn.Activation("relu"),
        nn.Dense(84, in_units=120),
        nn.Activation("relu"),
        nn.Dense(num_classes, in_units=84),
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return _sequential(
        nn.Flatten(),
        nn.Dense(256, in_units=in_channels * 28 * 28),
        nn.Activation("relu"),
        nn.Dense(num_classes, in_units=256),
    )


def _sequential(*layers: nn.HybridBlock) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*layers)
    return net


MODELS: dict[str, Callable[..., nn.HybridSequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


# Module and DataModule


class Module(gluon.Block, HyperParameters, Plotting):  # type: ignore[misc]
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    @default
    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return gluon.loss.SoftmaxCrossEntropyLoss()(y_hat, y).mean()

    def forward(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        return self.net(*inputs)

    @default
    def training_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1]), batch[-1])

    @default
    def validation_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1]), batch[-1])

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


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__
    native = staticmethod(modes.native)


# Fashion-MNIST


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 1, 28, 28) from 0 to 1, labels)."""
    return data(fashion_mnist.load(path), batch_size)


def data(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    return fashion_mnist_arrays(data, scale_images, native, batch_size)


def scale_images(batch: Batch) -> Batch:
    """Bytes of grey images to numbers from 0 to 1 with a channel axis: done on the device, after the gather."""
    images, labels = batch
    return images.reshape((-1, 1, *images.shape[1:])).astype("float32") / 255, labels.astype("int64")


# Accuracy


class _Accuracy(Accuracy[mx.Context]):
    models = (mx.gluon.Block,)
    model_name = "gluon.Block"

    def count(self, y_hat: Any, y: Any) -> Any:
        check_shapes(y_hat, y_hat[:, 0] if len(y_hat.shape) > 1 and y_hat.shape[1] > 1 else y_hat, y)
        return count_right(y_hat, y)

    def read(self, count: Any) -> int:
        return int(count.asnumpy()[0])

    def homes(self, net: Any) -> list[mx.Context]:
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if _backend.is_model(net) else []
        return list(dict.fromkeys(tensor.ctx for tensor in tensors))

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[mx.Context | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        """A block answers on the device of its input, wherever it has a replica."""
        mode: contextlib.AbstractContextManager[None]
        if replicate:
            mode = replicas.on(net, devices)
        elif _backend.is_model(net):
            mode = modes.numpy_like(modes.of_model(net))
        else:
            mode = contextlib.nullcontext()
        with mode:
            yield [net] * len(devices)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus


# The trainer


class Trainer(BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__


def train(net: Any, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
    """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
    return train_fashion_mnist(Trainer, load_data_fashion_mnist, net, num_gpus, batch_size, lr, num_epochs)


# The command: see :class:`manyhands.training.commands.recipes.Recipes`


_DTYPES = {"fp64": "float64", "fp32": "float32"}


def model(name: str, seed: int) -> Any:
    return initialise(MODELS[name](num_classes=10), seed)


def nesterov(rate: float) -> Any:
    """SGD with Nesterov's momentum and weight decay, as MXNet has it.

    The rate goes into what the momentum remembers, so a rate that changes acts later than in PyTorch; weight decay
    differs slightly, too. At a constant rate and without decay the two are the same.
    """
    return mx.optimizer.NAG(learning_rate=rate, momentum=0.9, wd=5e-4)


arrays = recipes.arrays


def from_first(make: Callable[[], Any]) -> Any:
    """There is one process: a launcher's several are refused, before they make folders."""
    checks.refuse_launcher()
    return make()


def trained(model: Any, data: Arrays, way: Way, loss: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    """The model itself is trained, and has its own values again afterwards: Gluon's models cannot be copied."""
    with modes.numpy_like(modes.of_model(model)):
        checks.make_parameters(model, data, 0)
    part = Arrays(data.spread(way.samples).arrays, data.prepare, data.native, way.batch_size)
    step = Step(shares=way.shares, batch_stats="global")
    options: dict[str, Any] = {"step": step, "precision": way.precision, "loss": loss, "devices": f"cpu:{way.devices}"}
    momentum = mx.optimizer.SGD(learning_rate=0.02, momentum=0.9)
    with replicas.on(model, [mx.cpu()], _DTYPES[way.precision]):
        before = tensors.pack(state.model_tensors(model))
        first = {name: nudged(tensor, way.nudge) for name, tensor in state.model_tensors(model).items()}
        try:
            state.restore_model(model, tensors.pack(first))
            Trainer(way.epochs, optimizer=momentum, quiet=True, **options).fit(model, part)
            return state.model_tensors(model)
        finally:
            state.restore_model(model, before)


def layers(model: Any) -> list[Any]:
    return [model, *(layer for child in model._children.values() for layer in layers(child))]


def load_model(run: str | Path) -> Any:
    """The model that ``manyhands train`` has trained in a run, on the CPU."""
    name, weights = recipes.model_and_weights(run, "mxnet")
    net = MODELS[name](num_classes=10)
    net.initialize(ctx=mx.cpu())
    state.restore_model(net, weights)
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    If the run averaged its weights (``mh.EMA``), these are the average.
    """
    checks.check_values(model)
    state.restore_model(model, recipes.weights_of(run, "mxnet"))
    return model
