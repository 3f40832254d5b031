"""A framework's module loads what placement needs; everything else when it is first asked for."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest
from support import run_python

from manyhands import names
from manyhands.book import NAMES

ONE = {
    "torch": "import torch; one = torch.ones(1)",
    "jax": "import jax; one = jax.numpy.ones(1)",
    "tensorflow": "import tensorflow as tf; one = tf.ones(1)",
    "mxnet": "import mxnet as mx; one = mx.nd.ones(1)",
}


@pytest.mark.once
def test_placement_loads_neither_the_trainer_nor_parallel(framework: str) -> None:
    code = (
        f"import sys, json\n{ONE[framework]}\nbefore = set(sys.modules)\nfrom manyhands import {framework} as mh\n"
        "assert mh.to(one, mh.device_of(one)) is one\nprint(json.dumps(list(set(sys.modules) - before)))"
    )
    done = run_python(code, RANK=None, WORLD_SIZE=None, MANYHANDS_VIRTUAL_DEVICES=None)
    assert done.returncode == 0, done.stderr
    added = set(json.loads(done.stdout.splitlines()[-1]))
    unwanted = ("manyhands.training", "manyhands.parallel", "manyhands.tasks", "manyhands.schedule", "torch._dynamo")
    # JAX's module asks whether a launcher has started this process.
    allowed = {"manyhands.training", "manyhands.training.launcher"} if framework == "jax" else set()
    assert {name for name in added if name.startswith(unwanted)} == allowed
    assert not added & {"matplotlib", "rich", "safetensors", "cloudpickle", "flax", "optax", "keras"}


def test_every_name_is_there(framework: str, mh: Any) -> None:
    assert mh.__all__ == names.names(framework)
    assert dir(mh) == mh.__all__
    assert len(mh.__all__) <= 48, "a newcomer reads the list"
    for name in mh.__all__:
        assert getattr(mh, name) is getattr(mh, name) is vars(mh)[name]
        assert isinstance(getattr(mh, name), ModuleType) == (name in ("errors", "loggers"))
    everything: dict[str, Any] = {}
    exec(f"from manyhands.{framework} import *", everything)
    assert set(everything) - {"__builtins__"} == set(mh.__all__)


def test_the_books_programs_find_its_names(framework: str, mh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``from manyhands import torch as d2l``: they are not listed, and there."""
    book = importlib.import_module(f"manyhands.book.{framework}")
    assert not {*NAMES} & {*mh.__all__}
    for name in (*NAMES, "Trainer"):
        assert getattr(mh, name) is getattr(book, name), name
    with mh.Benchmark("nothing") as timed:
        pass
    assert capsys.readouterr().out.startswith("nothing: ")
    assert timed.seconds is not None
