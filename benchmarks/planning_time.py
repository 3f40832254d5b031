"""The first calls of functions of about 500 operations: `parallel` and `torch.compile`, each in its own process.

    python benchmarks/planning_time.py                   three functions
    python benchmarks/planning_time.py --only resnet     one of them
    python benchmarks/planning_time.py --quick           that one without Inductor
    PYTHONPATH=/elsewhere/src python benchmarks/planning_time.py    another state of the code

A ResNet-18 training step, a stack of transformer blocks, and a net of Inception blocks in eval mode. Each row begins
with empty caches; "again" is another process with the costs of operations that the row before has measured. The clock
starts at the first call and stops with its result; beside it is the time of the processor, which a busy machine changes
less. Two further calls follow: a plan is made at a graph's first call, and of a backward pass at its second. Dynamo is
imported before, as by everybody who compiles. Without `compile=True`, the first call may take half of Inductor's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def resnet(device: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step of ResNet-18."""
    import torch
    from torch import nn

    from manyhands.book import torch as models

    net = models.resnet18(10, in_channels=3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 32, 32, device=device), torch.arange(4, device=device)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(x, y)
    return step, (x, y)


def transformer(device: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch
    from suite_programs import Block
    from torch import nn

    net = nn.Sequential(*(Block(64, 4, causal=False) for _ in range(18))).to(device).eval()
    return torch.no_grad()(net), (torch.randn(2, 32, 64, device=device),)


def inception(device: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch
    from suite_programs import Branchy

    net = Branchy(blocks=13, branches=6, width=8).to(device).eval()
    return torch.no_grad()(net), (torch.randn(2, 3, 16, 16, device=device),)


FUNCTIONS = {"resnet": resnet, "transformer": transformer, "inception": inception}


def first_calls(name: str, way: str) -> None:
    import torch
    import torch._dynamo

    from manyhands import torch as mh

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function, arguments = FUNCTIONS[name](device)
    ours = way.startswith("manyhands")
    fast: Any = mh.parallel(function, compile=way.endswith("compile")) if ours else torch.compile(function, **WAYS[way])
    spent = []
    for _ in range(3):
        start, begin = time.perf_counter(), time.process_time()
        fast(*arguments)
        mh.synchronize()
        spent.append((time.perf_counter() - start, time.process_time() - begin))
    text = ", ".join(f"{clock:6.2f} s (processor {processor:5.2f} s)" for clock, processor in spent)
    parts = [line.strip() for line in fast.explain().splitlines() if "planned in" in line] if ours else []
    print("; ".join([text, *parts]), flush=True)


WAYS: dict[str, dict[str, Any]] = {
    "manyhands": {},
    "manyhands, again": {},
    "manyhands, compile": {},
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FUNCTIONS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", help="only these, with semicolons between")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        first_calls(*flags.child)
        return 0
    chosen = flags.ways.split(";") if flags.ways else [*list(WAYS)[:2], "aot_eager"] if flags.quick else list(WAYS)
    for name in [flags.only or "resnet"] if flags.quick or flags.only else FUNCTIONS:
        with tempfile.TemporaryDirectory() as costs:
            for way in chosen:
                with tempfile.TemporaryDirectory() as empty:
                    folder = costs if way.startswith("manyhands") and "compile" not in way else empty
                    environment = os.environ | {"MANYHANDS_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": empty}
                    print(f"{name:<12} {way:<20} ", end="", flush=True)
                    subprocess.run([sys.executable, __file__, "--child", name, way], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
