"""Random programs for ``mh.parallel`` that change what they depend on between calls, compared with plain execution.

A program is text: a few global values, a module, a function, and a list of calls with what changes before each. It is
run in two worlds that know nothing of each other, once plainly and once through ``parallel``, call by call. Results,
errors, arguments, state and random numbers have to be the same, to the bit.

``MANYHANDS_EXAMPLES=5000`` runs that many of each kind (with ``--long``). With ``breaks`` programs are such that cannot
be captured as one graph: they print, read numbers, branch on values, catch errors, and give back tensors through which
a backward pass goes later.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import by_dynamo
from support import examples

from manyhands.parallel.function import Parallel

# What a program stands on. Names in capitals are changed between calls.
WORLD = """
import contextlib
import random as python_random
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

class Settings:
    scale = 1.5
    def __init__(self):
        self.shift, self.on, self.table = 0.25, True, {"a": 2.0, "b": [1.0, 3.0]}

class Net(nn.Module):
    factor = 1.0
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.depth, self.bend = 1, torch.tanh
        self.register_buffer("offset", torch.full((3,), 0.5))
    def forward(self, x):
        for _ in range(self.depth):
            x = self.bend(self.first(x))
        if self.training:
            x = self.drop(x)
        return x * self.factor + self.offset

class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.mean = 0, None
    def forward(self, x):
        self.seen += 1
        self.mean = x.detach().mean() if self.mean is None else 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean

def helper(v, k=2.0):
    return v * k

def safe(v):
    try:
        return torch.linalg.cholesky(v)
    except RuntimeError as error:
        LOG.append(type(error).__name__)
        return v * 3

def positive(v):
    LOG.append("asked")
    if v.sum() < 0:
        raise ValueError("negative")
    return v + 1

@contextlib.contextmanager
def noted(word):
    LOG.append(word)
    try:
        yield
    finally:
        LOG.append("end of " + word)

torch.manual_seed(5)
NUMBER, FLAG, WORD = 2.0, True, "tanh"
TABLE = {"x": 1.0, "y": 2}
ITEMS = [1.0, 2.0]
WEIGHTS = [torch.randn(3, 3), torch.randn(3, 3)]
ARRAY = np.arange(3, dtype=np.float32)
OBJECT = Settings()
NET = Net()
PARAMETER = nn.Parameter(torch.randn(3, 3))
OPTIMIZER = torch.optim.SGD([PARAMETER], lr=0.1, momentum=0.9)
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
COUNT = torch.tensor(3)
RUNNING = Running()
GENERATOR = torch.Generator().manual_seed(9)
LOG = []
"""

# Statements of the function: {a}, {b} are values so far, {new} the next one. All values are 3x3 in float32 or float64.
STATEMENTS = """
{new} = {a} + {b}
{new} = {a} @ {b}
{new} = torch.sin({a}) * {b}
{new} = {a} * NUMBER if FLAG else {a} - {b}
{new} = getattr(torch, WORD)({a})
{new} = {a} * TABLE["x"] * NUMBER + len(TABLE)
{new} = sum([{a} * i for i in ITEMS], {b})
{new} = {a} @ WEIGHTS[0].to({a}.dtype)
{new} = {a} * float(ARRAY.sum())
{new} = {a} * OBJECT.scale + OBJECT.shift
{new} = {a} * OBJECT.table["b"][0] if OBJECT.on else {b} * 1
{new} = NET({a}.float()).to({a}.dtype)
{new} = F.linear({a}.float(), NET.first.weight, NET.first.bias).detach().to({a}.dtype)
{new} = helper({a}, k=inner["k"])
{new} = {a} * inner["k"] + closed
{new} = F.dropout({a}, 0.5)
{new} = torch.randn_like({a}) * {b}
{new} = torch.where({a} > 0, {a}, {b})
{new} = {a}.clone().mul_(2.0).add_({b})
{new} = torch.cat([{a}[:1], {b}[1:]])
{new} = {a}.double() if {a}.dtype == torch.float32 else {a} * 1
{new} = torch.autograd.grad(({a}.detach().requires_grad_() * PARAMETER.to({a}.dtype)).sum(), PARAMETER)[0].to({a}.dtype)
{new} = {a} * (2 if torch.is_grad_enabled() else 3)
{new} = {a} * (1 if {a}.requires_grad else 2)
{new} = torch.linalg.inv({a} + 4 * torch.eye(3, dtype={a}.dtype))
{new} = {a} * python_random.random()
{new} = {a} + (0 if {a} is {b} else 1)
{new} = {a} / ({b}.abs().max().item() + 1)
{new} = {a} * float(COUNT + 1)
{new} = RUNNING({a})
{new} = {a} + torch.rand(3, 3, generator=GENERATOR)
{new} = {a} + float(np.random.rand())
{new} = {a} * globals()["NUMBER"]
{new} = (lambda v: v * NUMBER)({a})
{new} = [{a} * n for n in (w.sum() for w in WEIGHTS)][0]
{new} = {a} * OPTIMIZER.param_groups[0]["lr"]
{a}.mul_(0.5)
{a}[1] = 0.25
{a}.t()[0].sub_(1.0)
TABLE["x"] += 1
LOG.append(len(LOG))
inner["k"] += 0.5
OBJECT.shift = OBJECT.shift * 2
OPTIMIZER.zero_grad(); ({a}.detach() * PARAMETER.to({a}.dtype)).sum().backward(); OPTIMIZER.step()
if NUMBER > 3: raise ValueError("too large: " + str(NUMBER))
"""
# Statements that end a piece, and those that stand between pieces.
BREAKING = """
print("sum", float({a}.detach().sum()))
{new} = {a} * {b}.detach().sum().item()
{new} = {a} * 2 if {a}.sum() > 0 else {b} - 1
{new} = {a} + len({a}[{a} > 0])
{new} = {a} + torch.from_numpy({b}.detach().numpy() * 2)
{new} = positive({a})
{new} = safe(positive({a}))
{new} = NET({a}.float()).to({a}.dtype); print("net")
({a}.detach() * PARAMETER.to({a}.dtype)).sum().backward()
OPTIMIZER.zero_grad(); ({a}.detach() * PARAMETER.to({a}.dtype)).sum().backward(); OPTIMIZER.step(); print("step")
if {a}.sum() > 5: raise ValueError("too large")
OBJECT.shift = round({a}.detach().mean().item(), 3)
{new} = {a} * len(torch.nonzero({b} > 0))
{new} = F.dropout({a}, 0.5); print("dropped")
{new} = {a} + torch.rand(3, 3); print(round(python_random.random(), 6))
"""
BLOCKS = (
    "with torch.no_grad():",
    "with torch.autocast('cpu', dtype=torch.bfloat16):",
    "for step in range(2):",
    "try:",
    "if OBJECT.on:",
)
_BREAKING_BLOCKS = (*BLOCKS, "with noted('block'):", "if a.sum() > b.sum():", "with contextlib.suppress(RuntimeError):")
# What happens between two calls. Not among them: what docs/parallel.md lists as not noticed.
CHANGES = """
NUMBER = NUMBER + 1
NUMBER = 1.0
FLAG = not FLAG
WORD = "cos"
TABLE["x"] = 5.0
del TABLE["y"]
ITEMS.append(3.0)
WEIGHTS[0] = torch.ones(3, 3)
WEIGHTS[0].add_(1.0)
ARRAY[0] = 7.0
OBJECT.shift = -1.0
OBJECT.table["b"][0] = 4.0
Settings.scale = 0.5
OBJECT = Settings()
NET.eval()
NET.drop.p = 0.25
NET.depth = 2
Net.factor = 4.0
NET.bend = torch.relu
NET.first.weight = nn.Parameter(torch.ones(3, 3))
NET.first.requires_grad_(False)
NET.offset.add_(1.0)
NET.load_state_dict({name: torch.ones_like(value) for name, value in NET.state_dict().items()})
NET.first.register_forward_hook(lambda module, inputs, output: output * 2)
NET = Net()
PARAMETER.data.fill_(0.5)
PARAMETER.grad = None
OPTIMIZER.param_groups[0]["lr"] = 0.5
OPTIMIZER.load_state_dict(OPTIMIZER.state_dict())
def helper(v, k=2.0): return v - k
helper.__defaults__ = (5.0,)
cells["inner"]["k"] = 7.0
torch.set_default_dtype(torch.float64)
COUNT.add_(1)
helper.__code__ = (lambda v, k=2.0: v + k).__code__
RUNNING.seen = 10
GENERATOR.manual_seed(1)
SCHEDULER.step()
OBJECT.__class__ = type("Other", (Settings,), {"scale": 8.0})
"""
ARGUMENTS = (
    "(make(0), make(1))",
    "(make(0), make(1).t())",
    "(make(0).double(), make(1).double())",
    "twice(make(0))",
    "views(make(2, 6))",
    "(make(0).requires_grad_(), make(1))",
    "(make(0)[:, :3], make(1)[::1])",
    "(make(0) * 0, make(1) - 5)",
    "(make(0) * float('nan'), make(1))",
)
SURROUNDINGS = (
    "nothing",
    "nothing",
    "nothing",
    "nothing",
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.autocast('cpu', dtype=torch.bfloat16)",
)
STATE = ("NUMBER", "FLAG", "WORD", "TABLE", "ITEMS", "WEIGHTS", "ARRAY", "OBJECT", "NET", "PARAMETER")
STATE += ("OPTIMIZER", "LOG", "cells", "COUNT", "RUNNING", "GENERATOR")


def _lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


@dataclass
class Program:
    """A program as text: the function's source, and for each call what changes, its surroundings and arguments."""

    seed: int
    function: str
    calls: list[tuple[list[str], str, str]]

    @classmethod
    def of(cls, seed: int, *, breaks: bool = False) -> Program:
        chance = random.Random(seed)
        values, body, depth = ["a", "b"], [], 1
        for number in range(chance.randint(1, 6)):
            depth, opened = _block(chance, body, depth, _BREAKING_BLOCKS if breaks else BLOCKS)
            new = f"v{number}"
            line = chance.choice(_lines(STATEMENTS))
            if breaks and chance.random() < 0.5:
                line = chance.choice(_lines(BREAKING))
            names = {"a": chance.choice(values), "b": chance.choice(values), "new": new}
            body.append("    " * depth + line.format(**names))
            if opened and body[-2].strip() == "try:":
                body.append("    " * (depth - 1) + f"except (RuntimeError, ValueError): {new} = a * 3")
            depth = depth - 1 if opened else depth
            if line.startswith("{new} =") and (
                not opened or not body[-2].strip().startswith(("if ", "with contextlib"))
            ):
                values.append(new)
        kept = chance.sample(values, min(len(values), chance.randint(1, 3)))
        as_it_is = 0.5 if breaks else 0.08
        kept = [name if chance.random() < as_it_is else f"{name}.detach() * 1" for name in kept]
        result = chance.choice(["[{}]", "({},)", "{{'r': [{}]}}"]).format(", ".join(kept))
        lines = ["def made():", "    inner, closed = {'k': 1.5}, 0.75", "    cells = {'inner': inner}"]
        lines += ["    def function(a, b):", *("    " + line for line in body), f"        return {result}"]
        lines += ["    return function, cells", "function, cells = made()"]
        calls = []
        for _ in range(chance.randint(3, 5)):
            changes = [_change(chance, lines) for _ in range(chance.choice((0, 0, 1, 1, 2)))]
            arguments = ARGUMENTS[0] if chance.random() < 0.6 else chance.choice(ARGUMENTS)
            calls.append((changes, chance.choice(SURROUNDINGS), arguments))
        return cls(seed, "\n".join(lines), calls)

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}", self.function, ""]
        for changes, surroundings, arguments in self.calls:
            lines += [*changes, f"with {surroundings}: function(*{arguments})"]
        return "\n".join(lines)


def _change(chance: random.Random, function: list[str]) -> str:
    """Mostly of something that the function reads."""
    words = set(re.findall(r"\w+", " ".join(function)))
    near = [line for line in _lines(CHANGES) if re.findall(r"\w+", line)[0] in words]
    return chance.choice(near if near and chance.random() < 0.8 else _lines(CHANGES))


def _block(chance: random.Random, body: list[str], depth: int, blocks: Sequence[str]) -> tuple[int, bool]:
    """Sometimes one statement stands in a block of its own."""
    if chance.random() > 0.25:
        return depth, False
    body.append("    " * depth + chance.choice(blocks))
    return depth + 1, True


_worlds = itertools.count()


class World:
    """The values that a program stands on, and one call after the other."""

    def __init__(self, program: Program, through: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        name = f"random_program_{next(_worlds)}"  # of its own: Dynamo finds global values by it
        module = sys.modules[name] = types.ModuleType(name)  # dataclasses look for it
        self.names: dict[str, Any] = vars(module)
        self.names.update(_ARGUMENT_MAKERS)
        self.module = module  # its names go with it
        exec(WORLD, self.names)
        exec(compile(program.function, f"<program {program.seed}>", "exec"), self.names)
        self.call = through(self.names["function"])

    def run(self, number: int, changes: list[str], surroundings: str, arguments: str) -> tuple[Any, Any, Any, Any]:
        """What a call gives or raises; its arguments afterwards; the state; the random numbers that come next."""
        seed(number)
        for change in changes:
            with contextlib.suppress(Exception):  # it may be gone already
                exec(change, self.names)
        seed(number)
        inputs = eval(arguments, self.names)
        made = contextlib.nullcontext() if surroundings == "nothing" else eval(surroundings, self.names)
        printed = io.StringIO()
        try:
            with made, contextlib.redirect_stdout(printed):
                result = self.call(*inputs)
            # Who is who is a part of the result: the argument itself, or the same value twice.
            places = {id(value): n for n, value in enumerate(inputs)}
            outcome = content(result), [places.get(id(leaf)) for leaf in _leaves(result)], printed.getvalue()
            later = [
                leaf.sum() for leaf in _leaves(result) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
            ]
            if later:
                sum(later).backward()
        except Exception as error:
            outcome = type(error).__name__, str(error).partition("\n")[0], printed.getvalue()
        state = {name: content(self.names[name]) for name in STATE}
        after = torch.get_rng_state().tolist()[:64], random.random(), torch.is_grad_enabled(), torch.get_default_dtype()
        return outcome, content(list(inputs)), state, after


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _make(number: int, columns: int = 3) -> torch.Tensor:
    rows = 3
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number), dtype=torch.float32)


_ARGUMENT_MAKERS = {
    "make": _make,
    "twice": lambda x: (x, x),
    "views": lambda x: (x[:, :3], x[:, 2:5]),
}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, (list, tuple)) else [value]


def content(value: Any) -> Any:
    """A value to compare: a tensor by its form and bits."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        form = (str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, value.is_inference())
        return form, bits, None if not value.is_leaf or value.grad is None else content(value.grad)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, torch.nn.Module):
        own = [content(vars(value).get(name)) for name in ("seen", "mean")]
        return {name: content(one) for name, one in value.state_dict(keep_vars=True).items()}, value.training, own
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()[:64]
    if isinstance(value, torch.optim.Optimizer):
        return content(value.state_dict())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [content(one) for one in value]
    if isinstance(value, dict):
        return {str(key): content(one) for key, one in value.items()}
    if any(one.__name__ == "Settings" for one in type(value).__mro__):
        return content({**vars(value), "class": type(value).scale})
    return repr(value)


_PARTS = ("the result", "the arguments", "the state", "random numbers or modes")


def difference(program: Program, options: dict[str, bool]) -> str | None:
    """The first call in which ``parallel`` differs from plain execution, and in what; None where none does.

    What Dynamo gets wrong alone does not count: ``aot_eager`` gives the same after the same calls, in everything that
    is compared. The program ends there.
    """
    found = first_difference(program, lambda function: Parallel(function, **options))
    for backward in (False, True) if found is not None else ():
        world = World(program, functools.partial(by_dynamo, backward=backward))
        results = [world.run(number, *call) for number, call in enumerate(program.calls[: found[0] + 1])]
        torch.set_default_dtype(torch.float32)
        if results[-1] == found[1]:
            return None
    return None if found is None else found[2]


def first_difference(program: Program, through: Callable[..., Any]) -> tuple[int, Any, str] | None:
    """The number of the first call that differs from plain execution, what it gave, and a text that says in what."""
    plain, fast = World(program, lambda function: function), World(program, through)
    try:
        for number, call in enumerate(program.calls):
            dtype = torch.get_default_dtype()
            expected = plain.run(number, *call)
            torch.set_default_dtype(dtype)
            result = fast.run(number, *call)
            for what, one, other in zip(_PARTS, expected, result, strict=True):
                if one != other:
                    where = [name for name in one if one[name] != other[name]] if isinstance(one, dict) else ""
                    texts = f"plain:    {_short(one, where)}\nparallel: {_short(other, where)}"
                    return number, result, f"call {number}: {what} {where}\n{texts}"
    finally:
        torch.set_default_dtype(torch.float32)
    return None


def _short(value: Any, where: Any) -> str:
    return str({name: value[name] for name in where} if where else value)[:300]


# The tests

COUNT = examples(100)
PER_TEST = 4
WAYS = [(False, {"synchronous": True}), (True, {})]  # whether it breaks, and options: synchronous plans are always used


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("breaks", "options"), WAYS, ids=["one piece", "pieces"])
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(PER_TEST, COUNT, PER_TEST))]
)
def test_calls_equal_plain_execution(first: int, breaks: bool, options: dict[str, bool]) -> None:
    torch._dynamo.reset()
    for seed in range(first, min(first + PER_TEST, COUNT)):
        program = Program.of(seed, breaks=breaks)
        wrong = difference(program, options)
        assert wrong is None, f"\n{program}\n{wrong}"


def test_a_difference_is_found() -> None:
    """The comparison itself: each world counts on from the one before."""
    program = Program.of(0)
    program.function = (
        "import builtins\nbuiltins.worlds = getattr(builtins, 'worlds', 0) + 1\nSHIFT, cells = builtins.worlds, {}\n"
        "def function(a, b):\n    return [a + SHIFT]"
    )
    program.calls = [([], "nothing", "(make(0), make(1))")]
    found = first_difference(program, Parallel)
    assert found is not None
    assert "the result" in found[2]
