"""PyTorch's attention layers are one fast operation in eval mode: a trace has to have it, or results differ."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.modules import activation  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from manyhands.backends.torch import compat, planning  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

pytestmark = pytest.mark.skipif(
    compat.count_function_modes() > 0, reason="beside a function mode, plain execution takes the longer path, too"
)
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
PLAIN = (torch.overrides.has_torch_function, activation._is_make_fx_tracing)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return {
        "attention": nn.MultiheadAttention(16, 2, batch_first=True).eval(),
        "layer": layer.eval(),
        "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
    }


def called(net: nn.Module) -> Any:
    @torch.no_grad()
    def call(x: torch.Tensor) -> Any:
        return net(x, x, x) if isinstance(net, nn.MultiheadAttention) else net(x)

    return call


def operations(function: Any, **how: Any) -> list[str]:
    trace = planning.trace(function, planning.call((X,), {}), **how)
    return [str(step.node.target) for step in trace.steps]


@pytest.mark.parametrize("name", ["attention", "layer", "encoder"])
def test_the_operation_of_plain_execution(name: str) -> None:
    function = called(layers()[name])
    fast = "_native_multi_head_attention" if name == "attention" else "_transformer_encoder_layer_fwd"
    assert all(fast in operation for operation in operations(function))
    assert not any(fast in operation for operation in operations(function, to_compile=True))
    planned = Parallel(function, planning, synchronous=True)
    for _ in range(2):
        for ours, plain in zip(planned(X), function(X), strict=True):
            assert torch.equal(ours, plain)
    assert not planned.planned.way.is_plain, planned.explain()
    assert (torch.overrides.has_torch_function, activation._is_make_fx_tracing) == PLAIN


def test_training_and_a_mode_of_the_user_take_the_longer_path() -> None:
    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    net = layers()["attention"]
    with Mine(), compat.attention_as_in_plain_execution():
        assert torch.overrides.has_torch_function((X,))
    assert len(operations(called(net.train()))) > 5


def test_other_threads_get_the_answers_that_they_got() -> None:
    answers: dict[str, tuple[bool, bool]] = {}

    def ask(name: str) -> None:
        class Sub(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_: Any, **__: Any) -> Any:
                raise NotImplementedError

        has = torch.overrides.has_torch_function
        answers[name] = bool(has((X,))), bool(has((X.as_subclass(Sub),)))

    with compat.attention_as_in_plain_execution():
        thread = threading.Thread(target=ask, args=("other",))
        thread.start()
        thread.join()
        ask("own")
    assert answers == {"other": (False, True), "own": (False, True)}
