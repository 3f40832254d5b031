"""Redundant biases: the biases of layers whose output only a BatchNorm reads.

A BatchNorm in training subtracts the mean of the batch, and with it any constant that was added to all samples. With
x = (1, 3) and a bias of 10::

    x          mean  2    x - mean         = (-1, 1)
    x + 10     mean 12    x + 10 - mean    = (-1, 1)      the same; only the running mean moves by momentum * 10 more

So the gradient of such a bias is zero (a backward pass computes only rounding errors), and adding the bias and summing
its gradient are two useless passes over the layer's output: a fifth of a step of ResNet-18. Here the layer runs without
its bias, the bias's share is added to the running mean after the backward pass, and the bias gets a gradient of zeros,
so that weight decay, momentum and checkpoints do not change.

Names and order of layers prove nothing: a model may use an output twice. So :class:`BiasSearch` observes one step, and
a bias is redundant if three conditions hold in that step:

1. In autograd's graph a single edge leads to the layer's node, from the node of the BatchNorm; and a single edge from
   the layer's node to the bias (also through a cast). Nothing else that is differentiated uses them.
2. In both passes only operations of the BatchNorm read the memory of the output and of the running mean (which is
   updated late), and only operations of the layer read the bias.
3. The output is not alive when the step is over.

A CUDA graph repeats the observed step, and :mod:`.python_state` refuses models whose Python state changes between
steps.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import TorchDispatchMode, memory_id, tree_leaves
from manyhands.training.torch.fast.extension import Extension, Passes
from manyhands.training.torch.fast.operations import leads_to
from manyhands.training.torch.fast.python_state import is_compiled
from manyhands.training.torch.ranks.gradient_sum import Gradients

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# The positions of weight and bias among the inputs of a layer's autograd node.
_PLACES = {"ConvolutionBackward0": (1, 2), "AddmmBackward0": (2, 0)}


def may_have_redundant_biases(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a search can succeed: there are candidates, and the optimizer can handle gradients of zeros."""
    layers, norms = _candidates(model)
    return bool(layers and norms) and _ignores_zero_gradients(optimizer)


class Biases(Extension):
    """The extension of a captured step: searches in a step as written, then leaves the biases out."""

    searches = True

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients
        self._search: BiasSearch | None = None
        self._of: dict[Hashable, RedundantBiases] = {}  # by the kind of micro-batch

    @contextmanager
    def search(self, passes: Passes) -> Iterator[None]:
        self._of.pop(passes.kind, None)
        with BiasSearch(self._model) as self._search:
            yield
        if (redundant := self._search.redundant_biases()) is not None:
            self._of[passes.kind] = redundant
        self._search = None

    def after_forward(self, loss: torch.Tensor) -> None:
        if self._search is not None:
            self._search.trace(loss)

    def forward(self, passes: Passes) -> AbstractContextManager[None]:
        redundant = self._of.get(passes.kind)
        return nullcontext() if redundant is None else redundant.left_out()

    @contextmanager
    def backward(self, passes: Passes) -> Iterator[None]:
        if (redundant := self._of.get(passes.kind)) is None:
            yield
            return
        self._gradients.set_zero(redundant.learned)
        with redundant.left_out():
            yield
        redundant.shift_means()

    def explain(self, passes: Passes) -> str | None:
        return self._of[passes.kind].explain() if passes.kind in self._of else None


class RedundantBiases:
    """Runs steps without the redundant biases of a model.

    ::

        with redundant.left_out():
            loss = loss_of(model)
        loss.backward()                 the gradients of ``redundant.learned`` are zero
        redundant.shift_means()
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        # Made once: a compiler would compile again for a new module.
        self._bare = [(layer, _without_bias(layer)) for layer, _ in pairs]
        self._shifts: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for layer, norm in pairs:
            if norm.track_running_stats and norm.running_mean is not None:
                means, biases = self._shifts.setdefault(norm.momentum, ([], []))  # type: ignore[arg-type]
                means.append(norm.running_mean)  # type: ignore[arg-type]
                biases.append(layer.bias)  # type: ignore[arg-type]
        self.learned: list[Any] = [layer.bias for layer, _ in pairs if layer.bias.requires_grad]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context in which the layers run without their biases; the biases remain parameters of the model."""
        try:
            for layer, bare in self._bare:
                layer.forward = bare.forward
            yield
        finally:
            for layer, _ in self._bare:
                vars(layer).pop("forward", None)

    @torch.no_grad()
    def shift_means(self) -> None:
        """Add the biases' share to the running means; call it after the backward pass.

        It cannot be added right after each BatchNorm, which saves its running mean for the backward pass.
        """
        for momentum, (means, biases) in self._shifts.items():
            compat.foreach_add_(means, biases, alpha=momentum)

    def explain(self) -> str:
        """How many biases are left out, in words."""
        return f"biases left out because a BatchNorm cancels them: {len(self._bare)}"


@dataclass
class _LayerCall:
    """The call of a layer in the observed step: its output, and the BatchNorm that read it."""

    count: int = 0
    output: weakref.ref[torch.Tensor] | None = None
    node: Any = None
    norm: nn.Module | None = None
    norm_node: Any = None


class BiasSearch(TorchDispatchMode):
    """Observes one step without changing its results.

    ::

        with Search(model) as search:
            loss = loss_of(model)
            search.trace(loss)
            loss.backward()
        redundant = search.redundant_biases()
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        layers, self._norms = _candidates(model)
        self._calls = {layer: _LayerCall() for layer in layers}
        self._norm_calls = Counter[nn.Module]()
        self._inside: list[nn.Module] = []
        self._spoilt: set[nn.Module] = set()
        # The owners of each storage by its id. The weak references in _numbers keep ids from being reused.
        self._owners: dict[int, list[nn.Module]] = {}
        self._numbers: list[StorageWeakRef] = []
        self._edges = Counter[Any]()
        self._traced = False

    def __enter__(self) -> BiasSearch:
        try:
            for layer in self._calls:
                self._watch(layer, layer.bias)
                layer.forward = functools.partial(self._in_layer, layer)
            for norm in self._norms:
                self._watch(norm, norm.running_mean)
                norm.forward = functools.partial(self._in_norm, norm)
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:  # Ctrl-C, too: if __enter__ raises, __exit__ is not called
            self._put_back()
            raise
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for module in (*self._calls, *self._norms):
            vars(module).pop("forward", None)

    def trace(self, loss: torch.Tensor) -> None:
        """Count the incoming edges of each node in autograd's graph; call it before the backward pass."""
        self._traced = True
        seen, left = {loss.grad_fn}, [loss.grad_fn]
        while left:
            node: Any = left.pop()
            for following, _ in node.next_functions if node is not None else ():
                self._edges[following] += 1
                if following not in seen:
                    seen.add(following)
                    left.append(following)

    def redundant_biases(self) -> RedundantBiases | None:
        """The redundant biases of the observed step; None if there are none."""
        pairs = [(layer, call.norm) for layer, call in self._calls.items() if self._is_redundant(layer, call)]
        return RedundantBiases(pairs) if pairs else None  # type: ignore[arg-type]

    def _is_redundant(self, layer: nn.Module, call: _LayerCall) -> bool:
        if not self._traced or call.count != 1 or call.norm is None or self._norm_calls[call.norm] != 1:
            return False
        if layer in self._spoilt or call.norm in self._spoilt or call.output is None or call.output() is not None:
            return False
        if call.node is None or call.norm_node is None:
            return False
        if call.node.name() not in _PLACES or "BatchNorm" not in call.norm_node.name():
            return False
        weight, bias = (call.node.next_functions[place][0] for place in _PLACES[call.node.name()])
        paths = [leads_to(weight, layer.weight)]  # type: ignore[arg-type]
        if layer.bias.requires_grad:
            paths.append(leads_to(bias, layer.bias))  # type: ignore[arg-type]
            if paths[-1] is None or any(self._edges[node] != 1 for node in paths[-1]):
                return False
        straight = call.norm_node.next_functions[0][0] is call.node and self._edges[call.node] == 1
        return straight and None not in paths

    # Observations

    def _in_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = self._call_module(layer, args, kwargs)
        call = self._calls[layer]
        call.count += 1
        # Three-dimensional inputs of a linear layer, or unbatched ones of a convolution: BatchNorm has other channels.
        if call.count == 1 and type(result) is torch.Tensor and result.dim() == layer.weight.dim():  # type: ignore[operator]
            call.output, call.node = weakref.ref(result), result.grad_fn
            self._watch(layer, result)
        return result

    def _in_norm(self, norm: nn.Module, *args: Any, **kwargs: Any) -> Any:
        input_: Any = args[0] if args else kwargs.get("input")
        calls = [call for call in self._calls.values() if call.output is not None and call.output() is input_]
        self._norm_calls[norm] += 1
        if not calls or calls[0].norm is not None or not norm.training:
            return self._call_module(norm, args, kwargs)
        calls[0].norm = norm
        result = self._call_module(norm, args, kwargs)
        calls[0].norm_node = result.grad_fn
        return result

    def _call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside.append(module)
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            self._inside.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for owner in self._owners.get(compat.memory_id(value), ()):
                    if not self._may_read(owner, value):
                        self._spoilt.add(owner)
        return func(*args, **(kwargs or {}))

    def _may_read(self, owner: nn.Module, value: torch.Tensor) -> bool:
        """Whether the current operation may read the owner's memory."""
        node = compat.current_autograd_node()
        if owner in self._norms:  # its running mean
            nodes = [call.norm_node for call in self._calls.values() if call.norm is owner]
            return owner in self._inside or (node is not None and node in nodes)
        call = self._calls[owner]
        if owner in self._inside:
            return True
        is_bias = memory_id(value) == memory_id(owner.bias)  # type: ignore[arg-type]
        return not is_bias and (call.norm in self._inside or (node is not None and node is call.norm_node))

    def _watch(self, owner: nn.Module, tensor: Any) -> None:
        if tensor is not None:
            self._numbers.append(StorageWeakRef(tensor.untyped_storage()))
            self._owners.setdefault(memory_id(tensor), []).append(owner)


def _candidates(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """PyTorch's own layers and norms, if they have no hooks and no replaced ``forward``."""
    if is_compiled(model):
        return [], []
    hooks = compat.HOOKS_OF_MODULES
    plain = [module for module in model.modules() if "forward" not in vars(module) and not _has(module, hooks)]
    layers = [module for module in plain if type(module) in _LAYERS and _is_plain(module)]
    # A cumulative average reads its count on the host.
    norms = [module for module in plain if type(module) in _NORMS and module.momentum is not None]
    return layers, norms


def _is_plain(layer: nn.Module) -> bool:
    parameters = vars(layer)[compat.PARAMETERS]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:
        return False
    return weight.requires_grad and not _has(bias, compat.HOOKS_OF_PARAMETERS)


def _has(value: object, hooks: Sequence[str]) -> bool:
    return any(getattr(value, name, None) for name in hooks)


def _ignores_zero_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient of zeros is safe.

    PyTorch's optimizers at most divide by the root of the squared gradient plus eps; others may do anything.
    """
    tiny = torch.finfo(torch.float32).tiny
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    added = [group.get("eps", 1.0) for group in optimizer.param_groups]
    return is_torchs and all(isinstance(eps, float) and eps >= tiny for eps in added)


def _without_bias(layer: nn.Module) -> nn.Module:
    """A copy of the layer that shares its weight and has no bias."""
    bare = copy.copy(layer)
    vars(bare)[compat.PARAMETERS] = {**vars(layer)[compat.PARAMETERS], "bias": None}
    return bare
