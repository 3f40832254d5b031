"""How long `parallel(fn)` takes to plan functions of about 500 operations: at first, and with costs that are known.

    python benchmarks/planning_time.py                   three functions, each in processes of its own
    python benchmarks/planning_time.py --only resnet     one of them
    python benchmarks/planning_time.py --parts           processor time of capture and guards, and what a call asks
    PYTHONPATH=/elsewhere/src python benchmarks/planning_time.py    another state of the code

A ResNet-18 training step, a stack of transformer blocks, and a net of Inception blocks in eval mode. The clock starts
at the first call and stops with its result; beside it is the time of the processor, which a busy machine changes less.
Dynamo is imported before, as by everybody who compiles. "first": an empty folder of costs; "again": another process
with the folder that the first one has filled. What each part of planning took is what `explain()` says.
"""

from __future__ import annotations

import argparse
import inspect
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


def plan_alone(name: str) -> None:
    import torch
    import torch._dynamo

    from manyhands import torch as mh

    torch.manual_seed(0)
    function, arguments = FUNCTIONS[name](torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    fast = mh.parallel(function)
    fast.shows_progress = False
    start, begin = time.perf_counter(), time.process_time()
    fast(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent, processor = time.perf_counter() - start, time.process_time() - begin
    parts = next((line.strip() for line in fast.explain().splitlines() if line.startswith("  planned in")), "")
    tasks = 0 if fast.planned.costed is None else len(fast.planned.costed.tasks)
    print(f"{spent:6.2f} s, processor {processor:5.2f} s, {tasks} tasks; {parts}", flush=True)


def parts(name: str) -> None:
    """Capture and guards by the processor's time, whatever plan would win; and what asking the guards takes."""
    import torch
    import torch._dynamo

    from manyhands.backends.torch import planning

    torch.manual_seed(0)
    function, arguments = FUNCTIONS[name](torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    begin = time.process_time()
    trace: Any = planning.trace(function, planning.call(arguments, {}))
    captured = time.process_time()
    extra = (trace,) if "trace" in inspect.signature(planning.guards).parameters else ()
    check: Any = planning.guards(function, arguments, {}, *extra)  # type: ignore[call-arg]
    guarded = time.process_time()
    asked, traced = least_seconds(lambda: check(arguments, {})), least_seconds(trace.holds)
    print(
        f"capture {captured - begin:5.2f} s, guards {guarded - captured:5.2f} s; "
        f"a call asks Dynamo {asked * 1e6:5.0f} us, our own guards {traced * 1e6:5.0f} us",
        flush=True,
    )


def least_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        begin = time.process_time()
        for _ in range(10):
            work()
        times.append((time.process_time() - begin) / 10)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FUNCTIONS)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--child", choices=FUNCTIONS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        (parts if flags.parts else plan_alone)(flags.child)
        return 0
    for name in [flags.only] if flags.only else FUNCTIONS:
        with tempfile.TemporaryDirectory() as folder:
            for when in ("parts",) if flags.parts else ("first", "again"):
                print(f"{name:<12} {when}: ", end="", flush=True)
                environment = os.environ | {"MANYHANDS_CACHE": folder}
                command = [sys.executable, __file__, "--child", name, *(["--parts"] if flags.parts else [])]
                subprocess.run(command, env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
