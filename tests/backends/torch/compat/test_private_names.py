"""Private attributes of PyTorch's objects: only the folder compat reads them, and they are what it takes them for."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_modules
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.optim import optimizer as of_optimizers
from torch.utils.data import dataloader

import manyhands
from manyhands.backends.torch import compat

PACKAGE = Path(manyhands.__file__).parent
ELSEWHERE = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "torch" in path.relative_to(PACKAGE).parts and path.parent.name != "compat"
]
# Set where a module is compiled or sharded, so that no object here has them.
RARE = {"_fsdp_use_orig_params", "_is_fsdp_managed_module", "_orig_mod", "_compiled_call_impl", "_enter_autocast"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@functools.cache
def private_names() -> set[str]:
    """Of the objects that the package meets, as this release of PyTorch has them."""
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    parts = [lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    graph = torch.fx.symbolic_trace(layer)
    objects: list[object] = [layer, nn.BatchNorm2d(2), nn.Conv2d(1, 1, 1), x, layer.weight, x.untyped_storage()]
    objects += [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.Generator(), torch.autocast("cpu")]
    objects += [layer(x).grad_fn, torch.mm(x, x.T).grad_fn, Doubled.apply(x).grad_fn]
    objects += [optimizer, lr_scheduler.SequentialLR(optimizer, parts, [1]), torch.amp.GradScaler("cpu")]
    objects += [graph, next(iter(graph.graph.nodes)), dataloader.DataLoader([1])]
    modules = [of_modules, of_optimizers, dataloader, forward_ad, parametrize]
    names = {name for value in [*objects, *modules] for name in dir(value)} | RARE
    return {name for name in names if re.match("_[a-zA-Z]", name)}


def private_names_in(code: str) -> set[str]:
    """Those read as attributes, or written as strings for `getattr` and `vars`.

    Attributes of ``self`` are the package's. Names of operations (``aten._to_copy``) are not meant: they stand in
    saved graphs, too.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()", "_aten"):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names & private_names()


def test_only_compat_reads_private_attributes() -> None:
    found = {str(path.relative_to(PACKAGE)): private_names_in(path.read_text()) for path in ELSEWHERE}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "code", ["func._schema.is_mutable", "getattr(node, '_forward_cls', None)", "vars(module)['_parameters']", "x._base"]
)
def test_a_private_attribute_is_noticed(code: str) -> None:
    assert private_names_in(code)


def test_modules_parameters_and_optimizers_have_these_dicts() -> None:
    layer = nn.Linear(2, 2)
    names = {compat.PARAMETERS, compat.BUFFERS, *compat.HOOKS_OF_MODULES}
    assert names <= vars(layer).keys()
    assert all(hasattr(layer.weight, name) for name in compat.HOOKS_OF_PARAMETERS)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert all(hasattr(optimizer, name) for name in compat.HOOKS_OF_OPTIMIZERS)
