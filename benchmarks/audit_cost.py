"""What counting hidden waits costs: the same steps plain, in ``mh.guard("count")`` and under ``manyhands audit``.

    python benchmarks/audit_cost.py                          PyTorch: ResNet-18 on a GPU, LeNet on a CPU
    python benchmarks/audit_cost.py --framework jax          or tensorflow, mxnet: a small net
    python benchmarks/audit_cost.py --rounds 2 --blocks 3    a try

Each measurement is a process of its own, because hooks stay in a process that has them; the three kinds take turns. A
process warms up and then times blocks of steps, each ended by waiting for the device: the figure is the median of all
blocks of a kind, by the clock and, for jobs on the CPU, in time of the processor, which other programs disturb less.
Same seed in all: the weights after the last step have to be equal to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("plain", "guard", "audit")
MARK = "measured: "
# A step; waiting for the device; the weights as bytes.
Job = tuple[Callable[[], object], Callable[[], object], Callable[[], bytes]]


def torch_job() -> Job:
    import torch

    from manyhands.book.torch import lenet, resnet18

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cudnn.deterministic = True
    net = (resnet18(10, 1) if on_gpu else lenet()).to(device)
    x = torch.randn(256, 1, 28, 28, device=device)
    y = torch.randint(10, (256,), device=device)
    net(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def weights() -> bytes:
        return b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in net.parameters())

    return step, torch.cuda.synchronize if on_gpu else lambda: None, weights


def jax_job() -> Job:
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(256, 784)).astype("float32")), jnp.asarray(rng.integers(10, size=256))
    state = {"w": [jnp.asarray(rng.normal(size=shape).astype("float32") * 0.05) for shape in ((784, 256), (256, 10))]}

    @jax.jit
    def update(weights: list[Any]) -> tuple[list[Any], Any]:
        def loss_of(weights: list[Any]) -> Any:
            outputs = jax.nn.relu(x @ weights[0]) @ weights[1]
            return -jnp.mean(jax.nn.log_softmax(outputs)[jnp.arange(256), y])

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], loss

    def step() -> None:
        state["w"], _ = update(state["w"])

    return (
        step,
        lambda: jax.block_until_ready(state["w"]),
        lambda: b"".join(np.asarray(w).tobytes() for w in state["w"]),
    )


def tensorflow_job() -> Job:
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.normal(size=(256, 784)).astype("float32")), tf.constant(rng.integers(10, size=256))
    net = keras.Sequential([keras.Input((784,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x)))
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    return step, tf.test.experimental.sync_devices, lambda: b"".join(weight.tobytes() for weight in net.get_weights())


def mxnet_job() -> Job:
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon

    mx.npx.set_np()
    mx.random.seed(0)
    rng = np.random.default_rng(0)
    x, y = mx.np.array(rng.normal(size=(256, 784)).astype("float32")), mx.np.array(rng.integers(10, size=256))
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(256, "relu", in_units=784), gluon.nn.Dense(10, in_units=256))
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step() -> None:
        with autograd.record():
            loss = loss_of(net(x), y).mean()
        loss.backward()
        trainer.step(1)

    def weights() -> bytes:
        return b"".join(parameter.data().asnumpy().tobytes() for parameter in net.collect_params().values())

    return step, mx.nd.waitall, weights


JOBS = {"torch": torch_job, "jax": jax_job, "tensorflow": tensorflow_job, "mxnet": mxnet_job}


def measure(options: argparse.Namespace) -> None:
    """One process: print the seconds of a step in each block, and what the weights are in the end."""
    step, drain, weights = JOBS[options.framework]()
    guard: Any = contextlib.nullcontext()
    if options.measure == "guard":
        from manyhands.audit.guard import guard as counting

        guard = counting("count")
    times = []
    with guard:
        for _ in range(20):
            step()
        for _ in range(options.blocks):
            drain()
            begin, busy = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step()
            drain()
            spent = time.perf_counter() - begin, time.process_time() - busy
            times.append([seconds / options.steps for seconds in spent])
    print(MARK + json.dumps({"times": times, "weights": hashlib.sha256(weights()).hexdigest()}))


def run(kind: str, options: argparse.Namespace, report: Path) -> dict[str, Any]:
    program = [__file__, "--measure", kind, "--framework", options.framework]
    program += ["--steps", str(options.steps), "--blocks", str(options.blocks)]
    command = [sys.executable, *program]
    if kind == "audit":
        command = [sys.executable, "-m", "manyhands", "audit", "--json", str(report), *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(JOBS), default="torch")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--blocks", type=int, default=9, help="timed blocks of a process")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options)
        return
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    weights = set()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                result = run(kind, options, Path(folder) / "report.json")
                times[kind] += result["times"]
                weights.add(result["weights"])
    blocks = options.rounds * options.blocks
    print(f"{options.framework}, {platform.machine()}, {blocks} blocks of {options.steps} steps of each kind")
    for name, position in (("clock", 0), ("processor", 1)):
        plain = statistics.median(block[position] for block in times["plain"])
        for kind in KINDS:
            seconds = statistics.median(block[position] for block in times[kind])
            print(f"{name:>9}, {kind}: {seconds * 1e3:.3f} ms a step, {seconds / plain - 1:+.2%}")
    print("weights: equal to the bit" if len(weights) == 1 else "weights: DIFFERENT")


if __name__ == "__main__":
    main()
