"""The textbook's classes, models and functions for TensorFlow, written with Keras's own layers.

Images have their channels last. A layer bears the name that PyTorch's twin of the model gives it (``3``,
``resnet_block2.0``), so that weights can go from one to the other; where channels are laid out in a row, they are laid
out as PyTorch does it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as _backend
from manyhands.backends.tensorflow.devices import TensorFlowDevice
from manyhands.book import NAMES, recipes
from manyhands.book.models import Models, Size
from manyhands.book.recipes import Predictor, Recipes
from manyhands.book.vocabulary import *  # noqa: F403
from manyhands.errors import BadSettings
from manyhands.training.checkpoints import tensors
from manyhands.training.data.sources import Array, Arrays, Batch
from manyhands.training.loss.own_step import default
from manyhands.training.tensorflow import trainer as _trainer
from manyhands.training.tensorflow import world
from manyhands.training.tensorflow.model import names
from manyhands.training.tensorflow.objective import cross_entropy

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
        width = out_channels or in_channels
        # Padding "same" would put a stride of two on other pixels than PyTorch's, which pads both sides alike.
        self.pad = keras.layers.ZeroPadding2D(1, data_format=_LAST, name="pad")
        self.conv1 = keras.layers.Conv2D(width, 3, strides, data_format=_LAST, name="conv1")
        self.conv2 = keras.layers.Conv2D(width, 3, padding="same", data_format=_LAST, name="conv2")
        self.conv3 = keras.layers.Conv2D(width, 1, strides, data_format=_LAST, name="conv3") if use_1x1conv else None
        self.bn1, self.bn2 = _batch_norm("bn1"), _batch_norm("bn2")

    def call(self, X: Any, training: bool | None = None) -> Any:
        Y = keras.ops.relu(self.bn1(self.conv1(self.pad(X)), training=training))
        Y = self.bn2(self.conv2(Y), training=training)
        around = X if self.conv3 is None else self.conv3(X)
        return keras.ops.relu(Y + around)


def _batch_norm(name: str) -> keras.Layer:
    """Running statistics move by a tenth of the way, as PyTorch's do."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def _convolution(inputs: int, outputs: int, size: int, strides: int = 1, padding: int = 0) -> Any:
    kind = "same" if padding else "valid"
    return functools.partial(keras.layers.Conv2D, outputs, size, strides, padding=kind, data_format=_LAST)


def _flatten(name: str) -> keras.Layer:
    """Channel by channel, as where the channels come first."""
    channels_first = keras.layers.Permute((3, 1, 2), name="channels_first")
    return keras.Sequential([channels_first, keras.layers.Flatten(name="flatten")], name=name)


def _chain(layers: Mapping[str, Any], size: Size) -> keras.Sequential:
    net = [keras.layers.Input(size)]
    for name, layer in layers.items():
        inner = layer if isinstance(layer, list) else None
        net += [layer(name=name)] if inner is None else [one(name=f"{name}.{i}") for i, one in enumerate(inner)]
    return keras.Sequential(net)


# Each layer is a function of its name: Keras's get theirs when they are made.
_models = Models(
    convolution=_convolution,
    linear=lambda inputs, outputs: functools.partial(keras.layers.Dense, outputs),
    norm=lambda width: _batch_norm,
    residual=functools.partial(functools.partial, Residual),
    relu=lambda: keras.layers.ReLU,
    pool=lambda: functools.partial(keras.layers.MaxPooling2D, 2, data_format=_LAST),
    average=lambda: functools.partial(keras.layers.GlobalAveragePooling2D, data_format=_LAST, keepdims=True),
    flatten=lambda: _flatten,
    chain=_chain,
)
resnet18, lenet = _models.resnet18, _models.lenet
MODELS = _models.by_name()


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


class Module(recipes.Module, keras.Model):  # type: ignore[misc]
    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__(plot_train_per_epoch, plot_valid_per_epoch)
        del self.loss  # Keras keeps there what compile() was given, and would hide the method

    @default
    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return tf.reduce_mean(cross_entropy(y_hat, y))

    def build(self, *shapes: Any) -> None:
        """The layers within are built when they are called; Keras would try it beforehand, and warn that it failed."""

    @default
    def call(self, X: Any, *more: Any) -> Any:
        """Keras hands ``training`` on to the layers within."""
        return self.forward(X, *more)

    def output(self, inputs: Any, *, training: bool) -> Any:
        return self(*inputs, training=training)

    @default
    def configure_optimizers(self) -> Any:
        return keras.optimizers.SGD(getattr(self, "lr", 0.1))


class DataModule(recipes.DataModule):
    native = staticmethod(tf.convert_to_tensor)


# The trainer, and the functions of the book and of the command


class Trainer(recipes.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__


class _Recipes(Recipes):
    framework = "tensorflow"
    backend = _backend
    trainer = Trainer
    native = staticmethod(tf.convert_to_tensor)
    from_first = staticmethod(world.from_first)

    def scale_images(self, batch: Batch) -> Batch:
        images, labels = batch
        return tf.cast(images, tf.float32)[..., tf.newaxis] / 255, tf.cast(labels, tf.int64)

    def model(self, name: str, seed: int) -> Any:
        return initialise(MODELS[name](), seed)

    def nesterov(self, rate: float) -> Any:
        """Keras shrinks the weights beside the momentum, so its decay is ten times PyTorch's for the same effect."""
        return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=5e-3)

    def tensors(self, model: Any) -> dict[str, Array]:
        return dict(zip(names(model), model.get_weights(), strict=True))

    def restore(self, model: Any, weights: bytes) -> None:
        if not model.built:
            raise BadSettings("the model has no variables yet: call it on a few samples first, or model.build(shape)")
        saved = tensors.arrays_for(weights, self.tensors(model), "weights of another model")
        model.set_weights(list(saved.values()))

    @contextlib.contextmanager
    def in_float64(self, make: Callable[[], Any], data: Arrays) -> Iterator[Any]:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        try:
            model = make()
        finally:
            keras.config.set_dtype_policy(before)
        if not model.built:
            model(data.few(2, tf.convert_to_tensor)[0], training=False)
        yield model

    # Accuracy

    def count(self, y_hat: Any, y: Any) -> Any:
        with tf.device(_backend.device_of(y_hat)):
            classes = tf.argmax(y_hat, axis=1) if len(y_hat.shape) > 1 and y_hat.shape[1] > 1 else y_hat
            return tf.reduce_sum(tf.cast(tf.cast(tf.reshape(classes, y.shape), y.dtype) == y, tf.int64))

    @contextlib.contextmanager
    def predictors(self, net: Any, devices: Sequence[Any]) -> Iterator[Sequence[Predictor]]:
        """TensorFlow copies the weights of a net that is elsewhere, batch by batch."""

        def on(device: TensorFlowDevice) -> Predictor:
            def predict(X: Any) -> Any:
                with tf.device(device):
                    return net(X, training=False)

            return predict if isinstance(net, keras.Layer) else net

        yield [on(device) for device in devices]


BOOK = _Recipes()
train, load_data_fashion_mnist, split_batch = BOOK.train, BOOK.load_data_fashion_mnist, BOOK.split_batch
load_model, load_weights, accuracy = BOOK.load_model, BOOK.load_weights, BOOK.accuracy
evaluate_accuracy_gpu, evaluate_accuracy_gpus = BOOK.evaluate_accuracy_gpu, BOOK.evaluate_accuracy_gpus
__all__ = ["Trainer", "load_model", "load_weights", *NAMES]
