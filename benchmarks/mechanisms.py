"""What single mechanisms of the captured step gain: each net with all of them, and without one.

    python benchmarks/mechanisms.py                          nets that differ, on the first GPU
    python benchmarks/mechanisms.py --nets vgg11-bn,gpt      some of them

Milliseconds a step of `Trainer.fit` in bfloat16, the data on the GPU: the median of the timed epochs. Variants of a net
that are not compiled run in turns in one process, with "all" first and last; its compiled variants have a process each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

NETS = (
    "resnet18,group-norm,unet,gpt,lstm-cells,recommender,resnet50,vgg11-bn,densenet121,mobilenet-v3,convnext-tiny,"
    "vit-b-16,googlenet"
)
COMPILED = "resnet18,gpt,resnet50,vgg11-bn,vit-b-16,googlenet"
VARIANTS = ("", "redundant biases", "small kernels", "")
COMPILED_VARIANTS = ("", "side lanes")
STEPS, EPOCHS = 40, 6


def measure(name: str, variants: list[str], *, compiled: bool) -> None:
    import peers
    import torch
    import training
    import training_nets

    from manyhands.training.options import Step

    peers.hush()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "resnet18":
        images, labels = torch.randint(256, (256 * STEPS, 28, 28), dtype=torch.uint8), torch.randint(10, (256 * STEPS,))
        tested = slice(256)
        problem = peers.Problem(
            "resnet18", images, labels, images[tested], labels[tested], device, 256, 0.1, 1 + EPOCHS
        )
    else:
        problem = training_nets.problem_of(name, training_nets.nets(False)[name], device, STEPS, 1 + EPOCHS)
    for variant in variants:
        options: dict[str, Any] = {"step": Step(optimize="max")} if compiled else {}
        outcome = training.manyhands(problem, without=variant, **options)
        milliseconds = [seconds / STEPS * 1e3 for seconds in outcome.seconds[1:]]
        kind = ("compiled" if compiled else "as written", variant or "all")
        captured = any("one CUDA graph" in note for note in outcome.notes)
        print(
            "|".join(
                (
                    name,
                    *kind,
                    f"{statistics.median(milliseconds):.3f}",
                    f"{min(milliseconds):.3f}",
                    f"{outcome.losses[-1]:.4f}",
                    f"{outcome.seconds[0]:.1f}",
                    "captured" if captured else "; ".join(outcome.notes),
                )
            ),
            flush=True,
        )
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--compiled", default=COMPILED)
    parser.add_argument("--measure")
    parser.add_argument("--variant", action="append")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm-only", action="store_true")
    flags = parser.parse_args()
    if flags.measure:
        measure(flags.measure, flags.variant, compiled=flags.compile)
        return 0
    me = [sys.executable, __file__]
    cache = Path(os.environ.get("MECHANISMS_CACHE", "/tmp/mechanisms"))

    def command(net: str, number: int) -> list[str]:
        return [*me, "--measure", net, "--compile", "--variant", COMPILED_VARIANTS[number]]

    def env(net: str, number: int) -> dict[str, str]:
        return {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / f"{net}{number}"),
            "TRITON_CACHE_DIR": str(cache / f"{net}{number}/triton"),
        }

    if flags.warm_only:
        running = [
            subprocess.Popen(command(net, number), env=env(net, number), stdout=subprocess.DEVNULL)
            for net in flags.compiled.split(",")
            for number in (0, 1)
        ]
        return sum(process.wait() for process in running)
    for net in filter(None, flags.nets.split(",")):
        subprocess.run([*me, "--measure", net, *(f"--variant={variant}" for variant in VARIANTS)], check=False)
    for net in filter(None, flags.compiled.split(",")):
        for number in (0, 1):
            subprocess.run(command(net, number), env=env(net, number), check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
