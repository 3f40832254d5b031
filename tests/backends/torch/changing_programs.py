"""Random programs that change what they depend on between calls: `parallel` has to give what plain execution gives.

    python tests/backends/torch/changing_programs.py                     200 programs
    python tests/backends/torch/changing_programs.py --count 5000 --first 1000
    python tests/backends/torch/changing_programs.py --seed 17           one program, shown with its calls

A program is Python source: some things that a function depends on, each with a way to change it, and a function that
uses them. It is executed twice; one copy's function is called plainly, the other's by `parallel`. Between calls random
changes are made to both. Results, errors, arguments, what is outside and random numbers have to be the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands import torch as mh

CALLS = 7


@dataclass
class Thing:
    """Something that a program depends on; `{n}` is its number."""

    setup: str
    use: str  # lines over `v`, the value so far
    change: str


THINGS = {
    "a global": Thing("scale{n} = 2.0", "v = v * scale{n}", "global scale{n}\nscale{n} += 1"),
    "a list": Thing(
        "items{n} = [1.0, 2.0]", "for one in items{n}:\n    v = v + one", "items{n}.append(len(items{n}) * 1.0)"
    ),
    "a dict": Thing("table{n} = dict(a=1.0)", "v = v + sum(table{n}.values())", "table{n}[str(len(table{n}))] = 3.0"),
    "a set": Thing("numbers{n} = {{1, 2}}", "v = v * len(numbers{n})", "numbers{n}.add(len(numbers{n}) + 7)"),
    "an attribute": Thing("class Own{n}: pass\nown{n} = Own{n}(); own{n}.k = 2.0", "v = v - own{n}.k", "own{n}.k += 1"),
    "a class attribute": Thing("class Kind{n}:\n    k = 2.0", "v = v * Kind{n}.k", "Kind{n}.k += 1"),
    "a nested class": Thing(
        "class Outer{n}:\n    class Inner:\n        k = 2.0", "v = v * Outer{n}.Inner.k", "Outer{n}.Inner.k += 1"
    ),
    "a property": Thing(
        "class Prop{n}:\n    _k = 1.0\n    @property\n    def k(self):\n        return self._k * 2\n"
        "prop{n} = Prop{n}()",
        "v = v + prop{n}.k",
        "prop{n}._k += 1",
    ),
    "the environment": Thing(
        "import os\nos.environ['MANYHANDS_TEST_{n}'] = '1'",
        "v = v * float(os.environ['MANYHANDS_TEST_{n}'])",
        "environment(os.environ, 'MANYHANDS_TEST_{n}')",
    ),
    "a UserDict": Thing(
        "from collections import UserDict\nsettings{n} = UserDict(k=2.0)",
        "v = v * settings{n}['k']",
        "settings{n}['k'] += 1",
    ),
    "a thread's own": Thing(
        "import threading\nlocal{n} = threading.local(); local{n}.k = 1.0", "v = v + local{n}.k", "local{n}.k += 1"
    ),
    "a default": Thing(
        "def shift{n}(x, by=1.0):\n    return x + by", "v = shift{n}(v)", "shift{n}.__defaults__ = (4.0,)"
    ),
    "a helper": Thing(
        "def helper{n}(x):\n    return x + 1\ndef other{n}(x):\n    return x * 2",
        "v = helper{n}(v)",
        "global helper{n}, other{n}\nhelper{n}, other{n} = other{n}, helper{n}",
    ),
    "code": Thing(
        "def coded{n}(x):\n    return x + 1\ndef recoded{n}(x):\n    return x * 3",
        "v = coded{n}(v)",
        "coded{n}.__code__, recoded{n}.__code__ = recoded{n}.__code__, coded{n}.__code__",
    ),
    "a branch": Thing("flag{n} = [True]", "v = v.sin() if flag{n}[0] else v.cos()", "flag{n}[0] = not flag{n}[0]"),
    "a tensor, written to": Thing("w{n} = torch.ones(4)", "v = v + w{n}", "w{n}.add_(1)"),
    "a tensor, replaced": Thing("u{n} = [torch.ones(4)]", "v = v * u{n}[0]", "u{n}[0] = u{n}[0] + 1"),
    "a number of a tensor": Thing("c{n} = torch.tensor(1.0)", "v = v * float(c{n} + 1)", "c{n}.add_(1)"),
    "a layer's mode": Thing("drop{n} = nn.Dropout(0.5)", "v = drop{n}(v)", "drop{n}.train(not drop{n}.training)"),
    "a layer's setting": Thing("leaky{n} = nn.LeakyReLU(0.1)", "v = leaky{n}(v)", "leaky{n}.negative_slope += 0.1"),
    "a layer's weights": Thing(
        "torch.manual_seed({n}); layer{n} = nn.Linear(4, 4).requires_grad_(False)",
        "v = layer{n}(v)",
        "layer{n}.weight.mul_(0.5)",
    ),
    "a layer, replaced": Thing(
        "layers{n} = nn.ModuleList([nn.Identity()])", "v = layers{n}[0](v)", "layers{n}[0] = nn.Tanh()"
    ),
    "running statistics": Thing(
        "norm{n} = nn.BatchNorm1d(4, affine=False)", "v = norm{n}(v)", "norm{n}.train(not norm{n}.training)"
    ),
    "random numbers": Thing("seed{n} = 0", "v = v + torch.rand_like(v)", "torch.manual_seed({n})"),
    "an error": Thing(
        "limit{n} = [9]",
        "if limit{n}[0] < 0:\n    raise ValueError(f'below: {{limit{n}[0]}}')\nv = v + 1",
        "limit{n}[0] -= 6",
    ),
    "a check of values": Thing(
        "good{n} = [True]",
        "matrix = torch.eye(4) * (1 if good{n}[0] else -1)\n"
        "try:\n    v = v @ torch.linalg.cholesky(matrix)\nexcept RuntimeError:\n    v = v - 5",
        "good{n}[0] = not good{n}[0]",
    ),
    "a write to an argument": Thing(
        "on{n} = [True]", "if on{n}[0]:\n    y.add_(1)\nv = v + y", "on{n}[0] = not on{n}[0]"
    ),
    "a gradient": Thing(
        "p{n} = [1.0]",
        "z = v.detach().requires_grad_()\nv = torch.autograd.grad((z.sin() * p{n}[0]).sum(), z)[0]",
        "p{n}[0] += 1",
    ),
}


@dataclass
class Program:
    seed: int
    source: str
    count: int  # of its things
    kinds: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"# seed {self.seed}\n{self.source}"


def program(seed: int) -> Program:
    draw = random.Random(seed)
    kinds = [draw.choice(sorted(THINGS)) for _ in range(draw.randint(1, 4))]
    setup, use, changes = ["import torch", "from torch import nn"], [], []
    for number, kind in enumerate(kinds):
        thing = THINGS[kind]
        setup.append(thing.setup.format(n=number))
        use.append(f"# {kind}\n{thing.use.format(n=number)}")
        body = thing.change.format(n=number)
        changes.append(f"def change_{number}():\n{_indented(body)}")
    body = _indented("\n".join(["v = x * 1.0", *use, "return {'v': v, 'sum': v.sum()}"]))
    source = "\n".join([*setup, f"def function(x, y):\n{body}", *changes])
    return Program(seed, source, len(kinds), kinds)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _environment(values: Any, name: str) -> None:
    """Changed once: both copies of a program share the environment of the process."""
    values[name] = str(float(values[name]) + 1)


class Copy:
    """One copy of a program in its own namespace."""

    def __init__(self, made: Program, is_planned: bool) -> None:
        name = f"program_{made.seed}_{'planned' if is_planned else 'plain'}"
        sys.modules[name] = module = types.ModuleType(name)  # Dynamo looks for it there
        self.space: dict[str, Any] = vars(module)
        self.space["environment"] = _environment if is_planned else lambda *_: None
        exec(compile(made.source, f"program {made.seed}", "exec"), self.space)
        function = self.space["function"]
        self.call: Callable[..., Any] = mh.parallel(function, synchronous=True) if is_planned else function

    def outcome(self, x: torch.Tensor, y: torch.Tensor, seed: int, mode: str) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        x, y = x.clone(), y.clone()
        try:
            with _mode(mode):
                result: Any = {key: value.detach() for key, value in self.call(x, y).items()}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        return result, x, y, torch.get_rng_state(), self._tensors()

    def _tensors(self) -> list[torch.Tensor]:
        values = [value for name, value in sorted(self.space.items()) if not name.startswith("__")]
        found = [value for value in values if isinstance(value, torch.Tensor)]
        for module in values:
            if isinstance(module, torch.nn.Module):
                found += [*module.parameters(), *module.buffers()]
        return [value.clone() for value in found]


@contextmanager
def _mode(name: str) -> Iterator[None]:
    modes: dict[str, Any] = {"plain": nullcontext(), "no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    with modes[name]:
        yield


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """What is not the same, in words; None: nothing."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = (
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
        return None if same else f"{where}: {other.flatten()[:4].tolist()} instead of {one.flatten()[:4].tolist()}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {other} instead of {one}"
        return next((found for key in one if (found := difference(one[key], other[key], f"{where} {key}"))), None)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return next((found for n, pair in enumerate(pairs) if (found := difference(*pair, f"{where} {n}"))), None)
    return None if one == other else f"{where}: {other!r} instead of {one!r}"


def failure(seed: int, calls: int = CALLS) -> str | None:
    """What differs in the first call that does, with the program; None: nothing."""
    made, draw = program(seed), random.Random(seed + 1)
    plain, fast = Copy(made, False), Copy(made, True)
    history = []
    for number in range(calls):
        rows = draw.choice([2, 2, 2, 3])
        x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(seed + number))
        mode = draw.choice(["plain", "plain", "no_grad", "inference"])
        history.append(f"call with {rows} rows, {mode}")
        outcomes = [copy.outcome(x, x + 1, seed + number, mode) for copy in (plain, fast)]
        found = difference(*outcomes)
        if found is not None:
            return f"{made}\n# {'; '.join(history)}\n# differs: {found}\n{fast.call.explain()}"  # type: ignore[attr-defined]
        for thing in range(made.count):
            if draw.random() < 0.4:
                history.append(f"change {thing} ({made.kinds[thing]})")
                for copy in (plain, fast):
                    with torch.no_grad():
                        copy.space[f"change_{thing}"]()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        print(program(options.seed))
    seeds = range(options.first, options.first + options.count) if options.seed is None else [options.seed]
    failed = 0
    for seed in seeds:
        found = failure(seed)
        if found is not None:
            failed += 1
            print(found, end="\n\n", flush=True)
    print(f"{failed} of {len(seeds)} programs differ from plain execution")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
