"""Guards in code mean the same in all frameworks: on virtual devices, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_python

pytestmark = pytest.mark.once

MAKE = {
    "torch": "import torch; make = lambda: torch.ones(4, device=mh.gpu(1))",
    "jax": "import jax, jax.numpy as jnp; make = lambda: jax.device_put(jnp.ones(4), mh.gpu(1))",
    "tensorflow": "import tensorflow as tf\ndef make():\n    with mh.gpu(1):\n        return tf.ones(4) * 1",
    "mxnet": "import mxnet as mx; mx.npx.set_np(); make = lambda: mx.np.ones(4, ctx=mh.gpu(1))",
}
CHECKS = """
import threading
from manyhands.errors import HiddenWait
x = make()
with mh.guard("count") as seen:
    float(x[0])
    float(x[1])  # manyhands: wait-ok a test
    mh.to(x, "cpu")
assert (len(seen), seen.allowed) == (1, 1), str(seen)
with mh.guard("forbid"):
    y = x * 2
    try:
        bool(y[0] > 0)
    except HiddenWait as error:
        assert "decision" in str(error)
    else:
        raise AssertionError("not forbidden")
with mh.guard("count") as seen:
    thread = threading.Thread(target=lambda: float(x[0]))
    thread.start()
    thread.join()
assert not seen, str(seen)
try:
    with mh.assert_no_stalls():
        str(x)
except HiddenWait as error:
    assert "waited 1 time:" in str(error), error
else:
    raise AssertionError("not asserted")
print("good")
"""


def test_a_guard_sees_waits(framework: str, tmp_path: Path) -> None:
    code = f"from manyhands import {framework} as mh\nmh.virtual_devices(2)\n{MAKE[framework]}\n{CHECKS}"
    script = f"{tmp_path}/program.py"  # a file: its lines, and a comment in one of them, can be read
    with open(script, "w") as file:
        file.write(code)
    done = run_python(f"import runpy; runpy.run_path({script!r}, run_name='__main__')", MANYHANDS_VIRTUAL_DEVICES="")
    assert done.stdout.endswith("good\n"), done.stdout + done.stderr


NOTHING_WATCHED = """
import unittest
import warnings
import pytest
from manyhands import FRAMEWORK as mh
from manyhands.audit.guard import HiddenWaitWarning
from manyhands.errors import NothingWatched


def wait():
    exec(ON_THE_CPU)


def test_count():
    with mh.guard("count") as seen:
        wait()
    for ask in (len, bool, list, str):
        with pytest.raises(NothingWatched, match="neither a GPU nor a virtual device.*mh.virtual_devices"):
            ask(seen)


def test_warn():
    with pytest.warns(HiddenWaitWarning, match="neither a GPU"), mh.guard("warn"):
        wait()


def test_forbid_is_skipped():
    with mh.guard("forbid"):
        raise AssertionError("it is not begun")


def test_asserted_is_skipped():
    with mh.assert_no_stalls():
        wait()


class TestCase(unittest.TestCase):
    def test_asserted_is_skipped(self):
        with mh.assert_no_stalls():
            wait()


@pytest.mark.no_stalls
def test_marked_is_skipped():
    wait()


@pytest.mark.no_stalls
def test_marked_may_fail():
    assert False, "as asserted"
"""


def test_where_there_is_no_device_nothing_is_green(framework: str, tmp_path: Path) -> None:
    """A claim about waits that nothing could see is no claim: a test with it is skipped, with the reason."""
    code = ON_THE_CPU[framework].replace("\n", ";")
    (tmp_path / "test_cases.py").write_text(
        NOTHING_WATCHED.replace("FRAMEWORK", framework).replace("exec(ON_THE_CPU)", f"exec({code!r})")
    )
    arguments = ["-q", "-rsf", "-p", "no:cacheprovider", str(tmp_path)]
    done = run_python(
        f"import pytest; pytest.main({arguments!r})", MANYHANDS_VIRTUAL_DEVICES="", CUDA_VISIBLE_DEVICES=""
    )
    assert "1 failed, 2 passed, 4 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_cases.py::test_marked_may_fail" in done.stdout
    assert "no_stalls: no hidden wait could be seen: there is neither a GPU" in done.stdout


ON_THE_CPU = {
    "torch": "import torch\nloss = torch.ones(())\nfloat(loss)",
    "jax": "import jax\nloss = jax.numpy.ones(())\nfloat(loss)\njax.block_until_ready(loss)\njax.device_get(loss)",
    "tensorflow": "import tensorflow as tf\nloss = tf.ones(())\nfloat(loss)\nloss.numpy()",
    "mxnet": "import mxnet as mx\nloss = mx.nd.ones(1)\nloss.asscalar()\nloss.wait_to_read()\nmx.nd.waitall()",
}


def test_on_a_cpu_nothing_is_a_hidden_wait(framework: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = "".join(f"    {line}\n" for line in ON_THE_CPU[framework].splitlines())
    program.write_text(f"for step in range(9):\n{lines}")
    done = run_python(
        f"from manyhands.cli import main; raise SystemExit(main(['audit', {str(program)!r}]))",
        MANYHANDS_VIRTUAL_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert "no tensor was on a GPU: there was nothing to audit" in done.stderr, done.stderr
