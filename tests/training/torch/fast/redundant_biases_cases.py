"""A search for biases that change nothing, in one step of a net."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from manyhands.training.torch.fast.redundant_biases import BiasSearch, RedundantBiases

X = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3


def loss_of(net: nn.Module) -> torch.Tensor:
    output = net(X)
    return output if output.dim() == 0 else functional.cross_entropy(output, Y)


def searched(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor] = loss_of) -> RedundantBiases | None:
    with BiasSearch(net) as search:
        value = loss(net)
        search.trace(value)
        value.backward()
    return search.redundant_biases()


def redundant_names(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor] = loss_of) -> list[str]:
    return names(net, searched(net, loss))


def names(net: nn.Module, redundant: RedundantBiases | None) -> list[str]:
    layers = [layer for layer, _ in redundant._bare] if redundant is not None else []
    return [name for name, module in net.named_modules() if module in layers]
