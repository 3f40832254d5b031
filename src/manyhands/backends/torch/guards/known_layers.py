"""Layers of PyTorch that Dynamo need not follow, because it has followed another one of the same kind.

A net of 150 convolutions is 150 times the same code. What that code looks at is the layer itself, which our own guards
watch (:mod:`.state`): that it is the same object with the same settings, parameters and hooks; and things outside the
layer, which are the same for all layers of one kind. So Dynamo follows the first layer of each kind, and guards what is
outside. For the others it gets the form of their results from here, and guards that they are the same object. The form
of their parameters is compared here: our own guards know only address and size.

Only where no gradients are recorded: a backward pass has to know of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.fast_match import tensor_guards
from manyhands.backends.torch.guards.facts import PLAIN

# Layers whose forward pass reads only the layer, its one argument and PyTorch, and returns a new tensor.
_LAYERS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding)
_LAYERS += (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_LAYERS += (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Softmax)
_LAYERS += (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_IN_EVAL_MODE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # in training mode they write
_OF_MODULES = frozenset(vars(nn.Module()))
# Sizes of parameters, by which no code branches.
_SIZES = {"in_features", "out_features", "in_channels", "out_channels", "num_features", "normalized_shape"}
_SIZES |= {"num_channels", "num_embeddings", "embedding_dim"}


class KnownLayers:
    """Decides which layers of a function Dynamo has to follow."""

    def __init__(self, watched: Mapping[int, object]) -> None:
        """``watched``: the objects that our own guards watch, by their ids."""
        self._watched = watched
        self._kinds: set[Hashable] = set()
        self.left_out: dict[int, nn.Module] = {}  # layers that Dynamo does not follow

    def are_hooks_watched(self, module: nn.Module) -> bool:
        return self._watched.get(id(module)) is module

    def stand_in(self, module: nn.Module, fake: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if torch.is_grad_enabled() or compat.is_any_autocast_enabled() or not self.are_hooks_watched(module):
            return None
        kind = _kind(module, fake)
        if kind is None:
            return None
        if kind not in self._kinds:
            self._kinds.add(kind)
            return None
        self.left_out[id(module)] = module

        def layer(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = type(module).forward(_with_fake_tensors(module), x)
            return result

        return layer

    def check(self) -> Callable[[], bool]:
        """A check that the parameters and buffers of the layers that were left out still have their form."""
        tensors = self.tensors()
        if not tensors:
            return lambda: True
        same = tensor_guards(tensors)
        return lambda: same(*tensors)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers of the layers that were left out."""
        return list({id(tensor): tensor for layer in self.left_out.values() for tensor in _tensors(layer)}.values())


def _kind(module: nn.Module, fake: torch.Tensor) -> Hashable | None:
    """A key, equal for layers whose forward passes take the same path through the same code; None for other modules."""
    attributes = vars(module)
    if type(module) not in _LAYERS and (type(module) not in _IN_EVAL_MODE or module.training):
        return None
    if attributes.get("inplace") or any(attributes[word] for word in (*compat.HOOKS_OF_MODULES, compat.MODULES)):
        return None
    settings = []
    for word, value in attributes.items():
        if word in _OF_MODULES or word in _SIZES:
            continue
        if not all(isinstance(part, PLAIN) for part in (value if isinstance(value, tuple) else (value,))):
            return None
        settings.append((word, type(value), repr(value)))
    tensors = [(word, None if tensor is None else _form(tensor)) for word, tensor in _named(module)]
    return (type(module), module.training, tuple(settings), tuple(tensors), _form(fake))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dim(), tensor.dtype, tensor.device, tensor.layout, tensor.numel() > 0


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    attributes = vars(module)
    return [*attributes[compat.PARAMETERS].items(), *attributes[compat.BUFFERS].items()]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named(module) if tensor is not None]


def _with_fake_tensors(module: nn.Module) -> nn.Module:
    """The same layer with tensors of the current fake mode; another thread may use the module itself meanwhile."""
    other = object.__new__(type(module))
    vars(other).update(vars(module))
    for part in (compat.PARAMETERS, compat.BUFFERS):
        vars(other)[part] = {
            word: None if tensor is None else _fake(tensor) for word, tensor in vars(module)[part].items()
        }
    return other


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
