"""Activation checkpointing: blocks of a model keep their inputs only, and compute the rest again in the backward pass.

``Step(activation_checkpointing=True)`` picks the model's blocks: the children of its outermost ``ModuleList`` or
``Sequential`` that are made of several layers. A function picks modules itself. For example 12 transformer blocks in a
``ModuleList``: the activations of one block are in memory at a time, and the forward pass is computed twice.

The bits are the same. PyTorch draws the same random numbers again (dropout); BatchNorm does not count a batch twice in
its running statistics, which PyTorch alone would do. What a block's own Python code changes, it changes twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings
from manyhands.training.torch.step.part import Part

Pick = bool | Callable[[torch.nn.Module], bool]


def of(model: torch.nn.Module, pick: Pick, *, statistics: str | None) -> ActivationCheckpoints | None:
    """The checkpointed blocks of a model, as :class:`~manyhands.training.options.Step` says; None without any."""
    if pick is False:
        return None
    blocks = blocks_of(model) if pick is True else _pick_modules(model, pick)
    if not blocks and pick is True:
        raise BadSettings(
            f"Step(activation_checkpointing=True): {type(model).__name__} has no blocks, children of a ModuleList or a "
            "Sequential that have several layers. Give a function that picks modules"
        )
    if not blocks:
        raise BadSettings(f"Step(activation_checkpointing=function) picks no module of {type(model).__name__}")
    normalise = any(isinstance(layer, compat.BatchNorm) for block in blocks for layer in block.modules())
    if statistics == "global" and normalise:
        raise BadSettings(
            "Step(activation_checkpointing=..., batch_stats='global'): blocks with BatchNorm are computed again in the "
            "backward pass, where ranks would wait for each other's statistics. Choose one"
        )
    return ActivationCheckpoints(blocks)


class ActivationCheckpoints(Part):
    """Blocks that compute their forward pass again in the backward pass, until :meth:`close`."""

    recomputes = True

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        self._before = [(block, block.__dict__.get("forward")) for block in blocks]
        self._drew = False  # whether a block has drawn random numbers so far
        for block in blocks:
            block.forward = MethodType(self._wrap(block), block)

    def close(self) -> None:
        """Leave the blocks as they were."""
        for block, forward in self._before:
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward

    def why_not_captured(self) -> str | None:
        return "checkpointed blocks draw random numbers, whose state a graph cannot restore" if self._drew else None

    def _wrap(self, block: torch.nn.Module) -> Callable[..., Any]:
        replaced = block.__dict__.get("forward")

        def forward(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
            call = replaced if replaced is not None else MethodType(type(module).forward, module)
            if not torch.is_grad_enabled():
                return call(*args, **options)

            def contexts() -> tuple[Any, Any]:
                return contextlib.nullcontext(), _statistics_preserved(module)

            # In a CUDA graph the state of random numbers cannot be read; what is captured has drawn none. (The public
            # function also says yes in a rehearsal, which is a step like any other.)
            captured = torch.cuda.is_available() and compat.is_current_stream_capturing()
            before = None if captured else _random_numbers()
            output = checkpoint(
                call, *args, use_reentrant=False, preserve_rng_state=not captured, context_fn=contexts, **options
            )
            self._drew = self._drew or (before is not None and before != _random_numbers())
            return output

        return forward


def _random_numbers() -> list[bytes]:
    """The state of the generators, which are numbers on the host, also a GPU's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


@contextlib.contextmanager
def _statistics_preserved(block: torch.nn.Module) -> Iterator[None]:
    """BatchNorm writes its running statistics into copies."""
    layers = [layer for layer in block.modules() if isinstance(layer, compat.BatchNorm) and layer.training]
    before = [dict(vars(layer)[compat.BUFFERS]) for layer in layers]
    for layer, buffers in zip(layers, before, strict=True):
        copies = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
        vars(layer)[compat.BUFFERS].update(copies)
    try:
        yield
    finally:
        for layer, buffers in zip(layers, before, strict=True):
            vars(layer)[compat.BUFFERS].update(buffers)


def _pick_modules(model: torch.nn.Module, pick: Callable[[torch.nn.Module], bool]) -> list[torch.nn.Module]:
    """The outermost modules that the function picks."""
    if pick(model):
        return [model]
    return _distinct(block for child in model.children() for block in _pick_modules(child, pick))


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The children with several layers of the outermost lists of modules."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        large = [child for child in model.children() if sum(1 for _ in child.modules()) > 2]
        if large:
            return _distinct(large)
    return _distinct(block for child in model.children() for block in blocks_of(child))


def _distinct(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    return list({id(module): module for module in modules}.values())
