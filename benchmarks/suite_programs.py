"""The programs of `benchmarks/suite.py`: nets that nobody tuned anything for, in inference and in training.

Each is made anew for every way that runs it, from the same seed, so that ways share neither weights nor optimizers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers_nets
from torch import nn

Make = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]  # a net and its arguments, in float32 on the CPU


@dataclass(frozen=True)
class Program:
    """A net and its inputs; with ``labels`` it is trained, otherwise only called."""

    name: str
    make: Make
    labels: int = 0  # how many kinds of them

    @property
    def trains(self) -> bool:
        return self.labels > 0


class Running:
    """A program on a device: ``call`` is what is timed, ``arguments`` are its own."""

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> None:
        """``exact``: in float64, with the numbers that the others begin with."""
        torch.manual_seed(0)
        net, inputs = program.make()
        low = dtype if not program.trains else torch.float32  # training keeps its weights, and casts (autocast)
        net = net.to(device).to(low).train(program.trains)
        moved = [tensor.to(device) if not tensor.is_floating_point() else tensor.to(device, low) for tensor in inputs]
        if any(tensor.dim() == 4 for tensor in moved):
            net = net.to(memory_format=torch.channels_last)
            moved = [tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor for tensor in moved]
        if exact:
            net, moved = net.double(), [tensor.double() if tensor.is_floating_point() else tensor for tensor in moved]
        self.net, self.compiled = net, net  # who compiles a net in a loop replaces the second
        self._device, self._cast = device.type, program.trains and not exact and dtype is not torch.float32
        self._dtype = dtype
        if program.trains:
            labels = torch.arange(moved[0].shape[0], device=device) % program.labels
            self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            self.arguments: tuple[Any, ...] = (*moved, labels)
            self.call: Callable[..., Any] = self._step
        else:
            self.arguments, self.call = tuple(moved), self._infer

    def _infer(self, *arguments: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.compiled(*arguments)

    def _step(self, *arguments: torch.Tensor) -> torch.Tensor:
        *inputs, labels = arguments
        self.optimizer.zero_grad()
        with torch.autocast(self._device, self._dtype, enabled=self._cast):
            answers = self.compiled(*inputs)
        loss = nn.functional.cross_entropy(answers.to(_wide(answers)), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in (*self.net.parameters(), *self.net.buffers())]

    def put_back(self, before: list[torch.Tensor]) -> None:
        """What was there before some steps, with momenta that count for nothing."""
        with torch.no_grad():
            for tensor, value in zip(self.state(), before, strict=True):
                tensor.copy_(value)
            for state in self.optimizer.state.values() if hasattr(self, "optimizer") else ():
                state["momentum_buffer"].zero_()

    def weights(self) -> list[torch.Tensor]:
        return [tensor.detach() for tensor in self.net.parameters()]


def _wide(answers: torch.Tensor) -> torch.dtype:
    return torch.float64 if answers.dtype is torch.float64 else torch.float32


# Nets


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), causal=True) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens))))[:, -1]


class Convolutions(nn.Sequential):
    def __init__(self, before: int, after: int, norm: bool = True) -> None:
        layers: list[nn.Module] = []
        for first in (before, after):
            layers += [nn.Conv2d(first, after, 3, padding=1, bias=not norm)]
            layers += [nn.BatchNorm2d(after)] if norm else []
            layers += [nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(Convolutions(2 * size, size) for size in sizes[:-1])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if not number else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(skips[:-1]), strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x).mean((2, 3))


class DiffusionBlock(nn.Module):
    """Two residual blocks with GroupNorm, SiLU and a time embedding, and attention between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(5))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.times = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def _residual(self, x: torch.Tensor, time: torch.Tensor, number: int) -> torch.Tensor:
        first, second = 2 * number, 2 * number + 1
        y = self.convolutions[first](nn.functional.silu(self.norms[first](x)))
        y = y + self.times[number](nn.functional.silu(time))[:, :, None, None]
        return x + self.convolutions[second](nn.functional.silu(self.norms[second](y)))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self._residual(x, time, 0)
        batch, width, *size = x.shape
        q, k, v = self.qkv(self.norms[4](x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, width, *size))
        return self._residual(x, time, 1)


class Recommender(nn.Module):
    """Many embeddings, a small net over numbers, and all products of pairs."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 2))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(numbers)
        rows = [table(kinds[:, number]) for number, table in enumerate(self.tables)]
        stacked = torch.stack([bottom, *rows], 1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], 1))


class Ensemble(nn.Module):
    def __init__(self, members: int, width: int, layers: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
            for _ in range(members)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.stack([member(x) for member in self.members]).mean(0))


class Experts(nn.Module):
    """A mixture of experts, each of which sees every sample: the weights of a softmax say how much it counts."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head((parts * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1))


class Branchy(nn.Module):
    """Blocks of several small convolutions side by side, joined."""

    def __init__(self, blocks: int, branches: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, branches * width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(branches * width, width, 1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                )
                for _ in range(branches)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(branches * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)
        return self.head(x.mean((2, 3)))


class Lstm(nn.Module):
    """Written out step by step, as PyTorch's own is one call of a library."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = x.new_zeros(x.shape[0], x.shape[2])
        states = [(empty, empty) for _ in self.cells]
        for row in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(row, states[number])
                row = states[number][0]
        return self.head(row)


# The list


def programs(quick: bool) -> dict[str, Program]:
    """All programs by name; ``quick``: sizes for a try on a CPU."""
    listed = [*_custom(quick), *_vision(quick), *_language(quick)]
    return {program.name: program for program in listed}


def _custom(quick: bool) -> list[Program]:
    def images(count: int, size: int) -> torch.Tensor:
        return torch.randn(count, 3, size, size)

    def branchy(batch: int) -> Make:
        if quick:
            return lambda: (Branchy(2, 2, 8), (images(min(batch, 4), 8),))
        return lambda: (Branchy(8, 6, 32), (images(batch, 28),))

    def ensemble() -> Any:
        width = 16 if quick else 256
        return Ensemble(3 if quick else 8, width, 2 if quick else 4), (torch.randn(64, width),)

    def experts() -> Any:
        width = 16 if quick else 256
        return Experts(3 if quick else 8, width), (torch.randn(64, width),)

    def gpt() -> Any:
        if quick:
            return Gpt(100, 64, 2), (torch.randint(100, (2, 16)),)
        return Gpt(32_000, 512, 8), (torch.randint(32_000, (4, 128)),)

    def unet() -> Any:
        return (UNet(8), (images(1, 16),)) if quick else (UNet(32), (images(4, 128),))

    def diffusion() -> Any:
        width, size = (16, 8) if quick else (256, 32)
        return DiffusionBlock(width), (torch.randn(1, width, size, size), torch.randn(1, width))

    def recommender() -> Any:
        tables, rows, width, batch = (4, 50, 8, 8) if quick else (26, 10_000, 64, 2048)
        return Recommender(tables, rows, width), (torch.randn(batch, 13), torch.randint(rows, (batch, tables)))

    def lstm() -> Any:
        batch, length, width = (4, 4, 16) if quick else (32, 16, 256)
        return Lstm(width, 2), (torch.randn(batch, length, width),)

    return [
        Program("branchy-cnn", branchy(1)),
        Program("branchy-cnn-train", branchy(64), labels=10),
        Program("mlp-ensemble", ensemble),
        Program("mlp-ensemble-train", ensemble, labels=10),
        Program("experts", experts),
        Program("experts-train", experts, labels=10),
        Program("gpt", gpt),
        Program("gpt-train", gpt, labels=100),
        Program("unet", unet),
        Program("unet-train", unet, labels=4),
        Program("diffusion-block", diffusion),
        Program("recommender", recommender),
        Program("recommender-train", recommender, labels=2),
        Program("lstm", lstm),
        Program("lstm-train", lstm, labels=10),
    ]


def _vision(quick: bool) -> list[Program]:
    """torchvision's, where it is installed."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError):  # not there, or of another version of PyTorch
        return []
    size = 64 if quick else 224

    def net(name: str, batch: int, size: int = size, **how: Any) -> Make:
        return lambda: (getattr(models, name)(weights=None, **how), (torch.randn(batch, 3, size, size),))

    plain: dict[str, Any] = {"aux_logits": False, "init_weights": False}
    batch = 2 if quick else 64
    return [
        Program("resnet50", net("resnet50", 1)),
        Program("densenet121", net("densenet121", 1)),
        Program("mobilenet-v3", net("mobilenet_v3_small", 1)),
        Program("googlenet", net("googlenet", 1, **plain)),
        Program("efficientnet-b0", net("efficientnet_b0", 1)),
        Program("vit-b-16", net("vit_b_16", 1, image_size=size)),
        Program("convnext-tiny", net("convnext_tiny", 1)),
        Program("vgg16", net("vgg16", 1)),
        Program("resnet18-train", net("resnet18", batch, 32, num_classes=10), labels=10),
        Program("googlenet-train", net("googlenet", batch, 64, num_classes=10, dropout=0.0, **plain), labels=10),
        Program("vit-train", net("vit_b_16", batch, 64, image_size=64, num_classes=10), labels=10),
    ]


def _language(quick: bool) -> list[Program]:
    """Those of transformers, where it is installed."""
    if not transformers_nets.installed():
        return []
    words, length, lines, size = (100, 8, 2, 32) if quick else (30_000, 128, 8, 224)
    nets = transformers_nets.nets(quick, words, size, dropout=0.0)

    def tokens(name: str, count: int) -> Make:
        return lambda: (nets[name](), (torch.randint(words, (count, length)),))

    return [
        Program("hf-bert", tokens("hf-bert", 1)),
        Program("hf-bert-train", tokens("hf-bert", lines), labels=10),
        Program("hf-gpt2", tokens("hf-gpt2", 1)),
        Program("hf-gpt2-train", tokens("hf-gpt2", lines), labels=100),
        Program("hf-llama", tokens("hf-llama", 1)),
        Program("hf-llama-train", tokens("hf-llama", lines), labels=100),
        Program("hf-convnext", lambda: (nets["hf-convnext"](), (torch.randn(1, 3, size, size),))),
    ]


def copied(values: Any) -> list[torch.Tensor]:
    """The tensors of a result in memory of their own."""
    leaves = values if isinstance(values, (list, tuple)) else [values]
    return [copy.deepcopy(tensor.detach()) for tensor in leaves if isinstance(tensor, torch.Tensor)]
