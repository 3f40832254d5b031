"""Where the time of a training step goes: the kernels of one epoch of ResNet-18 on Fashion-MNIST, by kind.

    python benchmarks/step_profile.py                     the captured step, after three epochs
    python benchmarks/step_profile.py --timeline file     also one step, kernel by kernel, into a file
    python benchmarks/step_profile.py --samples 512       fewer images: a try, also on a CPU, no figures to quote

Kernels partly run side by side: their sum is more than the time that the GPU is busy, and that is less than the time of
a step by what it waits between kernels. On a CPU operations are counted instead of kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from typing import Any

import torch
import training
from torch.profiler import ProfilerActivity, profile

from manyhands import torch as mh

WARM = 3  # epochs before the one that is profiled
OUR_KINDS = (  # the first that a kernel's name begins with
    ("BatchNorm, forward", ("forward", "statistics", "apply")),
    ("BatchNorm, backward", ("reduce_", "backward_")),
    ("gradients of biases", ("channel_sums",)),
    ("patches and fills", ("patches", "fill")),
)
KINDS = (  # the first whose word is in its name
    ("convolution, forward", ("fprop",)),
    ("convolution, input gradient", ("dgrad",)),
    ("convolution, weight gradient", ("wgrad", "init_device_workspace")),
    ("matrix products", ("nvjet", "cutlass", "splitKreduce", "gemm")),
    ("update, casts of weights", ("multi_tensor",)),
    ("casts and copies", ("copy_kernel",)),
)


class Profiled(mh.Callback):
    """Profiles one epoch."""

    def __init__(self, on_gpu: bool) -> None:
        self._epochs, self._on_gpu = 0, on_gpu
        self.steps = 0
        self.profile: Any = None

    def on_epoch_start(self, training: Any) -> None:
        self._epochs += 1
        if self._epochs == WARM + 1:
            activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
            self.profile = profile(activities=[activity])
            self.profile.__enter__()
            self.steps = -training.step

    def on_epoch_end(self, training: Any, row: Any) -> None:
        if self._epochs == WARM + 1:
            if self._on_gpu:
                torch.cuda.synchronize()
            self.profile.__exit__(None, None, None)
            self.steps += training.step


def kind_of(name: str) -> str:
    """
    >>> kind_of("sm90_xmma_dgrad_implicit_gemm_bf16"), kind_of("reduce_result_keep_sum"), kind_of("softmax")
    ('convolution, input gradient', 'BatchNorm, backward', 'others')
    """
    own_kinds = (kind for kind, words in OUR_KINDS if name.startswith(words))
    return next(own_kinds, next((kind for kind, words in KINDS if any(word in name for word in words)), "others"))


def busy_of(spans: list[tuple[float, float]]) -> float:
    """How long at least one runs.

    >>> busy_of([(0, 3), (1, 2), (5, 6)])
    4.0
    """
    busy = end = 0.0
    for begin, after in sorted(spans):
        busy += max(0.0, after - max(begin, end))
        end = max(end, after)
    return busy


def middle_step(names: list[str], steps: int) -> tuple[int, int]:
    """Where a step in the middle begins and ends, by the first kernel that is there once in each step.

    >>> middle_step(["begin", "a", "b", "b", "a", "b", "b", "a", "b", "b"], 3)
    (4, 7)
    """
    counts = Counter(names)
    mark = next((name for name in names if counts[name] == steps), None)
    if mark is None or steps < 2:
        return 0, len(names)
    places = [place for place, name in enumerate(names) if name == mark]
    return places[steps // 2], (*places, len(names))[steps // 2 + 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeline", help="a file for one step, kernel by kernel")
    parser.add_argument("--samples", type=int, help="only the first so many training images")
    flags = parser.parse_args()
    sys.argv[1:] = ["--epochs", str(WARM + 1), *(["--samples", str(flags.samples)] if flags.samples else [])]
    options = training.options()
    problem, data = training.problem_of(options)
    on_gpu = problem.device.type == "cuda"
    profiled = Profiled(on_gpu)
    training.manyhands(problem, callbacks=[profiled])
    kinds = (torch.autograd.DeviceType.CUDA,) if on_gpu else (torch.autograd.DeviceType.CPU,)
    events = [event for event in profiled.profile.events() if event.device_type in kinds]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    steps, whole = profiled.steps, max(end for _, end in spans) - min(begin for begin, _ in spans)
    print(training.header(options, problem, data).split("; n = ")[0])
    print(
        f"a step of {whole / steps:.0f} us: {len(events) / steps:.0f} kernels and copies, "
        f"{sum(end - begin for begin, end in spans) / steps:.0f} us together, busy for {busy_of(spans) / steps:.0f} us"
    )
    sums: dict[str, list[float]] = defaultdict(list)
    for event, (begin, end) in zip(events, spans, strict=True):
        sums[kind_of(event.name)].append(end - begin)
    for kind, times in sorted(sums.items(), key=lambda item: -sum(item[1])):
        print(f"{kind:<30} {sum(times) / steps:8.1f} us {len(times) / steps:6.1f} kernels")
    if flags.timeline:
        ordered = sorted(zip(spans, [event.name for event in events], strict=True))
        begin_of_step, end_of_step = middle_step([name for _, name in ordered], steps)
        with open(flags.timeline, "w") as file:
            for (begin, end), name in ordered[begin_of_step:end_of_step]:
                file.write(f"{begin - ordered[begin_of_step][0][0]:10.1f} {end - begin:8.1f} {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
