"""Several processes, as a launcher starts them on one machine or on many: the answer is that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from jax_cases import Net, difference, fit, rows, vectors
from support import free_port
from test_jax_exact import Shuffles

SCRIPT = f"""
import json, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from manyhands import jax as mh  # joins the other processes
import jax
import numpy as np
from jax_cases import Net, fit, rows, vectors
from test_jax_exact import Shuffles
from manyhands.errors import BadBatch
from manyhands.book.jax import BOOK

out = sys.argv[1]
assert BOOK.from_first(lambda: [jax.process_index(), "said"]) == [0, "said"]
options = dict(precision="fp64", run=out + "/run")
net = Net(norm=True)
net.first.kernel[...] += jax.process_index()  # the first process's weights count
fit(net, (Shuffles(), vectors(41)), 2, max_epochs=1, **options)
options = {{**options, "resume": "auto"}}
found, result = fit(Net(norm=True), (Shuffles(), vectors(41)), 2, **options)
np.savez(f"{{out}}/{{jax.process_index()}}.npz", **found)
trainer = mh.Trainer(1, devices=["virtual:0", "virtual:1"], metrics={{"rows": lambda outputs, targets: len(outputs)}})
metrics, outputs = trainer.evaluate(net, vectors(41)), trainer.predict(net, vectors(41)[0])
assert metrics["rows"] == 41, metrics
assert len(outputs) == 41 if jax.process_index() == 0 else outputs is None
try:
    fit(Net(), Shuffles(np.random.default_rng(jax.process_index())), 2, precision="fp64")
except BadBatch as error:
    print("refused:", error)
print(json.dumps([rows(result), result.devices]))
"""


def started(
    rank: int, size: int, port: int, *arguments: str, virtual: int, code: str = SCRIPT
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MANYHANDS_VIRTUAL_DEVICES": str(virtual),
    }
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Two processes with two devices each. Stopped after an epoch, too."""
    port = free_port()
    both = [started(rank, 2, port, str(tmp_path), virtual=2) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (_, errors) in zip(both, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    assert difference(found[0], found[1]) == 0
    alone, result = fit(Net(norm=True), (Shuffles(), vectors(41)), 1, precision="fp64")
    assert "virtual:1 of rank 1" in outputs[0][0]
    assert outputs[0][0].strip().splitlines()[-1] == outputs[1][0].strip().splitlines()[-1]
    assert len(rows(result)) == 2
    assert difference(found[0], alone) <= 1e-12
    for output, _ in outputs:
        assert "refused: the processes of this job are given different batches (noticed after sample 16" in output


TOO_LATE = """
import jax
jax.numpy.ones(1).block_until_ready()
from manyhands import jax as mh
from manyhands.errors import BadSettings
try:
    mh.Trainer(1, quiet=True).fit(mh.lenet(), (jax.numpy.zeros((4, 28, 28, 1)), jax.numpy.zeros(4, int)))
except BadSettings as error:
    print(error)
"""


def test_jax_that_has_started_alone_is_said() -> None:
    process = started(0, 2, free_port(), virtual=0, code=TOO_LATE)
    output, errors = process.communicate(timeout=300)
    assert "before the first array" in output, errors[-2000:]
