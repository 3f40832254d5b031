"""``--prove`` in all frameworks, without a GPU: cured lines compute the same, and decisions are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_command

pytestmark = pytest.mark.once

TORCH = """
import torch
device = torch.device("cuda")
torch.manual_seed(0)
net = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.Adam(net.parameters())
data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
loader = torch.utils.data.DataLoader(data, 8)
for step, (x, y) in enumerate(loader):
    x = x.to(device)  # pinned-copy
    y = y.to(device)  # pinned-copy
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()  # removed
    x[0, 0] = 1.0  # rewritten
    last = net(x).detach().cpu().numpy()  # read-late
"""
MAKE = {
    "torch": (TORCH, "loss.item()"),
    "jax": (
        """
import jax, jax.numpy as jnp
weights, x = jnp.ones((16, 4)), jnp.ones((8, 16))
@jax.jit
def update(weights, x):
    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((x @ weights) ** 2))(weights)
    return weights - 0.01 * gradient, loss
for step in range(12):
    weights, loss = update(weights, x)
    jax.block_until_ready(weights)  # removed
    figures = jax.device_get({"loss": loss})  # read-late
""",
        "loss.item()",
    ),
    "tensorflow": (
        """
import numpy as np, tensorflow as tf
weights, x = tf.Variable(tf.ones((16, 4))), tf.ones((8, 16))
optimizer = tf.keras.optimizers.Adam(0.1)
@tf.function
def update(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weights) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return loss
for step in range(12):
    loss = update(x)
    kept = np.asarray(weights.read_value())  # read-late
""",
        "loss.numpy()",
    ),
    "mxnet": (
        """
import mxnet as mx
from mxnet import autograd, gluon
mx.npx.set_np()
mx.random.seed(0)
net = gluon.nn.Dense(4, in_units=16)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "adam")
x = mx.np.ones((8, 16))
for step in range(12):
    with autograd.record():
        loss = (net(x) ** 2).mean()
    loss.backward()
    trainer.step(8)
    mx.npx.waitall()  # removed
    kept = loss.asnumpy()  # read-late
""",
        "loss.item()",
    ),
}
READS = """
    total = (0.0 if step == 0 else total) + READ  # read-late
    print(f"{step}: {float(loss):.3f} {total}", loss)  # read-late
    value = float(loss)  # kept
    best = value if step == 0 or value < best else best
    if loss > 1000:  # kept
        break
"""


def test_a_cured_program_computes_the_same(framework: str, tmp_path: Path) -> None:
    program, read = MAKE[framework]
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(program + READS.replace("READ", read).lstrip("\n"))
    done = run_command("audit", "--as-if-gpu", "--prove", "--warmup", "3", "--json", str(report), str(script))
    assert done.returncode == 0, done.stderr
    proof = json.loads(report.read_text())["proof"]
    assert proof["failed"] is None, done.stderr
    ways = {(line["line"], line["way"]) for line in proof["lines"]}
    marks = [(number, line.rpartition("  # ")[2]) for number, line in enumerate(script.read_text().splitlines(), 1)]
    assert ways == {mark for mark in marks if mark[1] in ("read-late", "pinned-copy", "removed", "rewritten", "kept")}
    assert proof["results"] == "equal", done.stderr
    assert proof["values"] > 4 * proof["steps"]
    assert proof["parameters"] > 0 or framework == "jax"
    assert (proof["measured"] is not None) == (framework in ("jax", "mxnet"))
    assert done.stdout.count(": ") == 12  # of the audit alone
