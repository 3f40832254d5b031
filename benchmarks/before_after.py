"""Two states of this repository beside each other: other people's nets through `Trainer.fit`, in one run.

    git worktree add ../before 081a46d
    python benchmarks/before_after.py ../before                     the nets of training_nets.py that are named below
    python benchmarks/before_after.py ../before --nets gpt,resnet50 --tiny

Each net is trained by the other checkout, and then by this one, with that checkout's own `benchmarks/training_nets.py`:
same weights, data, order and seed. Every process loads its libraries while another one trains, and has the GPU for
itself while it trains. Milliseconds a step: the median of the timed epochs, after a first one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apart

HERE = Path(__file__).parents[1]
NETS = (
    "unet,resnet50,densenet121,mobilenet-v3,efficientnet-b0,convnext-tiny,"
    "gpt,lstm,vit-b-16,swin-t,recommender,hf-bert,hf-llama"
)


def measure(name: str, steps: int, epochs: int, tiny: bool) -> dict[str, Any]:
    """In a process whose modules are those of one checkout."""
    torch, training, nets = map(importlib.import_module, ("torch", "training", "training_nets"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    known = nets.nets(tiny)
    if name not in known:
        return {"missing": True}
    problem = nets.problem_of(name, known[name], device, steps, 1 + epochs)
    with apart.turn():
        outcome = training.manyhands(problem)
    first, *timed = outcome.seconds
    peak = torch.cuda.max_memory_reserved() / 1e6 if on_gpu else 0.0
    ms = statistics.median(timed) / steps * 1e3
    return {"ms": ms, "first": first, "peak": peak, "loss": outcome.losses[-1]}


def child(checkout: Path, name: str, flags: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    command = [__file__, str(checkout), "--one", name, "--steps", str(flags.steps), "--epochs", str(flags.epochs)]
    paths = [str(checkout / "src"), str(checkout / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return apart.measure([*command, *["--tiny"] * flags.tiny], PYTHONPATH=path, **variables)


def show(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    if "ms" not in before or "ms" not in after:
        print(f"{name:16}{before.get('failed', '')} {after.get('failed', 'not installed')}"[:160], flush=True)
        return
    print(
        f"{name:16}{before['ms']:9.3f}{after['ms']:9.3f} ms, ratio {after['ms'] / before['ms']:.3f}; first epoch "
        f"{before['first']:.1f}, {after['first']:.1f} s; {before['peak']:.0f}, {after['peak']:.0f} MB; loss "
        f"{before['loss']:.4f}, {after['loss']:.4f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--nets", default=NETS, help="with commas between: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="of an epoch: %(default)s")
    parser.add_argument("--epochs", type=int, default=2, help="timed epochs, after a first: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too: no figures to quote")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        sys.path.pop(0)  # this script's folder: modules are those of the checkout
        print(json.dumps(measure(flags.one, flags.steps, flags.epochs, flags.tiny)))
        return 0
    pairs = [(checkout, name) for name in flags.nets.split(",") for checkout in (flags.before.resolve(), HERE)]
    before: dict[str, Any] = {}
    for (checkout, name), found in apart.by_turns(pairs, lambda pair, variables: child(*pair, flags, variables)):
        if checkout == HERE:
            show(name, before, found)
        before = found
    return 0


if __name__ == "__main__":
    sys.exit(main())
