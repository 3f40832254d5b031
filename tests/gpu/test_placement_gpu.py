"""Placement on a real GPU: asynchronous moves that are never read too early, and nothing waited for."""

from __future__ import annotations

import functools
import gc

import pytest

torch = pytest.importorskip("torch")

from support import at_once, run_python  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch import devices as backend  # noqa: E402
from manyhands.errors import ChangedInFlight  # noqa: E402

LARGE = 2**20  # floats: taking page-locked memory for them is quick, and their copy is not over at once


def busy() -> None:
    """Keep the GPU's current stream busy for some tenths of a second without the host waiting."""
    torch.cuda._sleep(500_000_000)


def busy_copies() -> None:
    """The same for the stream that carries asynchronous moves: a copy that is started now is late."""
    with torch.cuda.stream(backend._side_stream(torch.device("cuda", 0))):
        busy()


def test_records() -> None:
    record = mh.devices()[1]
    assert record.uuid.startswith("GPU-")
    assert record.capability is not None
    assert record.memory.total > 2**30
    from manyhands import machine

    assert record.uuid in {gpu.uuid for gpu in machine.gpus()}


def test_an_early_read_from_the_gpu_waits() -> None:
    x = torch.zeros(LARGE, device="cuda")
    mh.to(x, "cpu", wait=False).result()  # the first time page-locked memory has to be taken, and that waits
    busy()
    x.fill_(7.0)
    arrival = mh.to(x, "cpu", wait=False)
    assert not arrival.ready()
    value = arrival.result()
    assert value.is_pinned()
    assert bool((value == 7.0).all())


def test_a_source_freed_in_flight_is_not_reused() -> None:
    x = torch.full((LARGE,), 3.0, device="cuda")
    busy()
    arrival = mh.to(x + 1, "cpu", wait=False)
    del x
    gc.collect()
    for _ in range(8):
        torch.full((LARGE,), -1.0, device="cuda")  # would land on freed memory
    assert bool((arrival.result() == 4.0).all())


def test_to_the_gpu_orders_the_work_after_the_copy() -> None:
    x = torch.full((LARGE,), 2.0)
    arrival = mh.to(x, "gpu", wait=False)
    x.fill_(-1.0)  # a pageable source is staged: writing to it is harmless
    y = arrival.result() * 2
    assert bool((y == 4.0).all())


def test_a_pinned_source_that_changes_in_flight_is_an_error() -> None:
    x = torch.full((1024,), 2.0).pin_memory()
    arrival = mh.to(x, "gpu", wait=False)
    x.fill_(-1.0)
    with pytest.raises(ChangedInFlight):
        arrival.result()


def test_a_pinned_source_may_be_written_to_after_result() -> None:
    """The device's order does not bind the host, so the host has to wait: this was silent corruption once."""
    x = torch.full((LARGE,), 2.0).pin_memory()
    mh.to(x, "gpu", wait=False).result()
    busy_copies()
    arrival = mh.to({"x": x}, "gpu", wait=False)
    assert not arrival.ready()
    y = arrival.result()["x"]
    x.fill_(-1.0)
    x.numpy().fill(-2.0)  # not counted by PyTorch, and harmless too
    assert bool((y == 2.0).all())


@pytest.mark.parametrize("kind", ["kept", "pageable"])
def test_the_host_does_not_wait_where_nobody_can_write(kind: str) -> None:
    x = torch.full((LARGE,), 2.0)
    x = x.pin_memory() if kind == "kept" else x
    start = functools.partial(backend.start_move, source_is_final=kind == "kept")
    device = mh.gpu(0)
    for _ in range(2):  # the first time page-locked memory is taken, and that waits
        torch.cuda.synchronize()
        busy_copies()
        y = start(x, device).result()
    # Nobody has waited: the copy is still to come, and so is what is computed with it.
    assert not torch.cuda.current_stream().query()
    assert bool((y * 2 == 4.0).all())


def test_a_source_on_the_gpu_that_changes_in_flight_is_an_error() -> None:
    x = torch.full((LARGE,), 2.0, device="cuda")
    mh.to(x, "cpu", wait=False).result()
    busy_copies()
    arrival = mh.to(x, "cpu", wait=False)
    x.fill_(-1.0)  # on the current stream, which does not wait for the copy
    with pytest.raises(ChangedInFlight):
        arrival.result()
    torch.cuda.synchronize()


def test_tensors_of_every_kind_are_moved_asynchronously() -> None:
    with torch.inference_mode():
        inference = torch.ones(3).pin_memory()
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for x in (inference, torch.ones(3), sparse, sparse.to_sparse_csr(), nested, torch.ones(0), torch.tensor(1.0)):
        there = mh.to(x, "gpu", wait=False).result()
        back = mh.to(there, "cpu", wait=False).result()
        assert (there.device, back.device) == (mh.gpu(0), mh.cpu())
        assert there.layout == back.layout == x.layout
        if x is not nested:
            assert torch.equal(back.to_dense() if x.layout != torch.strided else back, x.to_dense())


def test_moves_from_several_threads() -> None:
    def work(number: int) -> None:
        for step in range(20):
            value = float(number * 100 + step)
            arrival = mh.to(torch.full((4096,), value).pin_memory(), "gpu", wait=False)
            assert bool((arrival.result() + 0 == value).all())

    at_once(work, 4)


def test_asynchronous_moves_make_no_host_wait() -> None:
    pinned = torch.ones(1024).pin_memory()
    on_gpu = torch.ones(1024, device="cuda")
    mh.to(pinned, "gpu", wait=False).result()
    mh.to(on_gpu, "cpu", wait=False).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrivals = [
            backend.start_move(pinned, mh.gpu(0), source_is_final=True).result(),
            mh.to(on_gpu, "cpu", wait=False),
        ]
        assert mh.to(on_gpu, mh.gpu(0)) is on_gpu
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(arrivals) == 2


def test_cuda_without_a_number_is_gpu_0() -> None:
    x = mh.to(torch.ones(2), torch.device("cuda"))
    assert x.device == torch.device("cuda", 0)
    assert mh.to(x, torch.device("cuda")) is x
    assert mh.to(x, "gpu") is x


def test_gradients_flow_through_asynchronous_moves() -> None:
    x = torch.ones(4, requires_grad=True)
    y = mh.to(x * 2, "gpu", wait=False).result() * 3
    mh.to(y, "cpu", wait=False).result().sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 6.0))


def test_errors_of_asynchronous_work_surface_at_synchronize() -> None:
    code = (
        "import torch; from manyhands import torch as mh\n"
        "x = torch.ones(4, device='cuda')[torch.tensor([99], device='cuda')]\n"
        "try: mh.synchronize()\n"
        "except RuntimeError as error: print('surfaced', type(error).__name__)\n"
    )
    assert "surfaced" in run_python(code).stdout


def test_measuring_a_gpu() -> None:
    from manyhands.placement import measure

    figures = measure.speed(backend, mh.gpu(0))
    assert all(value is not None and value > 0 for value in figures.values())
    assert figures["host_to_device_pinned"] > figures["host_to_device"]
