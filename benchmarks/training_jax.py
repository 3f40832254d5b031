"""Seconds per epoch of ResNet-18 on Fashion-MNIST in JAX: ``Trainer`` against a loop written by hand, in the same run.

    python benchmarks/training_jax.py                 on the GPU if there is one: bf16, batch 256
    python benchmarks/training_jax.py --quick         a try on a CPU: LeNet, 4,096 images

Both rows train the same net from the same weights, with the same samples in the same order, plain SGD, data on the
device, the short last batch included. The loop by hand is what one would write who knows JAX: one jitted step that
gathers its batch on the device, state given away to it, nothing read before the epoch ends. A first epoch compiles and
counts apart; then the median of ``--epochs`` epochs. The mean training loss of the last epoch shows whether both did
the same work; in bf16 it agrees to a hundredth or so, for sums in another order round differently.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from manyhands import machine
from manyhands.training.data import fashion_mnist
from manyhands.training.data.order import epoch_order
from manyhands.training.data.sources import Arrays
from manyhands.training.jax import command
from manyhands.training.jax.book import datasets
from manyhands.training.jax.trainer import Trainer

AIM = 1.05  # of the loop by hand


@dataclass(frozen=True)
class Problem:
    model: str
    data: Arrays
    batch_size: int
    epochs: int  # timed; one more goes before
    rate: float
    bf16: bool


@dataclass(frozen=True)
class Outcome:
    seconds: list[float]  # of the timed epochs
    first: float
    loss: float  # mean over the last epoch


def by_hand(problem: Problem) -> Outcome:
    net = command.model(problem.model, 0)
    if problem.bf16:
        for _, layer in nnx.iter_modules(net):
            if hasattr(layer, "dtype"):
                layer.dtype = jnp.bfloat16
    graph, weights, rest = nnx.split(net, nnx.Param, ...)
    flat_weights, weights_form = jax.tree.flatten(weights)
    flat_rest, rest_form = jax.tree.flatten(rest)
    optimizer = optax.sgd(problem.rate)
    arrays = tuple(map(jax.device_put, problem.data.arrays))

    def loss_of(weights: Any, rest: Any, images: jax.Array, labels: jax.Array) -> Any:
        model = nnx.merge(graph, weights_form.unflatten(weights), rest_form.unflatten(rest))
        logits = model(images).astype(jnp.float32)
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, jax.tree.leaves(nnx.split(model, nnx.Param, ...)[2])

    @functools.partial(jax.jit, static_argnames="size", donate_argnums=(0, 1))
    def step(state: Any, total: jax.Array, arrays: Any, order: jax.Array, start: Any, *, size: int) -> Any:
        weights, rest, memory = state
        images, labels = problem.data.prepare(
            tuple(array[jax.lax.dynamic_slice_in_dim(order, start, size)] for array in arrays)
        )
        (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, rest, images, labels)
        updates, memory = optimizer.update(gradients, memory, weights)
        return (optax.apply_updates(weights, updates), rest, memory), total + loss * size

    copied = jax.tree.map(jnp.copy, (flat_weights, flat_rest))
    state = (*copied, optimizer.init(copied[0]))
    count, seconds, loss = problem.data.count, [], 0.0
    for epoch in range(problem.epochs + 1):
        began = time.perf_counter()
        order = jax.device_put(epoch_order(0, epoch, count).astype(np.int32))
        total = jnp.zeros(())
        for start in range(0, count, problem.batch_size):
            size = min(problem.batch_size, count - start)
            state, total = step(state, total, arrays, order, start, size=size)
        loss = float(total) / count  # waits for all of them
        seconds.append(time.perf_counter() - began)
    return Outcome(seconds[1:], seconds[0], loss)


def manyhands(problem: Problem) -> Outcome:
    trainer = Trainer(
        problem.epochs + 1,
        devices=[jax.devices()[0]],
        batch_size=problem.batch_size,
        optimizer=optax.sgd(problem.rate),
        precision="bf16" if problem.bf16 else "fp32",
        quiet=True,
    )
    result = trainer.fit(command.model(problem.model, 0), problem.data)
    seconds = [row["seconds"] for row in result.rows]
    return Outcome(seconds[1:], seconds[0], result.rows[-1]["train_loss"])


ROWS: dict[str, Callable[[Problem], Outcome]] = {"by hand": by_hand, "manyhands": manyhands}


def problem_of(options: argparse.Namespace) -> Problem:
    on_gpu = jax.devices()[0].platform != "cpu"
    train, _ = datasets.of(fashion_mnist.load(), None)
    if options.quick:
        return Problem("lenet", train.first(4096), options.batch_size, options.epochs, 0.1, bf16=False)
    return Problem(options.model, train, options.batch_size, options.epochs, 0.1, bf16=on_gpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5, help="timed, after one that compiles")
    parser.add_argument("--rounds", type=int, default=2, help="every row so often, in turn")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args()
    problem = problem_of(options)
    device = jax.devices()[0]
    name = machine.host_name() if device.platform == "cpu" else device.device_kind
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{name}; {versions}; {problem.model}, {problem.data.count} images, batch {problem.batch_size}, ", end="")
    print(f"{'bf16' if problem.bf16 else 'fp32'}; median of {problem.epochs} epochs x {options.rounds} rounds")
    found: dict[str, list[Outcome]] = {row: [] for row in ROWS}
    for _ in range(options.rounds):
        for row, run in ROWS.items():
            found[row].append(run(problem))
            one = found[row][-1]
            print(f"  {row:10} {statistics.median(one.seconds):8.3f} s  (first {one.first:.1f} s, loss {one.loss:.5f})")
    medians = {row: statistics.median([s for one in all_ for s in one.seconds]) for row, all_ in found.items()}
    ratio = medians["manyhands"] / medians["by hand"]
    print(f"{'row':10} {'s/epoch':>8} {'images/s':>9} {'loss':>9}")
    for row, seconds in medians.items():
        print(f"{row:10} {seconds:8.3f} {problem.data.count / seconds:9.0f} {found[row][-1].loss:9.5f}")
    apart = abs(found["manyhands"][-1].loss / found["by hand"][-1].loss - 1)
    close = 0.02 if problem.bf16 else 1e-3
    print(f"manyhands takes {ratio:.3f} of the loop by hand (aim: at most {AIM}); losses {apart:.1e} apart")
    if options.json:
        print(json.dumps({"seconds": medians, "ratio": ratio, "apart": apart, "versions": versions, "device": name}))
    return 0 if apart <= close else 1


if __name__ == "__main__":
    raise SystemExit(main())
