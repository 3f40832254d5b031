"""Training with JAX on a GPU: what the CPU gives, and the choices that are only made there."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.training.options import Step

jax = pytest.importorskip("jax")


@pytest.fixture
def mh() -> Any:
    from manyhands import jax as mh

    if not mh.num_gpus():
        pytest.skip("JAX sees no GPU here")
    return mh


def trained(mh: Any, device: str, **options: Any) -> tuple[dict[str, Any], Any]:
    import numpy as np

    from manyhands.book.jax import BOOK
    from manyhands.training.data import fashion_mnist
    from manyhands.training.jax.skeleton import Skeleton, by_name

    train, test = BOOK.data(fashion_mnist.load(fashion_mnist.SUBSET_DIRECTORY), 64)
    net = BOOK.model("lenet", 0)
    trainer = mh.Trainer(1, devices=[device], lr=0.05, quiet=True, **options)
    with jax.default_matmul_precision("highest"):
        result = trainer.fit(net, (train.first(300), test.first(100)))
    numbers = Skeleton(net).numbers(net)
    return {name: np.array(one) for name, one in by_name(numbers["parameters"]).items()}, result


def test_the_gpu_gives_what_the_cpu_gives(mh: Any) -> None:
    from manyhands.cli.parity import largest_difference

    on_cpu, _ = trained(mh, "cpu", precision="fp32")
    for optimize in ("auto", "off"):
        on_gpu, result = trained(mh, "gpu:0", precision="fp32", step=Step(optimize=optimize))
        assert largest_difference(on_gpu, on_cpu) < 1e-4
        assert result.devices == ["gpu:0"]


def test_a_gpu_computes_in_bfloat16_by_itself(mh: Any) -> None:
    found, result = trained(mh, "gpu:0")
    assert any("bfloat16" in note for note in result.notes)
    assert {str(one.dtype) for one in found.values()} == {"float32"}
    plain, _ = trained(mh, "gpu:0", step=Step(optimize="off"))
    assert all(abs(found[name] - plain[name]).max() < 0.05 for name in plain)
