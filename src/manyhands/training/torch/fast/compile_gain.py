"""Whether compiling a step is likely to pay off: what it saves in all steps of a job, against the compiler's time.

PyTorch's kernels write their results to memory, and the next kernel reads them again. A compiler fuses kernels that
only go over their arguments (element by element, sums, normalisations, copies), so that most of these results stay in
registers. Products and convolutions gain nothing. So the gain follows from the bytes that such kernels move in a step,
and the compiler's time from the number of operations. Neither is timed: a job that is repeated or resumed on the same
kind of device comes to the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from manyhands.amounts import counted
from manyhands.backends.torch.compat import TorchDispatchMode, tree_leaves
from manyhands.training.torch.fast.operation_memory import has_memory, is_view, memories_of

_aten = torch.ops.aten
# Kernels of libraries, which a compiler calls as they are.
_LIBRARY = {
    *flop_registry,
    _aten._cudnn_rnn,
    _aten._cudnn_rnn_backward,
    _aten.embedding,
    _aten.embedding_dense_backward,
}
# From five nets on an H200: the time saved was 0.9 (VGG-16) to 2.3 (ConvNeXt) of what moving these bytes takes at the
# memory's full speed. Compiling took roughly 16 s (157 operations) to 65 s (1294 operations), five nets at a time.
_SAVED = 0.9
_SECONDS, _SECONDS_PER_OPERATION = 10.0, 0.04
_BYTES_PER_SECOND = 1e12  # where the device does not say


@dataclass(frozen=True)
class CompileGain:
    """What compiling a step saves and costs, in seconds, by estimate."""

    saved_per_step: float
    compiling: float

    def pays_off(self, steps: int) -> bool:
        return self.saved_per_step * steps >= self.compiling

    def explain(self, steps: int) -> str:
        """In one line.

        >>> CompileGain(saved_per_step=3e-3, compiling=66).explain(10_000)
        'compiling would take about 66 s and save about 3.00 ms a step, 30 s in 10,000 steps: it does not pay off'
        """
        total = f"{self.saved_per_step * steps:.0f} s in {counted(steps, 'step')}"
        saved = f"{self.saved_per_step * 1e3:.2f} ms a step, {total}"
        outcome = "it pays off" if self.pays_off(steps) else "it does not pay off"
        return f"compiling would take about {self.compiling:.0f} s and save about {saved}: {outcome}"


class FusibleWork(TorchDispatchMode):
    """Counts all operations of a pass, and the bytes that operations move which a compiler could fuse.

    ``with FusibleWork(parameters) as work: loss_of(batch).backward()``. Casts of parameters are not counted: a compiled
    step has them, too.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = memories_of(parameters)
        self.operations = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if is_view(func) or func is _aten._unsafe_view.default:
            return result
        self.operations += 1
        casts_parameter = func is _aten._to_copy.default and memories_of(args) <= self._parameters
        if func.overloadpacket not in _LIBRARY and not casts_parameter:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if has_memory(leaf)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result

    def gain(self, device: torch.device) -> CompileGain:
        """What compiling would change, if this was one step's forward and backward pass."""
        return CompileGain(
            saved_per_step=_SAVED * self.bytes / _memory_speed(device),
            compiling=_SECONDS + _SECONDS_PER_OPERATION * self.operations,
        )


def _memory_speed(device: torch.device) -> float:
    """Bytes per second of the device's memory, from its clock (kHz, two transfers each) and the width of its bus."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return clock * 1e3 * 2 * width / 8 or _BYTES_PER_SECOND
