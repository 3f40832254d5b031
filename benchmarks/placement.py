"""What `to` costs when nothing has to move, beside the framework's own check and own move in the same run.

    python benchmarks/placement.py [torch|jax|tensorflow|mxnet]

One tensor: at most 3 microseconds over the framework's own check (`x.device == device`). A tree of 1,000 tensors: at
most 1 ms.
"""

from __future__ import annotations

import importlib
import platform
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any


def median_microseconds(work: Callable[[], object], calls: int) -> float:
    timeit.timeit(work, number=calls)  # the warm-up, apart
    return statistics.median(timeit.repeat(work, number=calls, repeat=9)) / calls * 1e6


Call = Callable[[Any, Any], object]


def own_calls(framework: str) -> tuple[Any, Call, Call]:
    """A tensor, and the framework's own ways to see where it is and to move it there."""
    if framework == "torch":
        import torch

        return torch.ones(4), lambda x, device: x.device == device, lambda x, device: x.to(device)
    if framework == "jax":
        import jax

        return jax.numpy.ones(4), lambda x, device: x.devices() == {device}, jax.device_put
    if framework == "tensorflow":
        import tensorflow as tf

        def identity(x: Any, device: Any) -> object:
            with tf.device(device):
                return tf.identity(x)

        there = tf.ones(4)
        full_name = there.device  # TensorFlow has no device objects to compare, only names
        return there, lambda x, device: x.device == full_name, identity
    import mxnet as mx

    return mx.nd.ones(4), lambda x, device: x.ctx == device, lambda x, device: x.as_in_context(device)


def main(framework: str) -> None:
    mh = importlib.import_module(f"manyhands.{framework}")
    x, check, move = own_calls(framework)
    device = mh.device_of(x)
    assert mh.to(x, device) is x
    tree = {"layers": [{"weight": mh.copy(x), "bias": mh.copy(x)} for _ in range(500)]}
    assert mh.to(tree, device) is tree
    single = median_microseconds(lambda: mh.to(x, device), 10_000)
    many = median_microseconds(lambda: mh.to(tree, device), 20)
    plain = {"check": check, "move": move}
    theirs = {name: median_microseconds(lambda call=call: call(x, device), 10_000) for name, call in plain.items()}
    version = importlib.import_module(framework).__version__
    print(f"{framework} {version}, Python {platform.python_version()}, {platform.machine()}; medians of 9")
    print(f"  one tensor in place: {single:.2f} us; 1,000 in a tree: {many:.0f} us")
    for name, microseconds in theirs.items():
        print(
            f"  the framework's own {name}: {microseconds:.2f} us, so {single - microseconds:+.2f} us for one and "
            f"x{many / 1000 / microseconds:.2f} for 1,000"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "torch")
