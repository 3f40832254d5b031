"""The textbook's classes, models and functions for PyTorch, and what ``manyhands train`` takes of it.

Images are 28 by 28 (Fashion-MNIST) unless a docstring says more. All parameters exist as soon as a model is made, so
that it can be initialised, compiled, and sent to another process before it has seen a sample.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from manyhands.backends.torch import compat
from manyhands.backends.torch import devices as _backend
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import RESNET18, SMALL_RESNET, residual_width
from manyhands.book.trainer import BookTrainer, Plotting, train_fashion_mnist
from manyhands.book.vocabulary import HyperParameters
from manyhands.errors import BadSettings, type_in_words
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data import fashion_mnist
from manyhands.training.data.order import spread
from manyhands.training.loss.own_step import default
from manyhands.training.options import Step
from manyhands.training.result import Result
from manyhands.training.torch import trainer as _trainer
from manyhands.training.torch.data.sources import Arrays, scale_images, source
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state
from manyhands.training.torch.state.module_state import evaluating

# Models


AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2)`` halves the image and doubles the channels. With one
    number, ``Residual(128, ...)``, it is the number of channels that come out; those that come in are
    seen at the first call (PyTorch's lazy layers).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
    ) -> None:
        super().__init__()
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        known = None if out_channels is None else in_channels
        self.conv1 = _convolution(known, width, kernel_size=3, stride=strides, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv3 = _convolution(known, width, kernel_size=1, stride=strides) if use_1x1conv else None
        self.bn1 = nn.BatchNorm2d(width)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        Y = functional.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return functional.relu(Y + around)


def _convolution(
    in_channels: int | None, out_channels: int, *, kernel_size: int, stride: int, padding: int = 0
) -> nn.Conv2d:
    if in_channels is None:
        return nn.LazyConv2d(out_channels, kernel_size, stride, padding)
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> nn.Sequential:
    """The names of the parts are the book's, so that saved weights fit both ways."""
    width = widths[0]
    net = nn.Sequential(nn.Conv2d(in_channels, width, 3, stride=1, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
        first = Residual(before, after) if number == 1 else Residual(before, after, use_1x1conv=True, strides=2)
        rest = [Residual(after, after) for _ in range(blocks - 1)]
        net.add_module(f"resnet_block{number}", nn.Sequential(first, *rest))
    net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
    net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(widths[-1], num_classes)))
    return net


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * 28 * 28, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


@torch.no_grad()
def initialise(net: AnyModule, seed: int | None = None) -> AnyModule:
    """Draw new parameters for all linear and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases by PyTorch's own rule. They are drawn on the host, so that a seed
    gives the same net on every device, and without touching the random state of the program.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, layer in net.named_modules():
        if not isinstance(layer, (nn.Linear, compat.Convolution)):
            continue
        if nn.parameter.is_lazy(layer.weight):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has no shape yet, so nothing can be drawn for it: "
                "call the net once on a batch first, or use a layer that is given its input size"
            )
        weight = torch.empty(layer.weight.shape)
        layer.weight.copy_(nn.init.xavier_uniform_(weight, generator=generator))
        if layer.bias is not None:
            bound = 1 / math.sqrt(max(weight[0].numel(), 1))
            layer.bias.copy_(torch.empty(layer.bias.shape).uniform_(-bound, bound, generator=generator))
    return net


# Module and DataModule


class Module(torch.nn.Module, HyperParameters, Plotting):
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    @default
    def loss(self, y_hat: Any, y: Any) -> torch.Tensor:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return torch.nn.functional.cross_entropy(y_hat, y)

    def forward(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        net: Any = self.net
        return net(*inputs)

    @default
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(self(*batch[:-1]), batch[-1])

    @default
    def validation_step(self, batch: Any) -> torch.Tensor:
        return self.loss(self(*batch[:-1]), batch[-1])

    @default
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=getattr(self, "lr", 0.1))

    def apply_init(self, inputs: Any, init: Callable[[torch.nn.Module], None] | None = None) -> None:
        """Run lazy layers once, so that their parameters exist; then initialise."""
        self(*inputs)
        if init is not None:
            self.apply(init)


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__

    def get_tensorloader(self, tensors: Any, train: bool, indices: slice = slice(0, None)) -> Arrays:
        """Batches of those tensors, shuffled for training."""
        return Arrays(tuple(t[indices] for t in tensors), None, getattr(self, "batch_size", None), shuffle=train)


# Fashion-MNIST


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 1, 28, 28) from 0 to 1, labels)."""
    return data(fashion_mnist.load(path), batch_size)


def data(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    def arrays(part: fashion_mnist.Images, *, shuffle: bool) -> Arrays:
        tensors = (torch.from_numpy(part.images), torch.from_numpy(part.labels))
        return Arrays(tensors, scale_images, batch_size, shuffle)

    return arrays(data.train, shuffle=True), arrays(data.test, shuffle=False)


# Accuracy


class _Accuracy(Accuracy[torch.device]):
    models = (nn.Module,)
    model_name = "torch.nn.Module"

    def count(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        classes = y_hat.argmax(dim=1) if y_hat.dim() > 1 and y_hat.shape[1] > 1 else y_hat
        check_shapes(y_hat, classes, y)
        return (classes.reshape(y.shape).to(y.dtype) == y).sum()

    def homes(self, net: Any) -> list[torch.device]:
        return list(dict.fromkeys(p.device for p in net.parameters())) if isinstance(net, nn.Module) else []

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[torch.device | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        with torch.no_grad(), evaluating(net):
            yield [self._replica(net, device) if replicate else net for device in devices]

    def _replica(self, net: nn.Module, device: torch.device | None) -> nn.Module:
        """The net itself where it is on the device, else a copy of it there."""
        assert device is not None
        if all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
            return net
        return self.place.to_leaf(copy.deepcopy(net), device)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus


# The trainer


class Trainer(BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__


def train(net: torch.nn.Module, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
    """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
    return train_fashion_mnist(Trainer, load_data_fashion_mnist, net, num_gpus, batch_size, lr, num_epochs)


# The command: see :class:`manyhands.training.commands.recipes.Recipes`


_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def model(name: str, seed: int) -> torch.nn.Module:
    return initialise(MODELS[name](num_classes=10), seed)


def nesterov(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


from_first = world.from_first


def arrays(data: Any) -> Arrays:
    arrays = source(data)
    if not isinstance(arrays, Arrays):
        raise BadSettings(f"give the data as (X, y) tensors or arrays, not {type_in_words(data)}")
    return arrays


def trained(model: torch.nn.Module, data: Arrays, way: Way, loss: Any = None) -> dict[str, np.ndarray[Any, Any]]:
    net = copy.deepcopy(model).to(_DTYPES[way.precision])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(nudged(parameter.numpy(force=True), way.nudge)))
    numbers = torch.from_numpy(spread(data.count, way.samples))
    part = Arrays(tuple(t[numbers.to(t.device)] for t in data.tensors), data.prepare, way.batch_size)
    step = Step(shares=way.shares, batch_stats="global")
    # An optimizer with a memory, so that differences of early steps would show.
    momentum = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    how: dict[str, Any] = {"step": step, "precision": way.precision, "loss": loss}
    trainer = Trainer(way.epochs, optimizer=momentum, quiet=True, devices=f"cpu:{way.devices}", **how)
    trainer.fit(net, part)
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}


def layers(model: torch.nn.Module) -> list[Any]:
    return list(model.modules())


def load_model(run: str | Path) -> torch.nn.Module:
    """The model that ``manyhands train`` has trained in a run, on the CPU and in evaluation mode."""
    name, weights = recipes.model_and_weights(run, "torch")
    net = MODELS[name](num_classes=10)
    job_state.restore_model(net, weights)
    return net.eval()


def load_weights(model: torch.nn.Module, run: str | Path) -> torch.nn.Module:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    The model is in evaluation mode then. If the run averaged its weights (``mh.EMA``), these are the average.
    """
    job_state.restore_model(model, recipes.weights_of(run, "torch"))
    return model.eval()
