"""Virtual devices in PyTorch: they compute as the CPU does, and refuse what GPUs would refuse."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support import at_once

from manyhands import torch as mh

pytestmark = pytest.mark.usefixtures("two_devices")


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = mh.to(torch.randn(6, 1, 8, 8, generator=generator), device)
        y = mh.to(torch.randint(5, (6,), generator=generator), device)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_bit_equal_to_the_cpu(optimizer: Any) -> None:
    plain, placed = net(), net()
    before = optimizer(placed.parameters(), lr=0.1)  # made before the move, as many scripts do
    mh.to(placed, mh.gpu(1))
    train(plain, optimizer(plain.parameters(), lr=0.1), mh.cpu())
    train(placed, before, mh.gpu(1))
    for name, tensor in placed.state_dict().items():
        assert tensor.device == mh.gpu(1)
        assert torch.equal(tensor.cpu(), plain.state_dict()[name]), name


@pytest.mark.parametrize(
    "layer",
    [
        lambda: torch.nn.LSTM(8, 5, batch_first=True),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True),
    ],
)
def test_larger_layers_compute_the_same(layer: Any) -> None:
    model = layer()
    placed = copy.deepcopy(model)
    mh.to(placed, mh.gpu(0))
    x = torch.randn(2, 5, 8)
    arguments = (x, x, x) if isinstance(model, torch.nn.MultiheadAttention) else (x,)
    expected, got = model(*arguments), placed(*mh.to(arguments, mh.gpu(0)))
    expected, got = (out[0] if isinstance(out, tuple) else out for out in (expected, got))
    assert got.device == mh.gpu(0)
    assert torch.equal(got.cpu(), expected)
    expected.sum().backward()
    got.sum().backward()
    for mine, theirs in zip(placed.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad.cpu(), theirs.grad)


def test_mixed_devices_are_refused_as_on_gpus() -> None:
    a, b = torch.ones(2, device=mh.gpu(0)), torch.ones(2, device=mh.gpu(1))
    with pytest.raises(
        RuntimeError, match=f"Expected all tensors to be on the same device.*{mh.gpu(0)} and {mh.gpu(1)}"
    ):
        a + b
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        mh.to(net(), mh.gpu(0))(torch.ones(1, 1, 8, 8))
    assert (a + torch.tensor(1.0)).device == mh.gpu(0)  # a scalar of the host may join, as on GPUs


def test_gradients_flow_across_devices() -> None:
    x = torch.ones(3, requires_grad=True)
    y = mh.to(mh.to(x * 2, mh.gpu(0)) * 3, mh.gpu(1))
    y.sum().cpu().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    leaf = torch.ones(3, device=mh.gpu(1), requires_grad=True)
    mh.to(leaf * 2, mh.cpu()).sum().backward()
    assert leaf.grad.device == mh.gpu(1)


def test_reading_is_as_on_gpus() -> None:
    x = torch.tensor([[1.0, 2.5]], device=mh.gpu(1))
    assert x.tolist() == [[1.0, 2.5]]
    assert x.sum().item() == 3.5
    assert f"{x.sum():.2f}" == "3.50"
    assert repr(x) == f"tensor([[1.0000, 2.5000]], device='{mh.gpu(1)}')"
    leaf = torch.ones(1, device=mh.gpu(1), requires_grad=True)
    assert repr(leaf) == f"tensor([1.], device='{mh.gpu(1)}', requires_grad=True)"
    assert repr(leaf * 2) == f"tensor([2.], device='{mh.gpu(1)}', grad_fn=<MulBackward0>)"
    assert repr(torch.nn.Parameter(leaf.detach())) == f"Parameter containing:\n{leaf!r}"
    assert x.numpy(force=True).tolist() == [[1.0, 2.5]]
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()


def test_views_and_in_place_operations_share_memory() -> None:
    x = torch.zeros(2, 3, device=mh.gpu(0))
    x.view(-1)[4] = 1.0
    x[0].add_(2.0)
    assert x.tolist() == [[2.0, 2.0, 2.0], [0.0, 1.0, 0.0]]
    host = torch.zeros(2, 3)
    assert host.copy_(x) is host
    assert host.tolist() == x.tolist()


def test_saving_and_deep_copies_keep_the_device() -> None:
    model = mh.to(net(), mh.gpu(1))
    assert mh.device_of(copy.deepcopy(model)) == mh.gpu(1)
    assert isinstance(next(copy.deepcopy(model).parameters()), torch.nn.Parameter)
    file = io.BytesIO()
    torch.save(mh.to(model.state_dict(), "cpu"), file)
    file.seek(0)
    assert mh.device_of(torch.load(file, weights_only=True)) == mh.cpu()


def test_a_shallow_copy_keeps_the_device_and_the_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=mh.gpu(1)))
    twin = copy.copy(parameter)
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.device == mh.gpu(1)
    assert twin.requires_grad
    with torch.no_grad():
        parameter.zero_()
    assert twin.tolist() == [0, 0, 0]


def test_addresses_tell_shared_memory_apart() -> None:
    """Programs compare them to find tied weights before they save a model."""
    x, y = torch.ones(4, device=mh.gpu(0)), torch.ones(4, device=mh.gpu(0))
    assert x.data_ptr() != y.data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + x.element_size()
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x[1:].untyped_storage().nbytes() == 16
    linear = torch.nn.Linear(2, 2).to(mh.gpu(1))
    assert len({weight.data_ptr() for weight in linear.state_dict().values()}) == 2


def test_other_libraries_do_not_get_the_memory_of_a_gpu() -> None:
    x = torch.arange(3.0, device=mh.gpu(0))
    for take in (np.from_dlpack, torch.from_dlpack):
        with pytest.raises(BufferError, match=r"is a virtual device.*x\.detach\(\)\.cpu\(\)"):
            take(x)
    assert np.from_dlpack(x.detach().cpu()).tolist() == [0, 1, 2]
    assert not hasattr(x, "__cuda_array_interface__")


def test_placing_works_in_other_threads() -> None:
    (moved,) = at_once(lambda _: mh.to(torch.ones(2), mh.gpu(1)) * 2, 1)
    assert moved.device == mh.gpu(1)
    model = net()
    assert at_once(lambda _: mh.to(model, mh.gpu(1)), 1)[0] is model
    assert mh.device_of(model) == mh.gpu(1)
    assert at_once(lambda _: mh.device_of(mh.to(model, mh.cpu())), 1) == [mh.cpu()]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.unsqueeze_(0).squeeze_(),
        lambda x: x.resize_(1, 2),
        lambda x: x.as_strided_((2, 2), (1, 1)),
        lambda x: x.set_(torch.ones(2, device=x.device)),
    ],
)
def test_a_shape_changes_in_place(change: Any) -> None:
    x, host = (torch.arange(6.0, device=device).reshape(2, 3) for device in (mh.gpu(1), mh.cpu()))
    assert change(x) is x
    change(host)
    assert (x.shape, x.stride(), x.device) == (host.shape, host.stride(), mh.gpu(1))
    assert (x + 0).tolist() == host.tolist()
    x.mul_(2)
    assert x.tolist() == host.mul_(2).tolist()


@pytest.mark.parametrize("change", [lambda x: x.resize_(4, 4), lambda x: torch.add(x, x, out=x.new_empty(0))])
def test_a_shape_that_needs_more_memory_is_refused(change: Any) -> None:
    x = torch.arange(6.0, device=mh.gpu(1)).reshape(2, 3)
    with pytest.raises(RuntimeError, match="changes a shape in place"):
        change(x)
    assert (x + 0).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_data_is_read_and_replaced() -> None:
    weight = torch.nn.Linear(2, 2, device=mh.gpu(1)).weight
    weight.data = torch.ones(2, 2, device=mh.gpu(1))
    assert (weight * 2).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    weight.data.add_(1)
    assert (weight.tolist(), weight.data.requires_grad) == ([[2.0, 2.0], [2.0, 2.0]], False)
    weight.sum().backward()
    assert weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    for other in (torch.ones(2, 2), torch.ones(2, 2, device=mh.gpu(0)), torch.ones(2, 2, device=mh.gpu(1))):
        weight.data = other
        assert weight.device == weight.grad.device == other.device
        assert isinstance(weight, torch.nn.Parameter)
    with pytest.raises(RuntimeError, match=r"another shape, \(3,\), than x.grad"):
        weight.data = torch.ones(3, device=mh.gpu(1))


@pytest.mark.parametrize(
    "hold",
    [
        lambda layer: layer.weight.view(-1),
        lambda layer: weakref.ref(layer.weight),
        lambda layer: layer(torch.ones(1, 3)),
        lambda layer: torch.nn.utils.weight_norm(layer),
        lambda layer: layer(torch.ones(1, 3)).sum().backward(),
    ],
    ids=["a view", "a weak reference", "a graph", "weight_norm", "a gradient"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_modules_are_converted_whatever_else_holds_their_parameters(hold: Any) -> None:
    """On the host and on a GPU PyTorch sets ``parameter.data``, which takes all of these."""
    layer = torch.nn.Linear(3, 2)
    held = hold(layer)
    before = list(layer.parameters())
    expected = layer(torch.ones(1, 3))
    layer.double().to("cpu").float()
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    layer.to(mh.gpu(1)).half().float()
    found = layer(torch.ones(1, 3, device=mh.gpu(1)))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)  # the weights were float16 for a while
    layer.to("cpu")
    assert all(one is other for one, other in zip(before, layer.parameters(), strict=True))
    assert {one.grad.device for one in before if one.grad is not None} <= {torch.device("cpu")}
    del held


def test_hooks_of_a_parameter_go_with_it() -> None:
    layer = torch.nn.Linear(3, 2)
    fired: list[str] = []
    layer.weight.register_hook(lambda gradient: fired.append("hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("after"))
    before = list(layer.parameters())
    for device in (mh.gpu(1), mh.gpu(0), mh.cpu()):
        mh.to(layer, device)(torch.ones(1, 3, device=device)).sum().backward()
        assert mh.device_of(before) == device
        assert all(one is other for one, other in zip(before, layer.parameters(), strict=True))
    assert fired == ["hook", "after"] * 3


def test_a_backward_pass_over_a_move_is_refused() -> None:
    layer = torch.nn.Linear(3, 2)
    loss = layer(torch.ones(1, 3)).sum()
    layer.to(mh.gpu(1))
    with pytest.raises(RuntimeError, match=f"moved from cpu to {mh.gpu(1)} between the forward and the backward"):
        loss.backward()


@pytest.mark.parametrize("make", [lambda: torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_moved_before_its_first_call(make: Any) -> None:
    layer = make().to("cpu").double().to(mh.gpu(0)).float()
    assert {one.device for one in layer.parameters()} == {mh.gpu(0)}
    layer.to(mh.gpu(1))
    assert layer(torch.ones(4, 3, device=mh.gpu(1))).device == mh.gpu(1)
    assert {one.device for one in (*layer.parameters(), *layer.buffers())} == {mh.gpu(1)}
    assert all(isinstance(one, torch.nn.Parameter) and one.requires_grad for one in layer.parameters())
    back = make().to(mh.gpu(1)).cpu()
    assert back(torch.ones(4, 3)).device == mh.cpu()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_trained_and_loaded_on_a_virtual_device() -> None:
    layer = torch.nn.LazyLinear(2, device=mh.gpu(1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(4, 3, device=mh.gpu(1))
    layer(x).sum().backward()
    assert layer.weight.grad.device == mh.gpu(1)
    before = layer.weight.tolist()
    optimizer.step()  # it was made before the parameters had a shape, as in many scripts
    assert layer.weight.tolist() != before
    other = torch.nn.LazyLinear(2).to(mh.gpu(0))
    other.load_state_dict(layer.state_dict())
    assert other.weight.device == mh.gpu(0)
    assert other.weight.tolist() == layer.weight.tolist()
    assert mh.device_of(copy.deepcopy(torch.nn.LazyLinear(2).to(mh.gpu(1)))(x)) == mh.gpu(1)


def test_new_tensors_follow_their_model_and_the_default() -> None:
    x = torch.ones(2, dtype=torch.float64, device=mh.gpu(1))
    assert (x.new_tensor([1]).device, x.new_tensor([1]).dtype) == (mh.gpu(1), torch.float64)
    assert x.new_tensor([1], device="cpu").device == mh.cpu()
    for leaf in (x.new_tensor([1.0], requires_grad=True), torch.tensor([1.0], device=mh.gpu(1), requires_grad=True)):
        assert (leaf.is_leaf, leaf.requires_grad, leaf.device) == (True, True, mh.gpu(1))
    torch.set_default_device(mh.gpu(1))
    try:
        assert torch.tensor([1.0]).device == torch.ones(1).device == mh.gpu(1)
        assert torch.tensor([1.0], device="cpu").device == mh.cpu()
    finally:
        torch.set_default_device(None)
    with torch.device("cpu:0"):
        assert torch.as_tensor([1.0]).device == mh.gpu(0)
    assert torch.tensor([1.0]).device == mh.cpu()


@pytest.mark.parametrize("where", ["cpu", "cpu:1", None])
def test_a_ctc_loss_takes_its_lengths_from_anywhere(where: str | None) -> None:
    """As on a GPU: in tensors of the host or of the device, and in lists (None)."""
    torch.manual_seed(0)
    scores, labels = torch.randn(5, 2, 4).log_softmax(-1), torch.randint(1, 4, (2, 3))
    expected = torch.nn.functional.ctc_loss(scores, labels, (5, 4), (3, 2))
    there = scores.to("cpu:1").requires_grad_()
    lengths = [(5, 4), (3, 2)] if where is None else [torch.tensor(pair, device=where) for pair in ((5, 4), (3, 2))]
    for loss in (
        torch.nn.functional.ctc_loss(there, labels.to("cpu:1"), *lengths),
        torch.nn.CTCLoss()(there, labels, *lengths),
        torch.nn.functional.ctc_loss(there, labels, input_lengths=lengths[0], target_lengths=lengths[1]),
    ):
        torch.testing.assert_close(mh.to(loss.detach(), "cpu"), expected)
        loss.backward()
    assert there.grad.device == there.device
