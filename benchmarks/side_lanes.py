"""The training step of ResNet-18, forward and backward, with weight gradients beside the backward pass and without.

    python benchmarks/side_lanes.py                      batch 256, bf16, channels last, on the first GPU
    python benchmarks/side_lanes.py --batch-size 64      another size
    python benchmarks/side_lanes.py --rows graph,lanes   some of the rows
    python benchmarks/side_lanes.py --biases keep        with biases that a BatchNorm takes away again
    python benchmarks/side_lanes.py --most-held 1000     megabytes that lanes may hold; otherwise twice the gradients,
                                                         as in the trainer

Every row is one CUDA graph. Before its time is printed its gradients are compared with those of an eager step on the
same batch: equal to the bit. A compiled row rounds at other places, and in bf16 even eager is far from exact
ones: it is compared with the same step in float64, from which it may be no further than eager is, and the ratio of the
two errors is printed. A row whose gradients are off has no time. Times are medians over rounds of replays, by the GPU's
own clock. "peak MB" is what the captured step takes at its peak, beyond the net, the batch and what came before.

As in the trainer, biases that change nothing are left out, in all rows and in the eager step that they are compared
with; how that step stands to one with all biases is printed first (bf16 rounds at other places without them).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from exact import float64

from manyhands import machine
from manyhands.book import torch as models
from manyhands.training.torch.fast.lanes.eager import StepLanes
from manyhands.training.torch.fast.redundant_biases import BiasSearch, RedundantBiases

ROWS = {
    "graph": (False, False),  # compiled, side lanes
    "lanes": (False, True),
    "compiled": (True, False),
    "compiled-lanes": (True, True),
}
WARM_UP, REPLAYS, ROUNDS = 3, 10, 30
CLOSE = 1e-6  # of a row that is not compiled


@dataclass
class Step:
    """A captured step and the gradients that it leaves."""

    graph: torch.cuda.CUDAGraph
    gradients: dict[str, torch.Tensor]
    explained: list[str]
    peak: int  # bytes of the GPU while it was captured


class Problem:
    """One net, one batch; every row begins with the same weights and running statistics."""

    def __init__(self, model: str, batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.batch = device, batch
        net = models.initialise(models.MODELS[model](), seed=0)
        self.net = net.to(device, memory_format=torch.channels_last)
        self.images = torch.rand(batch, 1, 28, 28, generator=generator).to(device)
        self.labels = torch.randint(10, (batch,), generator=generator).to(device)
        self.state = {key: value.clone() for key, value in self.net.state_dict().items()}
        self.redundant: RedundantBiases | None = None

    def loss(self) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            answer = self.net(self.images)
        return torch.nn.functional.cross_entropy(answer.float(), self.labels)

    def passes(self, forward: Callable[[], torch.Tensor], around: AbstractContextManager[Any] | None = None) -> None:
        """Forward and backward, without redundant biases where there are any."""
        with self.redundant.left_out() if self.redundant is not None else nullcontext():
            loss = forward()
            with around if around is not None else nullcontext():
                loss.backward()
        if self.redundant is not None:
            self.redundant.shift_means()

    def leave_out(self) -> str:
        """Leave redundant biases out from now on."""
        self.reset()
        with BiasSearch(self.net) as search:
            loss = self.loss()
            search.trace(loss)
            loss.backward()
        self.redundant = search.redundant_biases()
        return self.redundant.explain() if self.redundant is not None else "no redundant biases"

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}

    def reset(self) -> None:
        self.net.load_state_dict(self.state)
        self.net.zero_grad(set_to_none=True)


def eager(problem: Problem) -> dict[str, torch.Tensor]:
    problem.reset()
    problem.passes(problem.loss)
    return problem.gradients()


def exactly(problem: Problem) -> dict[str, torch.Tensor]:
    """The gradients in float64."""
    problem.reset()
    wide = copy.deepcopy(problem.net).double()
    torch.nn.functional.cross_entropy(wide(problem.images.double()), problem.labels).backward()
    return {name: p.grad for name, p in wide.named_parameters() if p.grad is not None}


def captured(problem: Problem, *, compiled: bool, lanes: bool, max_held: int) -> Step:
    torch._dynamo.reset()
    stream = torch.cuda.Stream(problem.device)
    step_lanes = StepLanes.on_streams(problem.device, stream, max_held=max_held) if lanes else None
    forward: Callable[[], torch.Tensor] = problem.loss
    if compiled:
        options = {"post_grad_custom_post_pass": step_lanes.inductor_pass()} if step_lanes is not None else None
        forward = torch.compile(problem.loss, dynamic=False, options=options)

    def step() -> None:
        problem.net.zero_grad(set_to_none=True)
        problem.passes(
            forward, step_lanes.during_backward(problem.batch, compiled=compiled) if step_lanes is not None else None
        )

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        problem.net.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        peak = torch.cuda.max_memory_allocated()
        left = {name: p.grad for name, p in problem.net.named_parameters() if p.grad is not None}
        problem.net.load_state_dict(problem.state)
        graph.replay()
    torch.cuda.synchronize()
    return Step(graph, left, step_lanes.explain(problem.batch) if step_lanes is not None else [], peak)


Gradients = dict[str, torch.Tensor]


def compare(gradients: Gradients, wanted: Gradients, exact: Gradients | None) -> tuple[bool, str]:
    """Whether gradients are right, and how they stand to eager's, in words; ``exact`` ones for a compiled row."""
    if gradients.keys() != wanted.keys():
        return False, f"missing: {', '.join(sorted(wanted.keys() - gradients.keys()))}"
    if all(torch.equal(gradients[key], right) for key, right in wanted.items()):
        return True, "equal to the bit"
    if exact is not None:
        three = ([side[key] for key in wanted] for side in (gradients, wanted, exact))
        verdict = float64.verdict(*three, torch.finfo(torch.bfloat16).eps)
        return verdict.accepted, verdict.words
    largest = max(float(right.norm()) for right in wanted.values())
    off = {key: float((gradients[key] - right).norm()) / largest for key, right in wanted.items()}
    name = max(off, key=off.__getitem__)
    return all(error <= CLOSE for error in off.values()), f"off by {off[name]:.1e} of the largest gradient ({name})"


def milliseconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> list[float]:
    times = []
    for number in range(ROUNDS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 3:
            times.append(begin.elapsed_time(end) / REPLAYS)
    return times


def run(rows: list[str], problem: Problem, *, keep: bool, max_held: float | None, explain: bool) -> int:
    twice = 2 * sum(parameter.numel() * parameter.element_size() for parameter in problem.net.parameters())
    held = twice if max_held is None else int(max_held * 1e6)
    wanted = eager(problem)
    exact = exactly(problem)
    if not keep:
        with_all, left_out = wanted, problem.leave_out()
        wanted = eager(problem)
        right, words = compare(wanted, with_all, exact)
        print(f"{left_out}; eager without them against eager with all: {words if right else f'WRONG, {words}'}")
    failed = 0
    first: float | None = None
    print(f"{'row':16}{'ms':>9}{'min':>9}{'max':>9}{'x graph':>9}{'peak MB':>9}  gradients against eager")
    for row in rows:
        compiled, lanes = ROWS[row]
        try:
            problem.reset()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            step = captured(problem, compiled=compiled, lanes=lanes, max_held=held)
            right, words = compare(step.gradients, wanted, exact if compiled else None)
        except Exception as error:
            print(f"{row:16}  FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            failed += 1
            continue
        if not right:
            print(f"{row:16}  WRONG: {words}: no time is given")
            failed += 1
            continue
        times = milliseconds(step.graph, problem.device)
        median = statistics.median(times)
        first = median if row == "graph" else first
        ratio = f"{first / median:.2f}" if first is not None else "-"
        times_told = f"{median:9.3f}{min(times):9.3f}{max(times):9.3f}{ratio:>9}"
        print(f"{row:16}{times_told}{(step.peak - before) / 1e6:9.0f}  {words}")
        if explain:
            print("\n".join(step.explained))
        del step
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas between: %(default)s")
    parser.add_argument("--model", default="resnet18", choices=sorted(models.MODELS))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument(
        "--biases", default="leave-out", choices=["leave-out", "keep"], help="those that change nothing"
    )
    parser.add_argument("--most-held", type=float, help="megabytes")
    parser.add_argument("--explain", action="store_true", help="lanes and waits of every row that has them")
    flags: Any = parser.parse_args()
    rows = [row.strip() for row in flags.rows.split(",")]
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}. There are {', '.join(ROWS)}")
    if not torch.cuda.is_available():
        print("side lanes are streams of a GPU, and there is none here: nothing to measure")
        return 0
    device = torch.device("cuda", 0)
    torch.backends.cudnn.deterministic = True  # or equal to the bit would be luck
    print(
        f"{torch.cuda.get_device_name(device)}, {machine.usable_cores()} cores {machine.host_name()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.date.today()}; {flags.model}, "
        f"forward and backward, bf16, channels last, batch {flags.batch_size}; n = {ROUNDS} times {REPLAYS} replays"
    )
    problem = Problem(flags.model, flags.batch_size, device)
    keep = flags.biases == "keep"
    return 1 if run(rows, problem, keep=keep, max_held=flags.max_held, explain=flags.explain) else 0


if __name__ == "__main__":
    sys.exit(main())
