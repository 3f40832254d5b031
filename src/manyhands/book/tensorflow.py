"""The textbook's classes, models and functions for TensorFlow, written with Keras's own layers.

Images have their channels last. A layer bears the name that PyTorch's twin of the model gives it (``3``,
``resnet_block2.0``), so that weights can go from one to the other; where channels are laid out in a row, they are laid
out as PyTorch does it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from manyhands import tree
from manyhands.backends.tensorflow import devices as _backend
from manyhands.backends.tensorflow.devices import TensorFlowDevice
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import Layers, Models, Size, residual_width
from manyhands.book.recipes import Recipes, Way
from manyhands.device import Device
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


# Each layer is a function of its name here: Keras's get theirs when they are made.
_models = Models(
    Layers(
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
)
resnet18, small_resnet, lenet, mlp = _models.resnet18, _models.small_resnet, _models.lenet, _models.mlp
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


class Module(_book.Module, keras.Model):  # type: ignore[misc]
    __doc__ = _book.Module.__doc__

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__(plot_train_per_epoch, plot_valid_per_epoch)
        del self.loss  # Keras keeps there what compile() was given, and would hide the method

    @default
    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return tf.reduce_mean(cross_entropy(y_hat, y))

    @default
    def call(self, X: Any, *more: Any) -> Any:
        """Keras hands ``training`` on to the layers within."""
        return self.forward(X, *more)

    def output(self, inputs: Any, *, training: bool) -> Any:
        return self(*inputs, training=training)

    @default
    def configure_optimizers(self) -> Any:
        return keras.optimizers.SGD(getattr(self, "lr", 0.1))


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__
    native = staticmethod(tf.convert_to_tensor)


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


# The trainer, and the functions of the book and of the command


class Trainer(_book.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__


@keras.saving.register_keras_serializable("manyhands")
class Nesterov(keras.optimizers.SGD):  # type: ignore[misc]
    """SGD with Nesterov's momentum and weight decay as PyTorch has it: a part of the gradient.

    Keras's own ``weight_decay`` shrinks the weights separately, so that momentum does not see it.
    """

    def __init__(self, learning_rate: float, decay: float = 5e-4, **kwargs: Any) -> None:
        super().__init__(learning_rate, **{"momentum": 0.9, "nesterov": True, **kwargs})
        if not math.isfinite(decay) or decay < 0:
            raise BadSettings(f"decay={decay!r}: give a number of zero or more")
        self.decay = decay

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient + self.decay * keras.ops.convert_to_tensor(variable), variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "decay": self.decay}


def _copy(model: Any, policy: str, data: Arrays) -> Any:
    """The model again in another precision, made of its configuration, with the same weights."""

    def with_policy(config: Any) -> Any:
        if isinstance(config, dict):
            if config.get("class_name") == "DTypePolicy":
                return {**config, "config": {"name": policy}}
            return {key: with_policy(value) for key, value in config.items()}
        return [with_policy(entry) for entry in config] if isinstance(config, list) else config

    def again(layer: Any) -> Any:
        return type(layer).from_config(with_policy(layer.get_config()))

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)  # of layers that others make
    try:
        # A model that is nothing but its layers is made of them: their classes need not be known by name.
        plain = type(model) is keras.Sequential or type(model) is Functional
        net = keras.models.clone_model(model, clone_function=again) if plain and model.built else again(model)
        if not net.built:
            net(data.few(2, tf.convert_to_tensor)[0], training=False)
        net.set_weights(model.get_weights())
    except Exception as error:
        raise BadSettings(f"a {type(model).__name__} cannot be made again of its get_config(): {error}") from error
    finally:
        keras.config.set_dtype_policy(before)
    for layer, other in zip(net._flatten_layers(), model._flatten_layers(), strict=True):
        layer.trainable = other.trainable
    return net


class _Recipes(Recipes):
    framework = "tensorflow"
    trainer = Trainer
    native = staticmethod(tf.convert_to_tensor)
    from_first = staticmethod(world.from_first)

    def scale_images(self, batch: Batch) -> Batch:
        images, labels = batch
        return tf.cast(images, tf.float32)[..., tf.newaxis] / 255, tf.cast(labels, tf.int64)

    def model(self, name: str, seed: int) -> Any:
        return initialise(MODELS[name](num_classes=10), seed)

    def nesterov(self, rate: float) -> Any:
        return Nesterov(rate)

    def momentum(self) -> Any:
        return keras.optimizers.SGD(0.02, momentum=0.9)

    def layers(self, model: Any) -> list[Any]:
        return list(model._flatten_layers())

    def tensors(self, model: Any) -> dict[str, Array]:
        return dict(zip(names(model), model.get_weights(), strict=True))

    def restore(self, model: Any, weights: bytes) -> None:
        if not model.built:
            raise BadSettings("the model has no variables yet: call it on a few samples first, or model.build(shape)")
        saved = tensors.fitting(weights, self.tensors(model), "weights of another model")
        model.set_weights(list(saved.values()))

    @contextlib.contextmanager
    def copied(self, model: Any, way: Way, data: Arrays) -> Iterator[Any]:
        yield _copy(model, {"fp64": "float64", "fp32": "float32"}[way.precision], data)


BOOK = _Recipes()
train, load_data_fashion_mnist = BOOK.train, BOOK.load_data_fashion_mnist
load_model, load_weights = BOOK.load_model, BOOK.load_weights
