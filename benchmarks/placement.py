"""What `to` costs when nothing has to move, as a ratio to the framework's own call in the same run.

    python benchmarks/placement.py [torch|jax|tensorflow|mxnet]

One tensor: at most 3 microseconds over the framework's own check. A tree of 1,000 tensors: at most 1 ms.
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


def own_call(framework: str) -> tuple[Any, Callable[[Any, Any], object]]:
    """A tensor, and the framework's own way to move it where it is."""
    if framework == "torch":
        import torch

        return torch.ones(4), lambda x, device: x.to(device)
    if framework == "jax":
        import jax

        return jax.numpy.ones(4), lambda x, device: jax.device_put(x, device)
    if framework == "tensorflow":
        import tensorflow as tf

        def identity(x: Any, device: Any) -> object:
            with tf.device(device):
                return tf.identity(x)

        return tf.ones(4), identity
    import mxnet as mx

    return mx.nd.ones(4), lambda x, device: x.as_in_context(device)


def main(framework: str) -> None:
    mh = importlib.import_module(f"manyhands.{framework}")
    x, own = own_call(framework)
    device = mh.device_of(x)
    assert mh.to(x, device) is x
    tree = {"layers": [{"weight": mh.copy(x), "bias": mh.copy(x)} for _ in range(500)]}
    assert mh.to(tree, device) is tree
    one = median_microseconds(lambda: mh.to(x, device), 10_000)
    theirs = median_microseconds(lambda: own(x, device), 10_000)
    many = median_microseconds(lambda: mh.to(tree, device), 20)
    version = importlib.import_module(framework).__version__
    print(f"{framework} {version}, Python {platform.python_version()}, {platform.machine()}; medians of 9")
    print(f"  one tensor in place   {one:8.2f} us; the framework's own call {theirs:.2f} us: {one - theirs:+.2f} us")
    print(
        f"  1,000 in place        {many:8.1f} us; 1,000 own calls {1000 * theirs:.1f} us: x{many / 1000 / theirs:.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "torch")
