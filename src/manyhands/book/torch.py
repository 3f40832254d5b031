"""The textbook's classes, models and functions for PyTorch, and what ``manyhands train`` takes of it.

All parameters exist as soon as a model is made, so that it can be initialised, compiled, and sent to another process
before it has seen a sample.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from manyhands.backends.torch import compat
from manyhands.backends.torch import devices as _backend
from manyhands.book import NAMES, models, recipes
from manyhands.book.models import Size
from manyhands.book.recipes import Predictor, Recipes
from manyhands.book.vocabulary import *  # noqa: F403
from manyhands.placement.moves import Placement
from manyhands.training.data.fashion_mnist import Images
from manyhands.training.data.sources import as_it_is
from manyhands.training.loss.own_step import default
from manyhands.training.torch import trainer as _trainer
from manyhands.training.torch.data.sources import Arrays, scale_images
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state
from manyhands.training.torch.state.module_state import evaluation_mode

AnyModule = TypeVar("AnyModule", bound=nn.Module)


# Models


def _convolution(inputs: int | None, outputs: int, size: int, strides: int = 1, padding: int = 0) -> nn.Module:
    if inputs is None:
        return nn.LazyConv2d(outputs, size, strides, padding)
    return nn.Conv2d(inputs, outputs, size, strides, padding)


class Residual(models.Residual, nn.Module):
    __doc__ = models.Residual.__doc__
    relu = staticmethod(functional.relu)

    def __init__(self, *channels: int, use_1x1conv: bool = False, strides: int = 1) -> None:
        super().__init__()
        self._build(_convolution, nn.BatchNorm2d, *channels, use_1x1conv=use_1x1conv, strides=strides)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self._output(X)  # type: ignore[no-any-return]


def _chain(layers: Mapping[str, Any], size: Size) -> nn.Sequential:
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, nn.Sequential(*layer) if isinstance(layer, list) else layer)
    return net


_models = models.Models(
    convolution=_convolution,
    linear=nn.Linear,
    norm=nn.BatchNorm2d,
    residual=Residual,
    relu=nn.ReLU,
    pool=functools.partial(nn.MaxPool2d, 2),
    average=functools.partial(nn.AdaptiveAvgPool2d, (1, 1)),
    flatten=nn.Flatten,
    chain=_chain,
)
resnet18, small_resnet, lenet, mlp = _models.resnet18, _models.small_resnet, _models.lenet, _models.mlp
MODELS = _models.by_name()


@torch.no_grad()
def initialise(net: AnyModule, seed: int | None = None) -> AnyModule:
    """Draw new parameters for all linear and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases by PyTorch's own rule. They are drawn on the host, so that a seed
    gives the same net on every device, and without touching the random state of the program.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, (nn.Linear, compat.Convolution)):
            weight = nn.init.xavier_uniform_(torch.empty(layer.weight.shape), generator=generator)
            layer.weight.copy_(weight)
            if layer.bias is not None:
                bound = max(weight[0].numel(), 1) ** -0.5
                layer.bias.copy_(torch.empty(layer.bias.shape).uniform_(-bound, bound, generator=generator))
    return net


# Module and DataModule


class Module(recipes.Module, nn.Module):
    @default
    def loss(self, y_hat: Any, y: Any) -> torch.Tensor:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return functional.cross_entropy(y_hat, y)

    @default
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=getattr(self, "lr", 0.1))

    def apply_init(self, inputs: Any, init: Callable[[nn.Module], None] | None = None) -> None:
        """Run lazy layers once, so that their parameters exist; then initialise."""
        self(*inputs)
        if init is not None:
            self.apply(init)


class DataModule(recipes.DataModule):
    def get_tensorloader(self, tensors: Any, train: bool, indices: slice = slice(0, None)) -> Arrays:
        """Batches of those tensors, shuffled for training."""
        return Arrays(tuple(t[indices] for t in tensors), None, getattr(self, "batch_size", None), shuffle=train)


# The trainer, and the functions of the book and of the command


class Trainer(recipes.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__


class _Recipes(Recipes):
    framework = "torch"
    backend = _backend
    trainer = Trainer
    scale_images = staticmethod(scale_images)
    from_first = staticmethod(world.from_first)
    native = staticmethod(as_it_is)

    def source(self, part: Images, batch_size: int | None, *, shuffle: bool) -> Arrays:
        tensors = (torch.from_numpy(part.images), torch.from_numpy(part.labels))
        return Arrays(tensors, scale_images, batch_size, shuffle)

    def model(self, name: str, seed: int) -> nn.Module:
        return initialise(MODELS[name](), seed)

    def nesterov(self, rate: float) -> Callable[..., torch.optim.Optimizer]:
        return functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def tensors(self, model: nn.Module) -> dict[str, Any]:
        return {name: tensor.numpy(force=True) for name, tensor in job_state.model_tensors(model).items()}

    def restore(self, model: nn.Module, weights: bytes) -> None:
        job_state.restore_model(model, weights)

    @contextlib.contextmanager
    def in_float64(self, make: Callable[[], Any], data: Any) -> Iterator[nn.Module]:
        yield make().double()

    # Accuracy

    def count(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        classes = y_hat.argmax(dim=1) if y_hat.dim() > 1 and y_hat.shape[1] > 1 else y_hat
        return (classes.reshape(y.shape).to(y.dtype) == y).sum()

    @contextlib.contextmanager
    def predictors(self, net: Any, devices: Sequence[torch.device | None]) -> Iterator[Sequence[Predictor]]:
        def on(device: torch.device | None) -> Predictor:
            if not isinstance(net, nn.Module) or device in (None, self.home(net)):
                return net  # type: ignore[no-any-return]
            return Placement(_backend).to_leaf(copy.deepcopy(net), device)

        with torch.no_grad(), evaluation_mode(net):
            yield [on(device) for device in devices]


BOOK = _Recipes()
train, load_data_fashion_mnist, split_batch = BOOK.train, BOOK.load_data_fashion_mnist, BOOK.split_batch
load_model, load_weights, accuracy = BOOK.load_model, BOOK.load_weights, BOOK.accuracy
evaluate_accuracy_gpu, evaluate_accuracy_gpus = BOOK.evaluate_accuracy_gpu, BOOK.evaluate_accuracy_gpus
__all__ = ["Trainer", "load_model", "load_weights", *NAMES]
