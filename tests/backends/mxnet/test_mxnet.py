"""What is MXNet's own: contexts, two kinds of arrays, an engine that does everything later, Gluon."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx

from manyhands import Device
from manyhands import mxnet as mh
from manyhands.backends.mxnet import devices as backend
from manyhands.errors import BadBatch, NotATensor, SeveralDevices

# Contexts of the host exist without being asked for, so that most of this needs no virtual devices.
HERE, THERE = mx.cpu(0), mx.cpu(1)


def make(kind: str, values: Any) -> Any:
    return (mx.nd if kind == "nd" else mx.np).array(values, ctx=HERE)


# Devices


def test_a_context_of_the_host_has_a_neutral_name() -> None:
    host = Device("virtual" if backend.virtual_count() else "cpu")
    assert [backend.neutral(mx.cpu(i)) for i in (0, 1)] == [host, Device("virtual", 1)]
    assert backend.neutral(mx.cpu_pinned(1)) == backend.neutral(mx.cpu(0))


def test_pinned_memory_is_the_hosts() -> None:
    pinned = backend.pin(mx.nd.ones(2, ctx=HERE))
    assert pinned.ctx == mx.cpu_pinned(0)
    assert mh.to(pinned, mh.cpu()) is pinned
    assert not backend.is_on(pinned, THERE)
    assert not backend.is_on(mx.nd.ones(2, ctx=HERE), mx.cpu_pinned(0))
    assert mh.check_same_device(pinned, mx.nd.ones(2, ctx=HERE)) is not None


# Tensors


@pytest.mark.parametrize("kind", ["nd", "np"])
@pytest.mark.parametrize("values", [1.0, [1.0, 2.0], [[1.0], [2.0]]])
def test_both_kinds_of_arrays_stay_what_they_are(kind: str, values: Any) -> None:
    x = make(kind, values)
    for y in (backend.move(x, THERE), backend.copy(x, HERE), backend.start_move(x, THERE).result()):
        assert type(y) is type(x)
        assert y.asnumpy().tolist() == values
    assert backend.move(x, THERE).ctx == THERE


@pytest.mark.parametrize("kind", ["nd", "np"])
def test_an_empty_part_is_cut_moved_and_joined(kind: str) -> None:
    x = make(kind, [[1.0, 2.0], [3.0, 4.0]])
    empty = backend.move(backend.cut(x, 1, 1), THERE)
    assert (backend.rows(empty), empty.shape, empty.ctx) == (0, (0, 2), THERE)
    whole = backend.join([backend.move(empty, HERE), x, backend.move(empty, HERE)])
    assert type(whole) is type(x)
    assert whole.asnumpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert backend.join([empty, empty]).shape == (0, 2)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_every_dtype_moves(dtype: str) -> None:
    x = mx.nd.ones((2, 2), ctx=HERE).astype(dtype)
    moved = backend.move(x, THERE)
    assert moved.dtype == x.dtype
    assert moved.asnumpy().tolist() == x.asnumpy().tolist()


def test_sparse_arrays_move() -> None:
    x = mx.nd.array([[0.0, 1.0], [0.0, 0.0]], ctx=HERE).tostype("csr")
    moved = backend.move(x, THERE)
    assert (moved.stype, moved.ctx) == ("csr", THERE)
    assert moved.asnumpy().tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_a_sparse_batch_is_cut_or_refused() -> None:
    dense = mx.nd.array([[0.0, 1.0], [2.0, 0.0]], ctx=HERE)
    assert backend.cut(dense.tostype("csr"), 1, 2).asnumpy().tolist() == [[2.0, 0.0]]
    with pytest.raises(BadBatch, match=r"tostype\('default'\)"):
        backend.cut(dense.tostype("row_sparse"), 0, 1)


def test_many_arrays_are_looked_at_one_by_one() -> None:
    here, there = mx.nd.ones(2, ctx=HERE), mx.np.ones(2, ctx=THERE)
    assert backend.all_on([here, mx.np.ones(1, ctx=HERE), backend.pin(here)], HERE)
    assert backend.all_on([there, there], THERE)
    assert not backend.all_on([here, here, there], HERE)
    assert not backend.all_on([there, backend.pin(here)], THERE)
    assert not backend.all_on([here, "text"], HERE)
    assert backend.all_on([mx.nd.ones((2, 2), ctx=HERE).tostype("csr")], HERE)


def test_a_move_has_a_gradient() -> None:
    x = mx.nd.array([1.0, 2.0], ctx=HERE)
    x.attach_grad()
    with mx.autograd.record():
        y = (backend.move(x, THERE) * backend.copy(x, THERE)).sum()
    y.backward()
    assert x.grad.asnumpy().tolist() == [2.0, 4.0]


def test_an_arrival_is_not_known_to_be_here_before_it_is_asked_for() -> None:
    x = mx.nd.ones((64, 64), ctx=HERE)
    arrival = backend.start_move(x, THERE)
    assert not arrival.ready()
    x[:] = 7.0  # the engine puts this behind the copy
    assert arrival.result().asnumpy().max() == 1.0
    assert arrival.ready()


def test_errors_surface_at_synchronize() -> None:
    mx.nd.random.normal(0, -1, shape=(2, 2), ctx=HERE)  # a negative deviation, noticed by a worker
    with pytest.raises(mx.MXNetError, match="scale"):
        mh.synchronize()
    mh.synchronize()


def test_errors_surface_at_a_move() -> None:
    wrong = mx.nd.random.normal(0, -1, shape=(2, 2), ctx=HERE)
    with pytest.raises(mx.MXNetError, match="scale"):
        backend.move(wrong, THERE)
    mh.synchronize()


# Models


def dense(**settings: Any) -> Any:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, **settings))
    return net


def test_deferred_parameters_have_no_device_yet() -> None:
    net = dense(use_bias=False)
    for _ in range(2):
        assert list(backend.model_tensors(net)) == []
        with pytest.raises(NotATensor, match="not made yet"):
            mh.device_of(net)
        net.initialize(ctx=HERE)
    assert backend.move_model(net, THERE) is net
    net(mx.nd.ones((1, 2), ctx=THERE))
    assert [array.ctx for _, array in backend.model_tensors(net)] == [THERE]


def test_parameters_on_several_contexts_are_each_told() -> None:
    net = dense(in_units=2)
    net.initialize(ctx=[HERE, THERE])
    paths = [path for path, _ in backend.model_tensors(net)]
    assert len(set(paths)) == len(paths) == 4
    assert paths[0].endswith(f"weight ({backend.neutral(HERE)})")
    with pytest.raises(SeveralDevices, match=r"weight \(virtual:1\): virtual:1"):
        mh.device_of(net)


def test_a_hybridized_model_computes_the_same_after_a_move() -> None:
    net = dense(in_units=2)
    net.initialize(ctx=HERE)
    net.hybridize()
    before = net(mx.nd.ones((1, 2), ctx=HERE)).asnumpy().tolist()
    weight = net[0].weight.data()
    assert backend.move_model(net, HERE)[0].weight.data() is weight  # nothing to do
    backend.move_model(net, THERE)
    after = net(mx.nd.ones((1, 2), ctx=THERE))
    assert after.ctx == THERE
    assert after.asnumpy().tolist() == before


def test_a_model_that_is_not_initialized_cannot_move() -> None:
    with pytest.raises(NotATensor, match=r"net\.initialize\(ctx=mh\.gpu\(1\)\)"):
        backend.move_model(dense(in_units=2), THERE)
