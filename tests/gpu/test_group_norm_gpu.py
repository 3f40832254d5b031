"""GroupNorm by our own kernels: as near to float64 as PyTorch, the same every time, and used by the trainer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, group_norm, silu  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch.kernels import group_norm as kernels  # noqa: E402
from manyhands.training.torch.fast import build  # noqa: E402
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms  # noqa: E402

DEVICE = torch.device("cuda", 0)
ACTIVATIONS = {"none": lambda y: y, "relu": torch.relu, "silu": silu}
# Samples, channels, sizes, groups: groups of 1, 3, 8, 10 and all channels, one row, many samples, three dimensions.
FORMS = [
    (4, 64, (9, 7), 8),
    (3, 96, (5, 5), 32),
    (2, 320, (16, 16), 32),
    (2, 64, (31, 33), 1),
    (2, 64, (4, 4), 64),
    (300, 8, (3, 3), 2),
    (2, 4096, (1, 1), 4),
    (2, 1032, (8, 8), 3),
    (3, 16, (50,), 4),
]


def image(count: int, channels: int, sizes: tuple[int, ...], dtype: Any) -> Any:
    """Numbers far from zero, the channels of a place side by side."""
    x = torch.randn(count, *sizes, channels, device=DEVICE) + 3
    return x.to(dtype).movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_give_what_float64_gives(form: Any, activation: str, dtype: Any) -> None:
    torch.manual_seed(0)
    count, channels, sizes, groups = form
    kernels.ready(DEVICE, dtype)
    x, gradient = image(count, channels, sizes, dtype), image(count, channels, sizes, dtype)
    weight, bias = (torch.randn(channels, device=DEVICE) for _ in range(2))
    assert kernels.fits(x, weight, bias)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = ACTIVATIONS[activation](group_norm(wide[0], groups, *wide[1:], eps=1e-3))
    expected.backward(gradient.double())
    mean, rstd = kernels.statistics(x, groups, 1e-3)
    parts = (x, mean, rstd, weight, bias)
    for_weight, for_bias, means = kernels.sums(gradient, *parts, activation)
    results = {
        "result": (kernels.apply(*parts, activation, True), expected),
        "input": (kernels.input_gradient(gradient, *parts, means, activation, True), wide[0].grad),
        "weight": (for_weight, wide[1].grad),
        "bias": (for_bias, wide[2].grad),
    }
    for name, (mine, exact) in results.items():
        # All numbers of these gradients are positive: a mean that is rounded to float32 moves every sum the same way.
        assert float((mine - exact).detach().norm() / (exact.detach().norm() + 1e-3)) < 5e-5, name
    # In 16 bits it is the same, rounded.
    assert torch.equal(kernels.apply(*parts, activation, False), results["result"][0].to(dtype))
    narrow = kernels.input_gradient(gradient, *parts, means, activation, False)
    assert torch.equal(narrow, results["input"][0].to(dtype))
    assert torch.equal(kernels.statistics(x, groups, 1e-3)[1], rstd), "the same every time"


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, activation in ((3, 32, nn.SiLU()), (32, 64, nn.ReLU()), (64, 64, nn.SiLU(inplace=True))):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), activation]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_gradients_under_autocast_are_as_exact() -> None:
    plain = net().to(DEVICE, memory_format=torch.channels_last)
    x = torch.randn(16, 3, 20, 20, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.arange(16, device=DEVICE) % 10

    def gradients(model: nn.Module, mode: FusedGroupNorms | None) -> Any:
        model = copy.deepcopy(model)
        dtype = next(model.parameters()).dtype
        if mode is not None:
            mode.begin(poison=True)
            mode.__enter__()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.float32):
            answers = model(x.to(dtype))
        loss = cross_entropy(answers.to(torch.promote_types(answers.dtype, torch.float32)), y)
        if mode is not None:
            mode.__exit__(None, None, None)
            mode.__enter__()
        loss.backward()
        if mode is not None:
            mode.__exit__(None, None, None)
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])

    kernels.ready(DEVICE)
    exact, mode = gradients(copy.deepcopy(plain).double(), None), FusedGroupNorms()
    ours, theirs = gradients(plain, mode), gradients(plain, None)
    assert float((ours - exact).norm()) <= 1.05 * float((theirs - exact).norm())
    # Pooling is in float32, so the gradient of the last one is, too: its backward is PyTorch's.
    assert mode.counts == {"group normalisations": 3, "with SiLU": 2, "with ReLU": 1, "backward": 2}


def test_the_trainer_uses_them() -> None:
    images, labels = torch.randn(512, 3, 20, 20), torch.randint(10, (512,))
    losses, explained = [], []
    for fused in (True, False):
        model = net()
        trainer = mh.Trainer(3, devices=["gpu:0"], batch_size=64, lr=0.05, quiet=True)
        with nullcontext() if fused else build.without("fused norms"):
            result = trainer.fit(model, (images, labels))
        losses.append([row["train_loss"] for row in result.rows])
        explained.append(result.notes)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=5e-3, atol=5e-3)
    assert not any("not fused" in note for note in explained[0]), explained[0]
