"""Seconds per epoch of ResNet-18 on Fashion-MNIST in JAX: ``Trainer`` against a loop written by hand, in the same run.

    python benchmarks/training_jax.py                 on the GPU if there is one: bf16, batch 256
    python benchmarks/training_jax.py --quick         a try on a CPU: LeNet, 4,096 images
    python benchmarks/training_jax.py --options       the hand-written step under XLA's compiler options

Both rows train the same net from the same weights, with the same samples in the same order, plain SGD, data on the
device, the short last batch included. The loop by hand is what one would write who knows JAX: one jitted step that
gathers its batch on the device, state given away to it, nothing read before the epoch ends. A first epoch compiles and
counts apart; then the median of ``--epochs`` epochs. The mean training loss of the last epoch shows whether both did
the same work; in bf16 it agrees to a hundredth or so, for sums in another order round differently.

``--options`` compiles the hand-written step once per row of ``VARIANTS`` (XLA's compiler options, and several steps in
one call), trains each from the same weights on the same batches, and prints milliseconds a step and whether the last
loss is that of the default. An option that this XLA does not have is a row with its error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from manyhands import machine
from manyhands.book.jax import BOOK
from manyhands.training.data import fashion_mnist
from manyhands.training.data.order import epoch_order
from manyhands.training.data.sources import Arrays
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


@dataclass(frozen=True)
class HandWritten:
    """A training step as one would write it who knows JAX, and the state that it starts from."""

    state: Any
    arrays: tuple[jax.Array, ...]
    step: Callable[..., Any]  # (state, total, arrays, order, start, *, size) -> (state, total)


def hand_written(problem: Problem) -> HandWritten:
    net = BOOK.model(problem.model, 0)
    if problem.bf16:
        for _, layer in nnx.iter_modules(net):
            if hasattr(layer, "dtype"):
                layer.dtype = jnp.bfloat16
    graph, weights, rest = nnx.split(net, nnx.Param, ...)
    flat_weights, weights_form = jax.tree.flatten(weights)
    flat_rest, rest_form = jax.tree.flatten(rest)
    optimizer = optax.sgd(problem.rate)

    def loss_of(weights: Any, rest: Any, images: jax.Array, labels: jax.Array) -> Any:
        model = nnx.merge(graph, weights_form.unflatten(weights), rest_form.unflatten(rest))
        logits = model(images).astype(jnp.float32)
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, jax.tree.leaves(nnx.split(model, nnx.Param, ...)[2])

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
    return HandWritten(state, tuple(map(jax.device_put, problem.data.arrays)), step)


def by_hand(problem: Problem) -> Outcome:
    written = hand_written(problem)
    state = written.state
    step = jax.jit(written.step, static_argnames="size", donate_argnums=(0, 1))
    count, seconds, loss = problem.data.count, [], 0.0
    for epoch in range(problem.epochs + 1):
        began = time.perf_counter()
        order = jax.device_put(epoch_order(0, epoch, count).astype(np.int32))
        total = jnp.zeros(())
        for start in range(0, count, problem.batch_size):
            size = min(problem.batch_size, count - start)
            state, total = step(state, total, written.arrays, order, start, size=size)
        loss = float(total) / count  # waits for all of them
        seconds.append(time.perf_counter() - began)
    return Outcome(seconds[1:], seconds[0], loss)


@dataclass(frozen=True)
class Variant:
    """Compiler options of XLA, and how many steps one call makes: written one after the other, or as a scan."""

    options: dict[str, bool | int | str] = field(default_factory=dict)
    unrolled: int = 1
    scanned: int = 1

    @property
    def steps(self) -> int:
        return self.unrolled * self.scanned


VARIANTS = {
    "default": Variant(),
    "no command buffers": Variant({"xla_gpu_enable_command_buffer": ""}),
    "concurrent regions": Variant({"xla_gpu_graph_enable_concurrent_region": True}),
    "command buffers CONCURRENT": Variant({"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}),
    "command buffers LHS": Variant({"xla_gpu_command_buffer_scheduling_mode": "LHS"}),
    "command buffers SERIALIZE": Variant({"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}),
    "latency hiding scheduler": Variant({"xla_gpu_enable_latency_hiding_scheduler": True}),
    "convolutions in NHWC": Variant({"xla_gpu_force_conv_nhwc": True}),
    "convolution fusion": Variant({"xla_gpu_experimental_enable_conv_fusion": True}),
    "runtime fusion": Variant({"xla_gpu_use_runtime_fusion": True}),
    "fusion autotuner": Variant({"xla_gpu_experimental_enable_fusion_autotuner": True}),
    "Triton multi-output fusion": Variant({"xla_gpu_unsupported_enable_triton_multi_output_fusion": True}),
    "no Triton products": Variant({"xla_gpu_enable_triton_gemm": False}),
    "4 compute streams": Variant({"xla_gpu_executable_num_compute_streams": 4}),
    "2 steps a call": Variant(unrolled=2),
    "scan of 5 steps a call": Variant(scanned=5),
}
TIMINGS = 5


def compiled(variant: Variant, step: Callable[..., Any], size: int) -> Callable[..., Any]:
    """``(state, arrays, order, starts) -> (state, last loss)``, with ``variant.steps`` numbers in ``starts``."""

    def unrolled(carried: Any, arrays: Any, order: jax.Array, starts: jax.Array) -> Any:
        state, loss = carried
        for index in range(variant.unrolled):
            state, loss = step(state, jnp.zeros(()), arrays, order, starts[index], size=size)
        return state, loss / size

    def call(state: Any, arrays: Any, order: jax.Array, starts: jax.Array) -> Any:
        carried = (state, jnp.zeros(()))
        if variant.scanned == 1:
            return unrolled(carried, arrays, order, starts)
        parts = starts.reshape(variant.scanned, variant.unrolled)
        return jax.lax.scan(lambda held, part: (unrolled(held, arrays, order, part), None), carried, parts)[0]

    return jax.jit(call, donate_argnums=0, compiler_options=dict(variant.options) or None)


def timed_variant(problem: Problem, variant: Variant, steps: int) -> tuple[float, float]:
    """Milliseconds a step (median of ``TIMINGS`` times ``steps`` steps, after a warm-up of as many); the last loss."""
    written = hand_written(problem)
    call = compiled(variant, written.step, problem.batch_size)
    whole_batches = problem.data.count // problem.batch_size
    order = jax.device_put(epoch_order(0, 0, problem.data.count).astype(np.int32))
    numbers = np.arange((TIMINGS + 1) * steps) % whole_batches * problem.batch_size
    starts = [jax.device_put(part) for part in numbers.astype(np.int32).reshape(-1, variant.steps)]
    state, loss, seconds = written.state, jnp.zeros(()), []
    for timing in range(TIMINGS + 1):
        began = time.perf_counter()
        calls = steps // variant.steps
        for part in starts[timing * calls : (timing + 1) * calls]:
            state, loss = call(state, written.arrays, order, part)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / steps * 1e3, float(loss)


def compare_options(problem: Problem, steps: int) -> dict[str, dict[str, float | str]]:
    """Print and return a row per variant; an option that XLA refuses is a row with the first line of its error."""
    rows: dict[str, dict[str, float | str]] = {}
    print(f"median of {TIMINGS} x {steps} steps\n{'variant':28} {'ms/step':>8} {'of default':>10} {'last loss':>10}")
    for name, variant in VARIANTS.items():
        try:
            milliseconds, loss = timed_variant(problem, variant, steps)
        except Exception as error:
            rows[name] = {"error": (str(error).splitlines() or [repr(error)])[0]}
            print(f"{name:28} {rows[name]['error']}", flush=True)
            continue
        rows[name] = {"ms": milliseconds, "loss": loss}
        default = rows["default"]
        ratio = milliseconds / default.get("ms", float("nan"))
        equal = "as default" if loss == default.get("loss") else "another"
        print(f"{name:28} {milliseconds:8.3f} {ratio:10.3f} {loss:10.6f} {equal}", flush=True)
    return rows


def manyhands(problem: Problem) -> Outcome:
    trainer = Trainer(
        problem.epochs + 1,
        devices=[jax.devices()[0]],
        batch_size=problem.batch_size,
        optimizer=optax.sgd(problem.rate),
        precision="bf16" if problem.bf16 else "fp32",
        quiet=True,
    )
    result = trainer.fit(BOOK.model(problem.model, 0), problem.data)
    seconds = [row["seconds"] for row in result.rows]
    return Outcome(seconds[1:], seconds[0], result.rows[-1]["train_loss"])


ROWS: dict[str, Callable[[Problem], Outcome]] = {"by hand": by_hand, "manyhands": manyhands}


def problem_of(options: argparse.Namespace) -> Problem:
    on_gpu = jax.devices()[0].platform != "cpu"
    train, _ = BOOK.data(fashion_mnist.load(), None)
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
    parser.add_argument("--options", action="store_true", help="the hand-written step under XLA's compiler options")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args()
    problem = problem_of(options)
    device = jax.devices()[0]
    name = machine.host_name() if device.platform == "cpu" else device.device_kind
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "flax", "optax"))
    print(f"{name}; {versions}; {problem.model}, {problem.data.count} images, batch {problem.batch_size}, ", end="")
    print("bf16" if problem.bf16 else "fp32", end="; ")
    if options.options:
        rows = compare_options(problem, steps=10 if options.quick else 60)
        if options.json:
            print(json.dumps({"options": rows, "versions": versions, "device": name}))
        return 0
    return compare_with_by_hand(problem, options, versions, name)


def compare_with_by_hand(problem: Problem, options: argparse.Namespace, versions: str, name: str) -> int:
    print(f"median of {problem.epochs} epochs x {options.rounds} rounds")
    outcomes: dict[str, list[Outcome]] = {row: [] for row in ROWS}
    for _ in range(options.rounds):
        for row, run in ROWS.items():
            outcomes[row].append(run(problem))
            last = outcomes[row][-1]
            median = statistics.median(last.seconds)
            print(f"  {row:10} {median:8.3f} s  (first {last.first:.1f} s, loss {last.loss:.5f})")
    medians = {
        row: statistics.median([s for outcome in rounds for s in outcome.seconds]) for row, rounds in outcomes.items()
    }
    ratio = medians["manyhands"] / medians["by hand"]
    print(f"{'row':10} {'s/epoch':>8} {'images/s':>9} {'loss':>9}")
    for row, seconds in medians.items():
        print(f"{row:10} {seconds:8.3f} {problem.data.count / seconds:9.0f} {outcomes[row][-1].loss:9.5f}")
    apart = abs(outcomes["manyhands"][-1].loss / outcomes["by hand"][-1].loss - 1)
    close = 0.02 if problem.bf16 else 1e-3
    print(f"manyhands takes {ratio:.3f} of the loop by hand (aim: at most {AIM}); losses {apart:.1e} apart")
    if options.json:
        print(json.dumps({"seconds": medians, "ratio": ratio, "apart": apart, "versions": versions, "device": name}))
    return 0 if apart <= close else 1


if __name__ == "__main__":
    raise SystemExit(main())
