"""What is the process's, and put back: Dynamo's captures, virtual devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def two_devices() -> Iterator[None]:
    from manyhands import torch as mh

    with mh.virtual_devices(2):
        yield


@pytest.fixture
def two_gpus() -> Iterator[None]:
    """Virtual devices stand in for GPUs."""
    import torch

    from manyhands import torch as mh

    torch.manual_seed(0)
    with mh.virtual_devices(2, as_cuda=True):
        yield
