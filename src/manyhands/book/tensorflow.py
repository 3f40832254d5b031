"""The models that examples and experiments train, written with Keras's own keras.layers.

Images are 28 by 28 (Fashion-MNIST) with the channels last, unless a docstring says more. A layer bears the name that
PyTorch's twin of the model gives it (``3``, ``resnet_block2.0``), so that weights can go from one to the other; where
channels are laid out in a row, they are laid out as PyTorch does it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands import tree
from manyhands.backends.tensorflow import devices as _backend
from manyhands.backends.tensorflow.devices import TensorFlowDevice
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import RESNET18, SMALL_RESNET, residual_width
from manyhands.book.trainer import BookTrainer, Plotting, fashion_mnist_arrays, train_fashion_mnist
from manyhands.book.vocabulary import HyperParameters
from manyhands.device import Device
from manyhands.errors import BadSettings
from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data import fashion_mnist
from manyhands.training.data.sources import Array, Arrays, Batch
from manyhands.training.loss.own_step import default
from manyhands.training.options import Step
from manyhands.training.result import Result
from manyhands.training.tensorflow import checks, naming
from manyhands.training.tensorflow import trainer as _trainer
from manyhands.training.tensorflow.objective import cross_entropy
from manyhands.training.tensorflow.optimizers import Nesterov
from manyhands.training.tensorflow.ranks import world
from manyhands.training.tensorflow.step import precision

# Models


_LAST = "channels_last"  # said everywhere: a program may have another default


@keras.saving.register_keras_serializable("manyhands")
class Residual(keras.Layer):  # type: ignore[misc]
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(128, use_1x1conv=True, strides=2)`` halves the image and gives 128 channels. Keras sees at the first call
    how many come in; ``Residual(64, 128, ...)``, with both numbers, is the same.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        self.arguments = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "use_1x1conv": use_1x1conv,
            "strides": strides,
        }
        # Padding "same" would put a stride of two on other pixels than PyTorch's, which pads both sides alike.
        self.pad = keras.layers.ZeroPadding2D(1, data_format=_LAST, name="pad")
        self.conv1 = keras.layers.Conv2D(width, 3, strides, data_format=_LAST, name="conv1")
        self.conv2 = keras.layers.Conv2D(width, 3, padding="same", data_format=_LAST, name="conv2")
        self.conv3 = keras.layers.Conv2D(width, 1, strides, data_format=_LAST, name="conv3") if use_1x1conv else None
        self.bn1, self.bn2 = _batch_norm("bn1"), _batch_norm("bn2")

    def build(self, input_shape: Sequence[int | None]) -> None:
        padded = self.pad.compute_output_shape(input_shape)
        inner = self.conv1.compute_output_shape(padded)
        for layer, shape in ((self.conv1, padded), (self.bn1, inner), (self.conv2, inner), (self.bn2, inner)):
            layer.build(shape)
        if self.conv3 is not None:
            self.conv3.build(input_shape)

    def call(self, X: Any, training: bool | None = None) -> Any:
        Y = keras.ops.relu(self.bn1(self.conv1(self.pad(X)), training=training))
        Y = self.bn2(self.conv2(Y), training=training)
        around = X if self.conv3 is None else self.conv3(X)
        return keras.ops.relu(Y + around)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        return self.conv1.compute_output_shape(self.pad.compute_output_shape(input_shape))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


def _batch_norm(name: str) -> keras.Layer:
    """Running statistics move by a tenth of the way, as PyTorch's do."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> keras.Sequential:
    net = [
        keras.layers.Input((None, None, in_channels)),
        keras.layers.Conv2D(widths[0], 3, padding="same", data_format=_LAST, name="0"),
        _batch_norm("1"),
        keras.layers.ReLU(name="2"),
    ]
    before = widths[0]
    for stage, width in enumerate(widths, start=1):
        for block in range(blocks):
            halves = stage > 1 and block == 0
            name = f"resnet_block{stage}.{block}"
            net.append(Residual(before, width, use_1x1conv=halves, strides=2 if halves else 1, name=name))
            before = width
    net.append(keras.layers.GlobalAveragePooling2D(data_format=_LAST, name="global_avg_pool"))
    net.append(keras.layers.Dense(num_classes, name="fc.1"))
    return keras.Sequential(net)


def lenet(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, in_channels)),
            keras.layers.Conv2D(6, 5, padding="same", activation="relu", data_format=_LAST, name="0"),
            keras.layers.MaxPooling2D(2, data_format=_LAST, name="2"),
            keras.layers.Conv2D(16, 5, activation="relu", data_format=_LAST, name="3"),
            keras.layers.MaxPooling2D(2, data_format=_LAST, name="5"),
            *_flatten(),
            keras.layers.Dense(120, activation="relu", name="7"),
            keras.layers.Dense(84, activation="relu", name="9"),
            keras.layers.Dense(num_classes, name="11"),
        ]
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, in_channels)),
            *_flatten(),
            keras.layers.Dense(256, activation="relu", name="1"),
            keras.layers.Dense(num_classes, name="3"),
        ]
    )


def _flatten() -> list[keras.Layer]:
    """Channel by channel, as where the channels come first."""
    return [keras.layers.Permute((3, 1, 2), name="channels_first"), keras.layers.Flatten(name="flatten")]


MODELS: dict[str, Callable[..., keras.Sequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


def initialise(net: Any, seed: int | None = None) -> Any:
    """Draw new parameters for all dense and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases uniform within one over the root of the inputs. They are drawn on the host, so
    that a seed gives the same net on every device, and without touching the random state of the program.
    """
    random = np.random.RandomState(seed)
    inputs: dict[str, int] = {}
    for variable in net.weights:
        layer, _, name = variable.path.rpartition("/")
        if name == "kernel":
            area = math.prod(variable.shape[:-2])
            inputs[layer] = area * variable.shape[-2]
            bound = math.sqrt(6 / (inputs[layer] + area * variable.shape[-1]))
        elif name == "bias" and layer in inputs:
            bound = 1 / math.sqrt(inputs[layer])
        else:
            continue
        variable.assign(random.uniform(-bound, bound, variable.shape))
    return net


# Module and DataModule


class Module(keras.Model, HyperParameters, Plotting):  # type: ignore[misc]
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        del self.loss  # Keras keeps there what compile() was given, and would hide the method
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    @default
    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return tf.reduce_mean(cross_entropy(y_hat, y))

    @default
    def forward(self, *inputs: Any) -> Any:
        net = getattr(self, "net", None)
        if net is None:
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        return net(*inputs)

    @default
    def call(self, X: Any, *more: Any) -> Any:
        """Keras hands ``training`` on to the layers within."""
        return self.forward(X, *more)

    @default
    def training_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1], training=True), batch[-1])

    @default
    def validation_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1], training=False), batch[-1])

    @default
    def configure_optimizers(self) -> Any:
        return keras.optimizers.SGD(getattr(self, "lr", 0.1))


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__
    native = staticmethod(tf.convert_to_tensor)


# Fashion-MNIST


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 28, 28, 1) from 0 to 1, labels)."""
    return data(fashion_mnist.load(path), batch_size)


def data(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    return fashion_mnist_arrays(data, scale_images, tf.convert_to_tensor, batch_size)


def scale_images(batch: Batch) -> Batch:
    """Bytes of grey images to numbers from 0 to 1 with a channel axis: done on the device, after the gather."""
    images, labels = batch
    return tf.cast(images, tf.float32)[..., tf.newaxis] / 255, tf.cast(labels, tf.int64)


# Accuracy


class _Accuracy(Accuracy[TensorFlowDevice]):
    models = (keras.Layer,)
    model_name = "Keras model"

    def count(self, y_hat: Any, y: Any) -> Any:
        with tf.device(_backend.device_of(y_hat)):
            classes = tf.argmax(y_hat, axis=1) if len(y_hat.shape) > 1 and y_hat.shape[1] > 1 else y_hat
            check_shapes(y_hat, classes, y)
            return tf.reduce_sum(tf.cast(tf.cast(tf.reshape(classes, y.shape), y.dtype) == y, tf.int64))

    def native(self, leaf: Any) -> Any:
        return tf.convert_to_tensor(leaf)

    def on(self, device: TensorFlowDevice | None) -> AbstractContextManager[object]:
        return tf.device(device)  # type: ignore[no-any-return]

    def build(self, net: Any, X: Any) -> None:
        if not net.built:
            net(tree.map_leaves(lambda leaf: leaf[:1], X), training=False)

    def homes(self, net: Any) -> list[TensorFlowDevice]:
        """Where the net is, or else where TensorFlow puts things."""
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, keras.Layer) else []
        return [_backend.device_of(tensors[0] if tensors else tf.constant(0.0))]

    def destination(self, net: Any, device: TensorFlowDevice | Device | str | None) -> TensorFlowDevice:
        """Any device will do: the net is called with copies of its weights there."""
        return self.homes(net)[0] if device is None else self.place.existing(device)

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[TensorFlowDevice | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        yield [_OnDevice(net, device) if isinstance(net, keras.Layer) else net for device in devices]


class _OnDevice:
    """The net in evaluation mode, with weights that are on the device: copied at the first call, if they are not."""

    def __init__(self, net: Any, device: TensorFlowDevice | None) -> None:
        self._net, self._device = net, device
        self._output: Predictor | None = None

    def __call__(self, X: Any) -> Any:
        if self._output is None:
            self._output = self._first()
        return self._output(X)

    def _first(self) -> Predictor:
        net, device = self._net, self._device
        assert device is not None
        if not net.built or all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
            return lambda X: net(X, training=False)
        with tf.device(device):
            copies = [[tf.identity(v) for v in part] for part in (net.trainable_variables, net.non_trainable_variables)]
        return lambda X: net.stateless_call(*copies, X, training=False)[0]


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


_POLICIES = {"fp64": "float64", "fp32": "float32"}


def model(name: str, seed: int) -> Any:
    return initialise(MODELS[name](num_classes=10), seed)


nesterov, arrays, from_first = Nesterov, recipes.arrays, world.from_first


def trained(model: Any, data: Arrays, way: Way, loss: Any = None) -> dict[str, Array]:
    part = data.spread(way.samples)
    net = precision.like(model, _POLICIES[way.precision], checks.few_samples(part, 2))
    net.set_weights([nudged(weight, way.nudge) for weight in net.get_weights()])
    step = Step(shares=way.shares, batch_stats="global")
    options: dict[str, Any] = {"step": step, "loss": loss, "devices": f"cpu:{way.devices}"}
    momentum = keras.optimizers.SGD(0.02, momentum=0.9)  # has a memory, so that differences of early steps show
    Trainer(way.epochs, optimizer=momentum, batch_size=way.batch_size, quiet=True, **options).fit(net, part)
    return dict(zip(naming.names(net), net.get_weights(), strict=True))


def layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def load_model(run: str | Path) -> Any:
    """The model that ``manyhands train`` has trained in a run."""
    name, weights = recipes.model_and_weights(run, "tensorflow")
    net = MODELS[name](num_classes=10)
    _restore(net, weights)
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    If the run averaged its weights (``mh.EMA``), these are the average.
    """
    if not model.built:
        raise BadSettings("the model has no variables yet: call it on a few samples first, or model.build(shape)")
    _restore(model, recipes.weights_of(run, "tensorflow"))
    return model


def _restore(net: Any, weights: bytes) -> None:
    expected = dict(zip(naming.names(net), net.get_weights(), strict=True))
    net.set_weights(list(tensors.fitting(weights, expected, "weights of another model").values()))
