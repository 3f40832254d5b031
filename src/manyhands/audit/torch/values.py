"""PyTorch's values in a second pass of ``--prove``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from manyhands.audit.kinds import Kind
from manyhands.audit.prove.values import Values
from manyhands.audit.torch import calls


class _TorchValues(Values):
    copies = True

    def snapshot(self, value: Any) -> Any:
        return value.detach().clone()

    def drain(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def parameters(self, optimizer: Any) -> list[Any]:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        return [tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for tensor in tensors if tensor.dim()] + [
            tensor.detach().cpu().reshape(1).view(torch.uint8).numpy() for tensor in tensors if not tensor.dim()
        ]

    def read_by(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("to", "cpu", "numpy") and isinstance(owner, torch.Tensor):
            wait = calls.METHODS[name]((owner, *args), kwargs)
            return owner if wait is not None and wait.kind is Kind.TO_HOST else None
        return super().read_by(name, owner, args, kwargs)

    def copied(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = calls.METHODS.get(name)
        wait = rule((owner, *args), kwargs) if rule is not None and isinstance(owner, torch.Tensor) else None
        if wait is None or wait.kind not in (Kind.TO_DEVICE, Kind.BLOCKING):
            return getattr(owner, name)(*args, **kwargs)
        if not any(isinstance(option, bool) for option in args):
            kwargs = {**kwargs, "non_blocking": True}
        if name == "copy_":
            return owner.copy_(_pinned(args[0]), *args[1:], **kwargs)
        return getattr(_pinned(owner), name)(*args, **kwargs)

    def prepare_cured(self) -> None:
        """Let data loaders pin their batches, as the cure says."""
        loader: Any = torch.utils.data.DataLoader
        original = loader.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.pin_memory = torch.cuda.is_available()

        loader.__init__ = __init__


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if calls.is_pinned(tensor) else tensor.pin_memory()


VALUES = _TorchValues(calls.on_device)
