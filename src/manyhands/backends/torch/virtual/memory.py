"""The memory of a virtual tensor, for programs that ask where it is or hand it to another library.

To PyTorch a virtual tensor has no memory. Programs compare addresses to find weights that are shared
(``save_pretrained`` and ``safetensors`` do), so a tensor answers with the memory that holds its numbers. Libraries that
take a tensor as memory of a GPU would read from an address that means nothing to them; they get an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class VirtualMemory:
    """What a virtual tensor says about its memory."""

    __slots__ = ()  # tensors on the host and virtual ones change places, so both need the same layout

    _inner: torch.Tensor
    device: torch.device

    def data_ptr(self) -> int:
        return self._inner.data_ptr()

    def const_data_ptr(self) -> int:
        return self._inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._inner.untyped_storage()

    def __dlpack__(self, **how: Any) -> NoReturn:
        raise BufferError(self._not_on_a_gpu("__dlpack__"))

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(self._not_on_a_gpu("__cuda_array_interface__"))

    def _not_on_a_gpu(self, name: str) -> str:
        return (
            f"{name}: {self.device} is a virtual device, so its memory is not a GPU's, and another library cannot use "
            "it as such. Give it x.detach().cpu() instead"
        )
